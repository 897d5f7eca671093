"""Tools and reasoning in POST /v1/chat/completions, over real HTTP, from a scripted verifier."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from foretoken.config import build
from foretoken.errors import ConfigError
from gateway.config import GatewaySettings
from gateway.server import Gateway
from gateway.tokenizer import Tokenizer
from protos import common_pb2
from tests.gateway.conftest import MODEL, Stack, events, train_tokenizer
from tests.gateway.scripted_verifier import LENGTH, STOP, Player, ScriptedVerifier, serving, steps
from tests.support.tcp_clients import JSON_TYPE

pytestmark = pytest.mark.anyio
URL = "/v1/chat/completions"
HISTORY = (
    "{% for t in tools or [] %}[{{ t.function.name }}:{{ t.function.parameters | tojson }}]{% endfor %}"
    "{% for m in messages %}<|user|>{{ m.role }}: {% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.id }}={{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %} {{ k }}:{{ v }}{% endfor %}{% endfor %}"
    "{{ m.tool_call_id }}\n{% endfor %}"
)
HERMES = HISTORY + "{# <tool_call> #}assistant: "
THINKING = HISTORY + "assistant: {% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
OPENED = HISTORY + "{# </think> #}assistant: <think>\n"
MISTRAL = HISTORY + "{# [TOOL_CALLS] #}assistant: "
UNKNOWN = HISTORY + "assistant: "
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 12}}\n</tool_call>'
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "tools": [ADD]}
Start = Callable[..., AbstractAsyncContextManager[Stack]]


@pytest.fixture
def start(settings: GatewaySettings, tmp_path: Path) -> Start:
    """Start a gateway with a chat template, and marks as special tokens."""

    @contextlib.asynccontextmanager
    async def start(template: str | None, *special: str, **more: Any) -> AsyncIterator[Stack]:
        folder = train_tokenizer(tmp_path / "model", chat_template=template)
        backend = Backend.from_file(str(folder / "tokenizer.json"))
        backend.add_special_tokens([AddedToken(mark, special=True) for mark in special])
        backend.save(str(folder / "tokenizer.json"))
        tokenizer = Tokenizer(folder)
        chosen = settings.model_copy(update={"model": folder, **more})
        verifier = ScriptedVerifier(tokenizer.vocab_size, 2000)
        url = f"http://127.0.0.1:{chosen.port}"
        async with (
            serving(verifier, Path(chosen.verifiers[0].removeprefix("unix:"))),
            Gateway(chosen) as gateway,
            httpx.AsyncClient(base_url=url, timeout=None, headers=JSON_TYPE, verify=False) as http,
        ):
            verifier.gateway = gateway
            await gateway.verifiers.wait_up()
            yield Stack(chosen, gateway, verifier, tokenizer, http)

    return start


def say(stack: Stack, text: str, reason: int = STOP, size: int = 3) -> None:
    """Let the verifier write a text, a few tokens a step."""
    ids = stack.ids(text)
    stack.verifier.script = steps(*(ids[i : i + size] for i in range(0, len(ids), size)), reason=reason)


async def ask(stack: Stack, **fields: Any) -> tuple[dict[str, Any], str]:
    """Return a whole answer's message, without the calls' ids, and its finish reason."""
    answer = await stack.http.post(URL, json=ASK | fields)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    message = choice["message"]
    for call in message.get("tool_calls", ()):
        assert len(call.pop("id")) == 9
    return message, choice["finish_reason"]


async def stream(stack: Stack, **fields: Any) -> tuple[dict[str, Any], str]:
    """Return the message that a stream's deltas make, like ``ask``."""
    answer = await stack.http.post(URL, json=ASK | {"stream": True} | fields)
    message: dict[str, Any] = {}
    reason = ""
    for chunk in events(answer.text):
        (choice,) = chunk["choices"]
        for key, value in choice["delta"].items():
            if key != "tool_calls":
                message[key] = message.get(key, "") + value
                continue
            for part in value:
                calls = message.setdefault("tool_calls", [])
                if "id" in part:
                    assert part["index"] == len(calls) and part["type"] == "function"
                    calls.append({"type": "function", "function": dict(part["function"])})
                else:
                    calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
        reason = choice["finish_reason"] or reason
    must_call = fields.get("tool_choice", "auto") != "auto"
    message["content"] = message["content"] or (None if "tool_calls" in message or must_call else "")
    return message | {"refusal": None}, reason


