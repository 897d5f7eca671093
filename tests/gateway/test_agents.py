"""Reasoning and tool calls over /v1/responses and /v1/messages, by the real clients of both."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from gateway import generation
from gateway.config import GatewaySettings
from gateway.tokenizer import Tokenizer
from tests.gateway import test_messages, test_responses
from tests.gateway.conftest import MODEL, Stack, run_stack, train_tokenizer
from tests.gateway.deployment import deployment, silent
from tests.gateway.scripted_verifier import LENGTH, STOP, Player, steps

pytestmark = pytest.mark.anyio

# A model of Qwen3's kind: it thinks unless told not to, and writes calls as Hermes does.
TEMPLATE = (
    "{% if tools %}tools:{% for t in tools %} {{ t.function.name }}{% endfor %}{{ '\\n' }}{% endif %}"
    "{% for m in messages %}<|user|>{{ m.role }}: "
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}"
    "</tool_call>{% endfor %}{% if m.tool_call_id %} of {{ m.tool_call_id }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
THOUGHT = "<think>\nhm, well\n</think>\n\n"
CALLS = (
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
REPLY = f"{THOUGHT}Let me see.\n{CALLS}"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
RESPONSES_TOOLS: Any = [
    {"type": "function", "name": "add", "parameters": SCHEMA, "strict": False, "description": "adds"},
    {"type": "function", "name": "now", "parameters": {"type": "object"}, "strict": False},
]
MESSAGES_TOOLS: Any = [
    {"name": "add", "input_schema": SCHEMA, "description": "adds", "cache_control": {"type": "ephemeral"}},
    {"name": "now", "input_schema": {"type": "object"}, "type": "custom"},
]
HI: Any = {"role": "user", "content": "hi"}


@pytest.fixture
async def agents(settings: GatewaySettings, tmp_path: Path) -> AsyncIterator[Stack]:
    folder = train_tokenizer(tmp_path / "thinking", chat_template=TEMPLATE)
    settings = settings.model_copy(update={"model": folder})
    async for stack in run_stack(settings, Tokenizer(folder), tmp_path / "v.sock", max_model_len=1024):
        say(stack, REPLY)
        yield stack


def say(stack: Stack, text: str, reason: int = STOP) -> None:
    """Let the model write a text in steps of three tokens."""
    ids = stack.ids(text)
    stack.verifier.script = steps(*[ids[start : start + 3] for start in range(0, len(ids), 3)], reason=reason)


def prompt(stack: Stack) -> str:
    return stack.tokenizer.decode(stack.verifier.submitted[-1].prompt_token_ids, skip_special_tokens=False)


def item_texts(items: list[dict[str, Any]]) -> list[Any]:
    """Return what a response's items say, without their ids."""
    texts: list[Any] = []
    for item in items:
        assert item["status"] == "completed"
        if item["type"] == "function_call":
            texts.append((item["name"], json.loads(item["arguments"])))
        else:
            texts.append((item["type"], item["content"][0]["text"]))
    return texts


