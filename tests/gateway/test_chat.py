"""POST /v1/chat/completions over real HTTP, and the real openai client against it."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from foretoken import limits
from gateway.config import GatewaySettings
from gateway.tokenizer import Tokenizer
from protos import common_pb2
from tests.gateway.conftest import MODEL, Stack, events, run_stack, train_tokenizer
from tests.gateway.scripted_verifier import LENGTH, STOP, Player, steps

pytestmark = pytest.mark.anyio
URL = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}


def client(stack: Stack) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)


async def test_messages_go_through_the_template_and_may_fill_the_context(stack: Stack) -> None:
    stack.verifier.script = steps(stack.ids("hello"), reason=STOP)
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
    ]
    body = (await stack.http.post(URL, json={"messages": messages})).json()
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "hello", "refusal": None}
    assert choice["finish_reason"] == "stop" and choice["logprobs"] is None
    sequence = stack.verifier.submitted[0]
    prompt = stack.ids("<|user|>system: be brief\n<|user|>user: hi\nassistant: ")
    assert list(sequence.prompt_token_ids) == prompt
    assert sequence.sampling.max_tokens == stack.verifier.info.max_model_len - len(prompt)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_a_token_limit_beyond_the_context_is_cut(stack: Stack, name: str) -> None:
    answer = await stack.http.post(URL, json={**HELLO, name: 100_000})
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    sequence = stack.verifier.submitted[0]
    assert sequence.sampling.max_tokens == stack.verifier.info.max_model_len - len(sequence.prompt_token_ids)


async def test_stream_gives_the_role_once_then_content_then_the_end(stack: Stack) -> None:
    stack.verifier.script = steps(stack.ids("hello"), stack.ids(" world"), reason=STOP)
    body = {**HELLO, "stream": True, "n": 2}
    chunks = events((await stack.http.post(URL, json=body)).text)
    for index in (0, 1):
        choices = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert all(set(choice["delta"]) <= {"content"} for choice in choices[1:])
        assert "".join(choice["delta"].get("content", "") for choice in choices) == "hello world"
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert not any("metrics" in chunk for chunk in chunks)


async def test_logprobs_carry_bytes_and_the_best_tokens(stack: Stack) -> None:
    token = stack.ids("é")[0]
    entry = common_pb2.TokenLogprobs(token_id=token, logprob=-0.5, rank=1, top_ids=[token, 65], top_logprobs=[-0.5, -2])

    async def play(player: Player) -> None:
        player.tokens([token], logprobs=[entry])
        player.finish(LENGTH)

    stack.verifier.script = play
    body = {**HELLO, "logprobs": True, "top_logprobs": 2}
    for answer in (
        (await stack.http.post(URL, json=body)).json(),
        events((await stack.http.post(URL, json={**body, "stream": True})).text)[1],
    ):
        (content,) = answer["choices"][0]["logprobs"]["content"]
        text, raw = stack.tokenizer.token_text(token)
        assert (content["token"], content["bytes"], content["logprob"]) == (text, list(raw), -0.5)
        assert [item["logprob"] for item in content["top_logprobs"]] == [-0.5, -2.0]
    assert stack.verifier.submitted[0].sampling.logprobs == 2


async def test_answers_that_clients_send_back_are_taken(stack: Stack) -> None:
    first = (await stack.http.post(URL, json=HELLO)).json()["choices"][0]["message"]
    echoed = {**first, "tool_calls": None, "function_call": None, "annotations": []}
    answer = await stack.http.post(URL, json={"messages": [HELLO["messages"][0], echoed]})
    assert answer.status_code == 200


async def test_a_turn_with_an_empty_list_of_calls_is_one_without_calls(
    settings: GatewaySettings, tmp_path: Path
) -> None:
    """Clients send ``tool_calls: []``; templates ask whether the field is there."""
    template = "{% for m in messages %}{{ m.role }}{{ ' calls' if 'tool_calls' in m }}: {{ m.content }}\n{% endfor %}"
    folder = train_tokenizer(tmp_path / "calls", chat_template=template)
    settings = settings.model_copy(update={"model": folder})
    async for stack in run_stack(settings, Tokenizer(folder), tmp_path / "v.sock"):
        turn: dict[str, object] = {"role": "assistant", "content": "hello"}
        for said in (turn, {**turn, "tool_calls": []}, {**turn, "tool_calls": None}):
            answer = await stack.http.post(URL, json={"messages": [*HELLO["messages"], said, *HELLO["messages"]]})
            assert answer.status_code == 200, (said, answer.text)
        expected = stack.ids("user: hi\nassistant: hello\nuser: hi\n")
        assert [list(each.prompt_token_ids) for each in stack.verifier.submitted] == [expected] * 3


async def test_model_without_a_template_says_which_flag_to_use(settings: GatewaySettings, tmp_path: Path) -> None:
    folder = train_tokenizer(tmp_path / "plain", chat_template=None)
    settings = settings.model_copy(update={"model": folder})
    async for stack in run_stack(settings, Tokenizer(folder), tmp_path / "v.sock"):
        answer = await stack.http.post(URL, json=HELLO)
        assert answer.status_code == 400
        assert "--chat-template" in answer.json()["error"]["message"]
        assert not stack.verifier.submitted


async def test_openai_client_whole(stack: Stack) -> None:
    stack.verifier.script = steps(stack.ids("hello"), reason=STOP)
    async with client(stack) as api:
        answer = await api.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            n=2,
            seed=1,
            user="me",
            store=True,
            metadata={"a": "b"},
            extra_body={"speculative": {"enabled": False}, "top_k": 5},
        )
        assert [choice.message.content for choice in answer.choices] == ["hello", "hello"]
        assert answer.usage is not None and answer.usage.completion_tokens == 2 * len(stack.ids("hello"))
        assert [model.id for model in (await api.models.list()).data] == [MODEL]
        assert (await api.models.retrieve(MODEL)).id == MODEL
        completion = await api.completions.create(model=MODEL, prompt=["a", "b"], logprobs=0, max_tokens=3)
        assert [choice.text for choice in completion.choices] == ["hello", "hello"]
    assert not stack.verifier.submitted[0].speculation.enabled


async def test_openai_client_streams(stack: Stack) -> None:
    stack.verifier.script = steps(stack.ids("hello"), stack.ids(" world"), reason=STOP)
    async with client(stack) as api:
        stream = await api.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == "hello world"
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens > 0
        assert "speculative_decoding" in (chunks[-1].model_extra or {})["metrics"]


async def test_openai_client_sees_typed_errors(stack: Stack) -> None:
    async with client(stack) as api:
        with pytest.raises(openai.BadRequestError) as bad:
            await api.completions.create(model=MODEL, prompt="a", temperature=9)
        assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
        with pytest.raises(openai.NotFoundError) as unknown:
            await api.completions.create(model="other", prompt="a")
        assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")


BAD_BODIES: list[tuple[str, dict[str, object]]] = [
    ("messages", {}),
    ("messages", {"messages": []}),
    ("messages", {"messages": "hi"}),
    ("messages.0.role", {"messages": [{"role": "robot", "content": "a"}]}),
    ("messages.0.content", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ("messages.0.content", {"messages": [{"role": "user", "content": 5}]}),
    ("messages.0", {"messages": [5]}),
    ("messages", {"messages": [{"role": "tool", "content": "a"}]}),
    ("messages", {"messages": [{"role": "user", "content": "a"}] * 1025}),
    ("messages", {"messages": [{"role": "user", "content": "word " * 500}]}),
    ("tools.0.function", {**HELLO, "tools": [{"type": "function"}]}),
    ("tool_choice", {**HELLO, "tool_choice": "required"}),
    ("top_logprobs", {**HELLO, "top_logprobs": 2}),
    ("top_logprobs", {**HELLO, "logprobs": True, "top_logprobs": 21}),
    ("logprobs", {**HELLO, "logprobs": 1}),
    ("max_completion_tokens", {**HELLO, "max_completion_tokens": 0}),
    ("chat_template_kwargs", {**HELLO, "chat_template_kwargs": {"messages": "x"}}),
    ("chat_template_kwargs", {**HELLO, "chat_template_kwargs": {"chat_template": "{{ messages }}"}}),
    ("chat_template_kwargs", {**HELLO, "chat_template_kwargs": {"tokenize": True}}),
    ("chat_template_kwargs", {**HELLO, "chat_template_kwargs": {"x": "y" * limits.MAX_TEMPLATE_KWARGS_BYTES}}),
    ("chat_template_kwargs", {**HELLO, "chat_template_kwargs": {f"x{i}": 1 for i in range(65)}}),
    ("chat_template", {**HELLO, "chat_template": "{{ messages }}"}),
    ("continue_final_message", {**HELLO, "continue_final_message": True}),
    ("continue_final_message", {**HELLO, "continue_final_message": True, "add_generation_prompt": True}),
    ("modalities", {**HELLO, "modalities": ["audio"]}),
    ("audio", {**HELLO, "audio": {"voice": "x"}}),
    ("echo", {**HELLO, "echo": True}),
    ("best_of", {**HELLO, "best_of": 2}),
    ("use_beam_search", {**HELLO, "use_beam_search": True}),
    ("logits_processors", {**HELLO, "logits_processors": ["x"]}),
    ("prompt_logprobs", {**HELLO, "prompt_logprobs": -1}),
    ("prompt_logprobs", {**HELLO, "prompt_logprobs": 1, "stream": True}),
]


async def test_bad_fields_are_named(stack: Stack) -> None:
    for field, body in BAD_BODIES:
        answer = await stack.http.post(URL, json=body)
        assert answer.status_code == 400, (field, answer.text)
        assert answer.json()["error"]["param"] == field
    assert not stack.verifier.submitted


HARMLESS: list[dict[str, object]] = [
    {"response_format": {"type": "text"}},
    {"tool_choice": "none", "parallel_tool_calls": False, "tools": None},
    {"tools": [], "functions": [], "function_call": "none"},
    {"modalities": ["text"], "prediction": {"type": "content", "content": "x"}, "service_tier": "auto"},
    {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
    {"add_generation_prompt": False, "continue_final_message": True},
    {"chat_template_kwargs": {"thinking": [1], "documents": [{"title": "a", "text": "b"}], "x": {"y": None}}},
    {"echo": False, "use_beam_search": False, "length_penalty": 1.0, "logits_processors": [], "audio": None},
    {"return_routed_experts": False, "lora_path": None, "return_hidden_states": False, "documents": []},
    {"stop": None, "n": None, "logit_bias": None, "stream_options": None, "seed": None, "stream": None},
]


async def test_harmless_fields_are_taken(stack: Stack) -> None:
    for extra in HARMLESS:
        answer = await stack.http.post(URL, json={**HELLO, **extra})
        assert answer.status_code == 200, (extra, answer.text)