async def test_a_call_whole_and_streamed(start: Start) -> None:
    async with start(HERMES) as stack:
        for size in (1, 3, 100):
            say(stack, f"Let me add.\n{CALL}\n{CALL}", size=size)
            wanted: dict[str, Any] = {
                "role": "assistant",
                "content": "Let me add.",
                "refusal": None,
                "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": '{"a": 12}'}}] * 2,
            }
            assert await ask(stack) == (wanted, "tool_calls")
            assert await stream(stack) == (wanted, "tool_calls")
        one = {**wanted, "tool_calls": wanted["tool_calls"][:1]}
        assert await ask(stack, parallel_tool_calls=False) == (one, "tool_calls")
        assert await stream(stack, parallel_tool_calls=False) == (one, "tool_calls")
        say(stack, CALL)
        message, reason = await ask(stack)
        assert message["content"] is None and reason == "tool_calls"
        say(stack, "Just < text.\n")
        assert await ask(stack) == ({"role": "assistant", "content": "Just < text.\n", "refusal": None}, "stop")
        assert not stack.verifier.submitted[-1].sampling.WhichOneof("grammar")
        prompt = stack.tokenizer.decode(stack.verifier.submitted[-1].prompt_token_ids, skip_special_tokens=False)
        assert prompt.startswith('[add:{"type": "object", "properties": {"a": {"type": "integer"}}')


async def test_an_output_cut_inside_a_call_ends_for_its_length(start: Start) -> None:
    async with start(HERMES) as stack:
        say(stack, CALL[:46], LENGTH)
        message, reason = await ask(stack)
        assert reason == "length"
        assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a":'}
        assert await stream(stack) == (message, reason)


async def test_a_form_beside_a_forced_call_is_refused(start: Start) -> None:
    async with start(HERMES) as stack:
        for field, value in (("ebnf", 'root ::= "a"'), ("regex", "a"), ("structured_outputs", {"choice": ["a"]})):
            answer = await stack.http.post(URL, json=ASK | {"tool_choice": "required", field: value})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text
        assert not stack.verifier.submitted


async def test_a_forced_call_cut_before_its_name_is_no_content(start: Start) -> None:
    strict = {"type": "function", "function": {**ADD["function"], "strict": True}}
    async with start(HERMES) as stack:
        for cut in ("<tool", "<tool_call>", CALL[:20]):
            for forced in (
                {"tool_choice": "required"},
                {"tool_choice": {"type": "function", "function": {"name": "add"}}},
            ):
                say(stack, cut, LENGTH)
                message, reason = await ask(stack, **forced)
                assert (message["content"], reason) == (None, "length") and "tool_calls" not in message
                assert await stream(stack, **forced) == (message, reason)
            say(stack, f"{CALL}\n{cut}", LENGTH)
            message, reason = await ask(stack, tool_choice="required")
            assert (message["content"], reason) == (None, "length") and len(message["tool_calls"]) == 1
            assert await stream(stack, tool_choice="required") == (message, reason)
        say(stack, f"Well.\n{CALL[:20]}", LENGTH)
        assert (await ask(stack, tools=[strict]))[0]["content"] == "Well."
        # Without a grammar the text may be no call.
        assert (await ask(stack))[0]["content"] == f"Well.\n{CALL[:20]}"
        say(stack, f"{CALL}\n{CALL[:20]}", LENGTH)
        schema = ADD["function"]["parameters"]
        tool = {"name": "add", "input_schema": schema}
        body = {"model": MODEL, "max_tokens": 9, "messages": ASK["messages"], "tools": [tool]}
        answer = await stack.http.post("/v1/messages", json=body | {"tool_choice": {"type": "any"}})
        assert [block["type"] for block in answer.json()["content"]] == ["tool_use"]
        tool = {"type": "function", "name": "add", "parameters": schema}
        body = {"model": MODEL, "input": "hi", "tools": [tool], "tool_choice": "required"}
        answer = await stack.http.post("/v1/responses", json=body)
        assert [item["type"] for item in answer.json()["output"]] == ["function_call"]


async def test_the_openai_sdks_stream_helper_reads_calls(start: Start) -> None:
    async with start(HERMES) as stack:
        say(stack, f"Well. {CALL}")
        client = openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)
        names = []
        async with client, client.chat.completions.stream(model=MODEL, **ASK) as running:
            async for event in running:
                names.append(event.type)
            answer = await running.get_final_completion()
        (choice,) = answer.choices
        assert choice.message.content == "Well." and choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 12})
        assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= set(names)