ITEMS = [("reasoning", "hm, well"), ("message", "Let me see."), ("add", {"a": 1, "b": [2]}), ("now", {})]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_has_reasoning_text_and_calls(agents: Stack, stream: bool) -> None:
    body = {"input": "hi", "tools": RESPONSES_TOOLS, "stream": stream, "reasoning": {"effort": "low"}}
    answer = await agents.http.post(test_responses.URL, json=body)
    found = test_responses.events(answer.text) if stream else []
    response = found[-1]["response"] if stream else answer.json()
    assert item_texts(response["output"]) == ITEMS
    assert response["status"] == "completed" and response["tools"] == RESPONSES_TOOLS
    usage = response["usage"]
    assert usage["output_tokens"] == len(agents.ids(REPLY))
    # Of "<think>", "hm, well" and the blanks around it.
    thought = THOUGHT.partition("</think>")[0]
    assert abs(usage["output_tokens_details"]["reasoning_tokens"] - len(agents.ids(thought))) <= 10
    assert prompt(agents).startswith("tools: add now\n")
    # The items in the events are those of the response, piece by piece.
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert not stream or done == response["output"]
    for kind, place in (("reasoning_text", 0), ("output_text", 1), ("function_call_arguments", 2)):
        deltas = [event["delta"] for event in found if event["type"] == f"response.{kind}.delta"]
        item = response["output"][place]
        whole = item["arguments"] + "{}" if place == 2 else item["content"][0]["text"]
        assert not stream or "".join(deltas) == whole


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_has_thinking_text_and_tool_use(agents: Stack, stream: bool) -> None:
    body = {"max_tokens": 500, "messages": [HI], "tools": MESSAGES_TOOLS, "stream": stream}
    answer = await agents.http.post(test_messages.URL, json=body)
    if stream:
        found = test_messages.events(answer.text)
        assert found[-2]["delta"]["stop_reason"] == "tool_use"
        kinds = [event["delta"]["type"] for event in found if event["type"] == "content_block_delta"]
        assert list(dict.fromkeys(kinds)) == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta"]
        return
    message = answer.json()
    thinking, text, add, now = message["content"]
    assert thinking == {"type": "thinking", "thinking": "hm, well", "signature": ""}
    assert text == {"type": "text", "text": "Let me see."}
    assert (add["type"], add["name"], add["input"]) == ("tool_use", "add", {"a": 1, "b": [2]})
    assert (now["type"], now["name"], now["input"]) == ("tool_use", "now", {})
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert message["usage"]["output_tokens_details"]["thinking_tokens"] > 0


async def test_the_openai_client_takes_a_turn_with_tools(agents: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{agents.url}/v1", api_key="none", max_retries=0) as api:
        async with api.responses.stream(model=MODEL, input="hi", tools=RESPONSES_TOOLS) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_response()
        assert kinds.count("response.function_call_arguments.done") == 2
        created = await api.responses.create(model=MODEL, input="hi", tools=RESPONSES_TOOLS)
        calls = [item for item in created.output if item.type == "function_call"]
        assert [call.name for call in calls] == ["add", "now"]
        assert [item.type for item in streamed.output] == [item.type for item in created.output]
        say(agents, f"{THOUGHT}three")
        results: Any = [
            {"type": "function_call_output", "call_id": call.call_id, "output": f"r{number}"}
            for number, call in enumerate(calls)
        ]
        history: Any = [HI, *created.output, *results]
        answer = await api.responses.create(model=MODEL, input=history, tools=RESPONSES_TOOLS)
    assert answer.output_text == "three"
    first, second = (call.call_id for call in calls)
    assert prompt(agents) == (
        "tools: add now\n<|user|>user: hi\n<|user|>assistant: <think>hm, well</think>Let me see."
        f'<tool_call>{first} add {{"a": 1, "b": [2]}}</tool_call><tool_call>{second} now {{}}</tool_call>\n'
        f"<|user|>tool: r0 of {first}\n<|user|>tool: r1 of {second}\nassistant: "
    )


async def test_the_anthropic_client_takes_a_turn_with_tools(agents: Stack) -> None:
    async with anthropic.AsyncAnthropic(base_url=agents.url, api_key="none", max_retries=0) as api:
        async with api.messages.stream(model=MODEL, max_tokens=500, messages=[HI], tools=MESSAGES_TOOLS) as stream:
            streamed = await stream.get_final_message()
        created = await api.messages.create(model=MODEL, max_tokens=500, messages=[HI], tools=MESSAGES_TOOLS)
        ids = [block.id for block in created.content if block.type == "tool_use"]
        for message in (streamed, created):
            uses = [(block.name, block.input) for block in message.content if block.type == "tool_use"]
            assert uses == [("add", {"a": 1, "b": [2]}), ("now", {})]
        say(agents, f"{THOUGHT}three")
        results: Any = [
            {"type": "tool_result", "tool_use_id": ids[0], "content": "r0"},
            {"type": "tool_result", "tool_use_id": ids[1], "content": [{"type": "text", "text": "r1"}]},
            {"type": "text", "text": "go on"},
        ]
        history: Any = [HI, {"role": "assistant", "content": created.content}, {"role": "user", "content": results}]
        answer = await api.messages.create(model=MODEL, max_tokens=500, messages=history, tools=MESSAGES_TOOLS)
        counted = await api.messages.count_tokens(model=MODEL, messages=history, tools=MESSAGES_TOOLS)
    assert [block.type for block in answer.content] == ["thinking", "text"] and answer.stop_reason == "end_turn"
    assert counted.input_tokens == answer.usage.input_tokens
    assert prompt(agents) == (
        "tools: add now\n<|user|>user: hi\n<|user|>assistant: <think>hm, well</think>Let me see."
        f'<tool_call>{ids[0]} add {{"a": 1, "b": [2]}}</tool_call><tool_call>{ids[1]} now {{}}</tool_call>\n'
        f"<|user|>tool: r0 of {ids[0]}\n<|user|>tool: r1 of {ids[1]}\n<|user|>user: go on\nassistant: "
    )


async def test_a_request_as_claude_code_sends_it(agents: Stack) -> None:
    body = {
        "model": MODEL,
        "max_tokens": 400,
        "stream": True,
        "system": [
            {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        ],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<reminder>x</reminder>"},
                    {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}},
                ],
            }
        ],
        "tools": MESSAGES_TOOLS,
        "metadata": {"user_id": "user_1_account__session_2"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
        "x-api-key": "none",
    }
    answer = await agents.http.post(f"{test_messages.URL}?beta=true", json=body, headers=headers)
    assert test_messages.events(answer.text)[-2]["delta"]["stop_reason"] == "tool_use"
    assert "system: You are an agent.\nBe brief.\n<|user|>user: <reminder>x</reminder>\nhi\n" in prompt(agents)


@pytest.mark.parametrize(("kind", "end"), [("enabled", "assistant: "), ("disabled", "<think></think>")])
async def test_thinking_sets_the_templates_switch(agents: Stack, kind: str, end: str) -> None:
    body = {"max_tokens": 500, "messages": [HI], "thinking": {"type": kind}}
    answer = (await agents.http.post(test_messages.URL, json=body)).json()
    assert prompt(agents).endswith(end)
    # The template closed the reasoning, so all text is content.
    assert [block["type"] for block in answer["content"]] == (["thinking", "text"] if kind == "enabled" else ["text"])


async def test_thinking_may_be_left_out_of_the_answer(agents: Stack) -> None:
    thinking = {"type": "adaptive", "display": "omitted"}
    body = {"max_tokens": 500, "messages": [HI], "thinking": thinking, "stream": True}
    found = test_messages.events((await agents.http.post(test_messages.URL, json=body)).text)
    assert found[1]["content_block"]["type"] == "thinking"
    assert [event["delta"]["type"] for event in found[2:3]] == ["signature_delta"]


async def test_forced_calls_have_a_grammar_and_errors_name_the_apis_fields(agents: Stack) -> None:
    forced: list[tuple[str, dict[str, Any]]] = [
        (test_responses.URL, {"input": "hi", "tools": RESPONSES_TOOLS, "tool_choice": "required"}),
        (
            test_responses.URL,
            {"input": "hi", "tools": RESPONSES_TOOLS, "tool_choice": {"type": "function", "name": "add"}},
        ),
        (
            test_messages.URL,
            {"max_tokens": 9, "messages": [HI], "tools": MESSAGES_TOOLS, "tool_choice": {"type": "any"}},
        ),
        (
            test_messages.URL,
            {
                "max_tokens": 9,
                "messages": [HI],
                "tools": MESSAGES_TOOLS,
                "tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": True},
            },
        ),
    ]
    for url, body in forced:
        assert (await agents.http.post(url, json=body)).status_code == 200
        assert "add" in agents.verifier.submitted[-1].sampling.lark
    for url, body in forced:
        choice = {"type": "tool" if url == test_messages.URL else "function", "name": "other"}
        answer = await agents.http.post(url, json={**body, "tool_choice": choice})
        assert answer.status_code == 400 and "tool_choice" in answer.json()["error"]["message"]
    only_now = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]}
    await agents.http.post(test_responses.URL, json={"input": "hi", "tools": RESPONSES_TOOLS, "tool_choice": only_now})
    assert prompt(agents).startswith("tools: now\n")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_the_token_limit_cuts_is_incomplete(agents: Stack, stream: bool) -> None:
    say(agents, REPLY.partition(": [2")[0], LENGTH)
    message = await agents.http.post(
        test_messages.URL, json={"max_tokens": 500, "messages": [HI], "tools": MESSAGES_TOOLS, "stream": stream}
    )
    response = await agents.http.post(
        test_responses.URL, json={"input": "hi", "tools": RESPONSES_TOOLS, "stream": stream}
    )
    if stream:
        assert test_messages.events(message.text)[-2]["delta"]["stop_reason"] == "max_tokens"
        answer = test_responses.events(response.text)[-1]["response"]
    else:
        assert message.json()["stop_reason"] == "max_tokens"
        assert message.json()["content"][-1]["input"] == {"a": 1}
        answer = response.json()
    assert answer["status"] == answer["output"][-1]["status"] == "incomplete"
    assert answer["output"][-1]["arguments"].startswith('{"a": 1')