async def test_a_forced_call_gets_a_grammar_and_its_errors_name_tools(start: Start) -> None:
    async with start(HERMES) as stack:
        say(stack, CALL)
        named = {"type": "function", "function": {"name": "add"}}
        for choice in ("required", named):
            assert (await ask(stack, tool_choice=choice))[1] == "tool_calls"
            assert '"{\\"name\\": \\"add\\", ' in stack.verifier.submitted[-1].sampling.lark
        strict = {"type": "function", "function": {**ADD["function"], "strict": True}}
        await ask(stack, tools=[strict])
        assert "reply" in stack.verifier.submitted[-1].sampling.lark
        await ask(stack, response_format={"type": "json_object"})
        assert "answer: calls | content" in stack.verifier.submitted[-1].sampling.lark

        async def refuse(player: Player) -> None:
            player.error(grpc.StatusCode.INVALID_ARGUMENT, "no such schema", field="lark")

        stack.verifier.script = refuse
        answer = await stack.http.post(URL, json=ASK | {"tool_choice": "required"})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"


async def test_a_bad_schema_in_a_grammar_is_named_without_the_grammar(start: Start) -> None:
    """The demo model's verifier writes such errors in tests/integration/test_tool_calls.py."""
    line = 0

    async def refuse(player: Player) -> None:
        message = f"the grammar cannot be used: at {line}(9): failed to compile JSON schema: Invalid type: foo"
        player.error(grpc.StatusCode.INVALID_ARGUMENT, message, field="lark")

    bad = {"type": "object", "properties": {"b": {"type": "foo"}}}
    tools = [ADD, {"type": "function", "function": {"name": "sub", "parameters": bad}}]
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": bad}}
    async with start(HERMES) as stack:
        say(stack, CALL)
        await ask(stack, tools=tools, response_format=schema)
        grammar = stack.verifier.submitted[-1].sampling.lark.split("\n")
        stack.verifier.script = refuse
        wanted = {
            "args_1": ("tools", "the JSON schema of the tool 'sub' cannot be used: Invalid type: foo"),
            "content": ("response_format", "the JSON schema cannot be used: Invalid type: foo"),
        }
        for rule, (field, message) in wanted.items():
            (line,) = (number for number, text in enumerate(grammar, 1) if text.startswith(f"{rule}: %json"))
            for stream in (False, True):
                answer = await stack.http.post(
                    URL, json=ASK | {"tools": tools, "response_format": schema, "stream": stream}
                )
                assert answer.status_code == 400
                error = answer.json()["error"]
                assert (error["param"], error["message"]) == (field, message)


async def test_without_a_choice_tools_are_not_shown_and_text_stays_text(start: Start) -> None:
    async with start(HERMES) as stack:
        say(stack, CALL)
        for fields in ({"tool_choice": "none"}, {"tools": [], "tool_choice": "auto"}):
            assert await ask(stack, **fields) == ({"role": "assistant", "content": CALL, "refusal": None}, "stop")
            prompt = stack.tokenizer.decode(stack.verifier.submitted[-1].prompt_token_ids, skip_special_tokens=False)
            assert prompt.startswith("<|user|>")


async def test_special_marks_are_read_but_never_shown(start: Start) -> None:
    call = '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]'
    async with start(MISTRAL, "[TOOL_CALLS]") as stack:
        say(stack, call, size=1)
        message, reason = await ask(stack)
        assert message["tool_calls"][0]["function"]["arguments"] == '{"a": 1}' and reason == "tool_calls"
        assert await stream(stack) == (message, reason)
        say(stack, "[TOOL_CALLS]what?<|end|>", size=1)
        assert (await ask(stack))[0]["content"] == "what?"
        assert (await ask(stack, skip_special_tokens=False))[0]["content"] == "[TOOL_CALLS]what?<|end|>"
        # A chat without tools hides special tokens as before.
        say(stack, call, size=1)
        assert (await ask(stack, tools=[]))[0]["content"] == call.removeprefix("[TOOL_CALLS]")
        await ask(stack, tool_choice="required", tools=[ADD])
        mark = stack.tokenizer.special_ids["[TOOL_CALLS]"]
        assert f"calls: <[{mark}]>" in stack.verifier.submitted[-1].sampling.lark


async def test_calls_and_results_go_through_the_template(start: Start) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "two",
            "tool_calls": [
                {"id": "c1", "type": "function", "index": 0, "function": {"name": "add", "arguments": '{"a": 2}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "4"}]},
    ]
    async with start(HERMES) as stack:
        await ask(stack, messages=messages, tools=[])
        prompt = stack.tokenizer.decode(stack.verifier.submitted[-1].prompt_token_ids, skip_special_tokens=False)
        assert prompt == "<|user|>user: hi\n<|user|>assistant: (two)c1=add a:2\n<|user|>tool: 4c1\nassistant: "
        tokenized = (await stack.http.post("/tokenize", json={"messages": messages, "tools": [ADD]})).json()
        assert stack.tokenizer.decode(tokenized["tokens"]).startswith("[add:")


BAD: list[tuple[str, dict[str, Any]]] = [
    ("tools.0.function.name", {"tools": [{"type": "function", "function": {}}]}),
    ("tools.0", {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
    ("tools.0", {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]}),
    ("tools.0.type", {"tools": [{"type": "custom", "function": {"name": "a"}}]}),
    ("tools", {"tools": [ADD, ADD]}),
    ("tools", {"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}),
    ("tools", {"tools": [{**ADD, "function": {"name": "a", "parameters": {"title": "x" * 600_000}}}]}),
    ("tool_choice", {"tool_choice": "maybe"}),
    ("tool_choice", {"tool_choice": {"type": "function", "function": {"name": "other"}}}),
    ("tool_choice", {"tools": [], "tool_choice": "required"}),
    ("functions", {"functions": [{"name": "add"}]}),
    ("messages.0.tool_calls.0.function", {"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}),
]


async def test_bad_tools_are_named(start: Start) -> None:
    async with start(HERMES) as stack:
        for field, fields in BAD:
            answer = await stack.http.post(URL, json=ASK | fields)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == field, (field, answer.text)
        assert not stack.verifier.submitted


async def test_a_model_without_tools_says_so(stack: Stack, start: Start) -> None:
    answer = await stack.http.post(URL, json=ASK)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"
    assert "chat template" in answer.json()["error"]["message"]
    assert (await stack.http.post(URL, json=ASK | {"tool_choice": "none"})).status_code == 200


async def test_a_model_without_a_chat_template_says_so_with_tools_and_without(start: Start) -> None:
    async with start(None) as stack:
        for fields in ({}, {"tools": []}, {"tool_choice": "required"}):
            answer = await stack.http.post(URL, json=ASK | fields)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages"
            assert answer.json()["error"]["message"].startswith("this model has no chat template")


async def test_a_parser_by_flag(start: Start) -> None:
    async with start(UNKNOWN) as stack:
        answer = await stack.http.post(URL, json=ASK)
        assert answer.status_code == 400 and "--tool-call-parser" in answer.json()["error"]["message"]
    async with start(UNKNOWN, tool_call_parser="qwen25") as stack:
        say(stack, CALL)
        assert (await ask(stack))[1] == "tool_calls"
    async with start(HERMES, tool_call_parser="none") as stack:
        say(stack, CALL)
        assert (await ask(stack))[0]["content"] == CALL
        answer = await stack.http.post(URL, json=ASK | {"tool_choice": "required"})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"


def test_an_unknown_parser_is_refused(settings: GatewaySettings) -> None:
    for field in ("tool_call_parser", "reasoning_parser"):
        with pytest.raises(ConfigError) as caught:
            build(GatewaySettings, settings.model_dump() | {field: "bad-name"})
        assert caught.value.message.startswith(f"--{field.replace('_', '-')}: expected one of auto, none, ")
        assert caught.value.message.count("bad-name") == 1


async def test_logprobs_and_sources_of_a_call_stay_complete(start: Start) -> None:
    async with start(HERMES) as stack:
        ids = stack.ids(CALL)

        async def play(player: Player) -> None:
            for token_id in ids:
                entry = common_pb2.TokenLogprobs(token_id=token_id, logprob=-0.5, rank=1)
                player.tokens([token_id], logprobs=[entry])
                await player.taken()
            player.finish(STOP)

        stack.verifier.script = play
        body = ASK | {"logprobs": True, "return_token_sources": True, "stream": True, "n": 2}
        for index in (0, 1):
            choices = [
                choice
                for chunk in events((await stack.http.post(URL, json=body)).text)
                for choice in chunk["choices"]
                if choice["index"] == index
            ]
            entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
            assert "".join(entry["token"] for entry in entries) == CALL
            assert [token for choice in choices[1:] for token in choice["token_ids"]] == ids
            assert choices[-1]["finish_reason"] == "tool_calls"


async def test_reasoning_whole_and_streamed(start: Start) -> None:
    text = "<think>\nFirst < second.\n</think>\n\nHello.\n"
    wanted = {"role": "assistant", "content": "Hello.\n", "refusal": None, "reasoning_content": "First < second."}
    async with start(THINKING.replace("{% if", "{# </think> #}{% if")) as stack:
        for size in (1, 4, 100):
            say(stack, text, size=size)
            assert await ask(stack, tools=[]) == (wanted, "stop")
            assert await stream(stack, tools=[]) == (wanted, "stop")
        # Closed by the template: the answer begins at once.
        say(stack, "Hello.")
        message, _ = await ask(stack, tools=[], chat_template_kwargs={"enable_thinking": False})
        assert message == {"role": "assistant", "content": "Hello.", "refusal": None}
        say(stack, "No thoughts.")
        assert (await ask(stack, tools=[]))[0] == {"role": "assistant", "content": "No thoughts.", "refusal": None}
        # A grammar begins after the reasoning, and at once if there is none.
        await ask(stack, tools=[], response_format={"type": "json_object"})
        assert "thoughts" in stack.verifier.submitted[-1].sampling.lark
        fields = {"tools": [], "response_format": {"type": "json_object"}}
        await ask(stack, **fields, chat_template_kwargs={"enable_thinking": False})
        assert stack.verifier.submitted[-1].sampling.WhichOneof("grammar") == "json_object"
    async with start(OPENED, reasoning_parser="none") as stack:
        say(stack, text)
        assert (await ask(stack, tools=[]))[0]["content"] == text


@pytest.mark.parametrize("special", [(), ("<think>", "</think>")])
async def test_reasoning_is_left_out_or_stays_in_the_content(start: Start, special: tuple[str, ...]) -> None:
    text = "<think>\nFirst <tool_call> second.\n</think>\n\nHello.\n"
    with_marks = {"role": "assistant", "content": text, "refusal": None}
    without = {**with_marks, "content": "Hello.\n"}
    apart = {**without, "reasoning_content": "First <tool_call> second."}
    async with start(HERMES.replace("{#", "{# </think>"), *special, reasoning_parser="qwen3") as stack:
        for size in (1, 4, 100):
            say(stack, text, size=size)
            for fields, wanted in (
                ({"include_reasoning": True, "separate_reasoning": True}, apart),
                ({"include_reasoning": None, "separate_reasoning": None}, apart),
                ({"include_reasoning": False}, without),
                ({"separate_reasoning": False}, with_marks),
                ({"include_reasoning": False, "separate_reasoning": False}, without),
            ):
                for tools in ([], [ADD]):
                    assert await ask(stack, tools=tools, **fields) == (wanted, "stop")
                    assert await stream(stack, tools=tools, **fields) == (wanted, "stop")
            # Calls after it are calls, and text that only begins like a mark is content.
            say(stack, f"<think>Hm.</think>\n{CALL}", size=size)
            message, reason = await ask(stack, separate_reasoning=False)
            assert message["content"] == "<think>Hm.</think>\n" and reason == "tool_calls"
            assert await stream(stack, separate_reasoning=False) == (message, reason)
            for odd in ("<thin", "<there", "<think>Cut </th"):
                say(stack, odd, size=size)
                wanted = {"role": "assistant", "content": odd, "refusal": None}
                assert (await ask(stack, tools=[], separate_reasoning=False))[0] == wanted
                assert (await stream(stack, tools=[], separate_reasoning=False))[0] == wanted


async def test_reasoning_that_the_template_opens_then_a_call(start: Start) -> None:
    async with start(OPENED, "</think>", tool_call_parser="hermes") as stack:
        say(stack, f"Hm, <tool_call>?</think>\n\n{CALL}", size=2)
        message, reason = await ask(stack)
        assert message["reasoning_content"] == "Hm, <tool_call>?" and message["content"] is None
        assert message["tool_calls"][0]["function"]["arguments"] == '{"a": 12}' and reason == "tool_calls"
        assert await stream(stack) == (message, reason)
        say(stack, "Cut while it thi", LENGTH)
        assert await ask(stack) == (
            {"role": "assistant", "content": "", "refusal": None, "reasoning_content": "Cut while it thi"},
            "length",
        )