async def test_all_apis_render_one_prompt_and_show_one_text(agents: Stack) -> None:
    messages = [{"role": "system", "content": "be brief"}, HI]
    chat = await agents.http.post("/v1/chat/completions", json={"messages": messages})
    response = await agents.http.post(test_responses.URL, json={"instructions": "be brief", "input": "hi"})
    message = await agents.http.post(
        test_messages.URL, json={"system": "be brief", "max_tokens": 500, "messages": [HI]}
    )
    prompts = [list(sequence.prompt_token_ids) for sequence in agents.verifier.submitted]
    assert len(prompts) == 3 and prompts[0] == prompts[1] == prompts[2]
    said = chat.json()["choices"][0]["message"]
    assert [item["content"][0]["text"] for item in response.json()["output"]] == [
        said["reasoning_content"],
        said["content"],
    ]
    thinking, text = message.json()["content"]
    assert (thinking["thinking"], text["text"]) == (said["reasoning_content"], said["content"])


@pytest.mark.parametrize("url", [test_responses.URL, test_messages.URL])
async def test_a_client_that_leaves_a_stream_frees_its_sequence(agents: Stack, url: str) -> None:
    async def play(player: Player) -> None:
        player.tokens(agents.ids("hello"))
        await player.aborted.wait()

    agents.verifier.script = play
    body = {"stream": True, "input": "hi"} if url == test_responses.URL else {"stream": True, "max_tokens": 9}
    body |= {"messages": [HI]} if url == test_messages.URL else {}
    async with agents.http.stream("POST", url, json=body) as answer:
        async for part in answer.aiter_text():
            if "hello" in part:
                break
    await agents.verifier.until(lambda: len(agents.verifier.aborts) == 1)


async def test_pings_keep_a_message_open_while_it_waits_for_a_verifier(
    settings: GatewaySettings, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "WAITING_NEWS_S", 0.01)
    async with deployment(settings, tokenizer) as running:
        await running.start(silent)
        body = {"max_tokens": 9, "messages": [HI], "stream": True}
        answer = await running.http.send(running.http.build_request("POST", test_messages.URL, json=body), stream=True)
        parts, text = answer.aiter_text(), ""
        while "text_delta" not in text:
            text += await anext(parts)
        await running.kill()
        while text.count("event: ping\n") < 4:
            text += await anext(parts)
        await running.start(steps([67], reason=STOP))
        text += "".join([part async for part in parts])
    found = test_messages.events(text)
    said = [event["delta"]["text"] for event in found if event["type"] == "content_block_delta"]
    assert "".join(said) == tokenizer.decode([65, 66, 67])
    assert [event["type"] for event in found[-2:]] == ["message_delta", "message_stop"]
