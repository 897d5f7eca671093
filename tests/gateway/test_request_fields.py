"""Fields that clients of vLLM, SGLang and OpenAI send: what
is taken, ignored with a warning, refused.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from gateway import ignored_fields
from gateway.config import GatewaySettings
from gateway.tokenizer import Tokenizer
from protos import common_pb2, gateway_pb2, gateway_pb2_grpc
from tests.gateway.conftest import MODEL, Stack, events, run_stack, train_tokenizer
from tests.gateway.scripted_verifier import STOP, Player, steps

pytestmark = pytest.mark.anyio
HEADER = "x-foretoken-ignored-fields"
COMPLETION, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
BODIES: dict[str, dict[str, Any]] = {COMPLETION: {"prompt": "hello"}, CHAT: HELLO, GENERATE: {"text": "hello"}}


@pytest.fixture
async def strict(settings: GatewaySettings, tokenizer: Tokenizer, tmp_path: Path) -> AsyncIterator[Stack]:
    settings = settings.model_copy(update={"strict_fields": True})
    async for running in run_stack(settings, tokenizer, tmp_path / "v.sock"):
        yield running


# --- Unknown fields.


@pytest.mark.parametrize("url", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_unknown_fields_are_ignored_with_a_warning(
    stack: Stack, url: str, stream: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ignored_fields, "_warned", set())
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        answer = await stack.http.post(url, json={**BODIES[url], "later": 1, "sooner": {"a": []}, "stream": stream})
        assert answer.status_code == 200 and answer.headers[HEADER] == "later, sooner"
    warned = [record.__dict__["field"] for record in caplog.records if "ignored" in record.message]
    assert warned == ["later", "sooner"]
    known = await stack.http.post(url, json={**BODIES[url], "stream": stream})
    assert known.status_code == 200 and HEADER not in known.headers


@pytest.mark.parametrize(
    ("url", "body", "names"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a", "later": 1, "refusal": None}] * 2}, "messages.later"),
        (CHAT, {**HELLO, "stream": True, "stream_options": {"later": 1}}, "stream_options.later"),
        (CHAT, {**HELLO, "response_format": {"type": "text", "later": 1}}, "response_format.later"),
        (GENERATE, {"text": "a", "sampling_params": {"later": 1}}, "sampling_params.later"),
        ("/tokenize", {"prompt": "a", "later": 1}, "later"),
        (
            CHAT,
            {
                **HELLO,
                "tools": [{"type": "function", "function": {"name": "f", "paramters": {}}}],
                "tool_choice": "none",
            },
            "tools.function.paramters",
        ),
    ],
)
async def test_unknown_fields_of_objects_are_named_with_their_place(
    stack: Stack, url: str, body: dict[str, Any], names: str
) -> None:
    answer = await stack.http.post(url, json=body)
    assert answer.status_code == 200 and answer.headers[HEADER] == names


async def test_the_header_is_bounded_and_holds_no_line_breaks(stack: Stack) -> None:
    body = {**BODIES[COMPLETION], "a\r\nx-evil: 1": 1, "é" * 999: 1, **{f"name{i}": 1 for i in range(500)}}
    answer = await stack.http.post(COMPLETION, json=body)
    assert answer.status_code == 200 and "x-evil" not in answer.headers
    names = answer.headers[HEADER].split(", ")
    assert names[:2] == ["a??x-evil??1", "?" * 64]
    assert len(names) == ignored_fields.MAX_NAMES + 1 and names[-1] == "and 486 more"


async def test_an_error_names_ignored_fields_too(stack: Stack) -> None:
    answer = await stack.http.post(COMPLETION, json={"prompt": "a", "later": 1, "max_tokens": 0})
    assert answer.status_code == 400 and answer.headers[HEADER] == "later"


@pytest.mark.parametrize("url", BODIES)
async def test_unknown_fields_of_our_extension_are_refused(stack: Stack, url: str) -> None:
    for fields, field, known in (
        ({"drafer": "x"}, "speculative.drafer", "drafter, enabled, max_draft_tokens, shape"),
        ({"shape": {"steps": 3}}, "speculative.shape.steps", "num_draft_tokens, num_steps, topk"),
        ({"regx": "a"}, "structured_outputs.regx", "choice, grammar, json, json_object, regex"),
    ):
        if url == GENERATE and "regx" in fields:
            continue
        answer = await stack.http.post(url, json={**BODIES[url], field.partition(".")[0]: fields})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        assert answer.json()["error"]["message"] == f"unknown field {field!r}; known: {known}"


@pytest.mark.parametrize("url", BODIES)
async def test_strict_fields_refuse_unknown_ones(strict: Stack, url: str) -> None:
    for field, more in (
        ("later", {"later": 1}),
        ("later", {"later": None}),
        ("messages.later", {"messages": [{"role": "user", "content": "a", "later": 1}]}),
    ):
        # SGLang's clients send nulls for all fields that they do not use.
        if (field == "later" or url == CHAT) and not (url == GENERATE and more[field] is None):
            answer = await strict.http.post(url, json={**BODIES[url], **more})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text
    assert (await strict.http.post(url, json=BODIES[url])).status_code == 200


async def test_a_misspelt_field_gets_a_suggestion(strict: Stack) -> None:
    answer = await strict.http.post(COMPLETION, json={"prompt": "a", "max_token": 3})
    assert answer.json()["error"]["message"] == "unknown field 'max_token'; did you mean 'max_tokens'?"


# --- Fields that reach the verifier.


@pytest.mark.parametrize("url", BODIES)
async def test_masks_and_priority_reach_the_verifier(stack: Stack, url: str) -> None:
    sampling = {"allowed_token_ids": [5, 3], "bad_words": ["hello world", " add"]}
    body = {**BODIES[url], "priority": -7, **({"sampling_params": sampling} if url == GENERATE else sampling)}
    assert (await stack.http.post(url, json=body)).status_code == 200
    (submitted,) = stack.verifier.submitted
    assert submitted.priority == -7 and list(submitted.sampling.allowed_token_ids) == [5, 3]
    got = [list(each.ids) for each in submitted.sampling.bad_token_ids]
    assert stack.ids("hello world") in got and stack.ids("add") in got
    # vLLM's rule: after a space too, where that changes the first token and not their number.
    for word in ("hello world", "add"):
        alone, spaced = stack.ids(word), stack.ids(" " + word)
        assert (spaced in got) == (alone[0] != spaced[0] and len(alone) == len(spaced))


async def test_responses_and_messages_take_them_too(stack: Stack) -> None:
    sampling = {
        "allowed_token_ids": [5, 3],
        "bad_words": ["add"],
        "priority": 4,
        "truncate_prompt_tokens": 2,
        "later": 1,
    }
    for url, body in (
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", {"messages": HELLO["messages"], "max_tokens": 9}),
    ):
        answer = await stack.http.post(url, json={**body, **sampling})
        assert answer.status_code == 200 and answer.headers[HEADER] == "later", answer.text
        submitted = stack.verifier.submitted[-1]
        assert (submitted.priority, len(submitted.prompt_token_ids)) == (4, 2)
        assert list(submitted.sampling.allowed_token_ids) == [5, 3]
        assert list(submitted.sampling.bad_token_ids[0].ids) == stack.ids("add")


async def test_grpc_takes_masks_priority_and_truncation(stack: Stack) -> None:
    async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        sampling = common_pb2.SamplingParams(
            allowed_token_ids=[5], bad_token_ids=[common_pb2.TokenSequence(ids=[1, 2])]
        )
        for prompt in ({"text": "hello world"}, {"token_ids": gateway_pb2.TokenIds(ids=stack.ids("hello world"))}):
            request = gateway_pb2.GenerateRequest(
                sampling=sampling, bad_words=["add"], priority=3, truncate_prompt_tokens=2, **prompt
            )
            async for _ in stub.Generate(request):
                pass
    for submitted in stack.verifier.submitted:
        assert list(submitted.prompt_token_ids) == stack.ids("hello world")[-2:] and submitted.priority == 3
        got = [list(each.ids) for each in submitted.sampling.bad_token_ids]
        assert got[:2] == [[1, 2], stack.ids("add")] and list(submitted.sampling.allowed_token_ids) == [5]


async def test_grammars_in_ebnf_reach_the_verifier(stack: Stack) -> None:
    text = 'root ::= "a"+'
    for url, more in (
        (COMPLETION, {"guided_grammar": text}),
        (CHAT, {"structured_outputs": {"grammar": text}}),
        (GENERATE, {"sampling_params": {"ebnf": text}}),
    ):
        assert (await stack.http.post(url, json={**BODIES[url], **more})).status_code == 200
        assert stack.verifier.submitted[-1].sampling.lark == text


@pytest.mark.parametrize("url", [COMPLETION, CHAT])
async def test_the_last_tokens_of_a_prompt_are_kept(stack: Stack, url: str) -> None:
    words = " word" * 400
    body = {"prompt": words} if url == COMPLETION else {"messages": [{"role": "user", "content": words}]}
    assert (await stack.http.post(url, json=body)).status_code == 400
    whole = stack.ids(words) if url == COMPLETION else stack.ids(f"<|user|>user: {words}\nassistant: ")
    for truncate, max_tokens, kept in ((3, 5, 3), (127, 5, 127), (-1, 5, 123), (-1, 500, 127)):
        more = {"truncate_prompt_tokens": truncate, "max_tokens": max_tokens}
        answer = await stack.http.post(url, json={**body, **more})
        assert answer.status_code == 200, answer.text
        assert list(stack.verifier.submitted[-1].prompt_token_ids) == whole[-kept:]
        assert answer.json()["usage"]["prompt_tokens"] == kept
    if url == COMPLETION:
        answer = await stack.http.post(url, json={"prompt": whole, "truncate_prompt_tokens": 3, "echo": True})
        assert list(stack.verifier.submitted[-1].prompt_token_ids) == whole[-3:]
        assert answer.json()["choices"][0]["text"].startswith(stack.tokenizer.decode(whole[-3:]))


async def test_a_short_prompt_stays_whole(stack: Stack) -> None:
    answer = await stack.http.post(COMPLETION, json={"prompt": "hello", "truncate_prompt_tokens": 90, "echo": True})
    assert list(stack.verifier.submitted[-1].prompt_token_ids) == stack.ids("hello")
    assert answer.json()["choices"][0]["text"].startswith("hello")


@pytest.mark.parametrize("url", [COMPLETION, CHAT])
async def test_sglangs_no_stop_trim_keeps_the_stop_string(stack: Stack, url: str) -> None:
    stack.verifier.script = steps(stack.ids("hello "), stack.ids("stop here"), reason=STOP)
    for more, text in (({}, "hello "), ({"no_stop_trim": False}, "hello "), ({"no_stop_trim": True}, "hello stop")):
        answer = await stack.http.post(url, json={**BODIES[url], "stop": "stop", **more})
        (choice,) = answer.json()["choices"]
        assert (choice["text"] if url == COMPLETION else choice["message"]["content"]) == text
        assert HEADER not in answer.headers


async def test_sixty_four_stop_strings(stack: Stack) -> None:
    stack.verifier.script = steps(stack.ids("hello "), stack.ids("stop here"), reason=STOP)
    stops = [f"never {i}" for i in range(63)] + ["stop"]
    answer = await stack.http.post(COMPLETION, json={"prompt": "a", "stop": stops})
    (choice,) = answer.json()["choices"]
    assert (choice["text"], choice["stop_reason"]) == ("hello ", "stop")


# --- Fields of the answer.


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_come_back_where_vllm_puts_them(stack: Stack, stream: bool) -> None:
    stack.verifier.script = steps(stack.ids("hel"), stack.ids("lo"))
    ids = stack.ids("hel") + stack.ids("lo")
    for url in (COMPLETION, CHAT):
        answer = await stack.http.post(url, json={**BODIES[url], "return_token_ids": True, "stream": stream, "n": 2})
        bodies = events(answer.text) if stream else [answer.json()]
        prompt_ids = list(stack.verifier.submitted[-1].prompt_token_ids)
        choices = [choice for body in bodies for choice in body["choices"]]
        for index in range(2):
            found = [choice.get("token_ids", []) for choice in choices if choice["index"] == index]
            assert [token_id for part in found for token_id in part] == ids
        prompts = [
            holder["prompt_token_ids"]
            for holder in (bodies, choices)[url == COMPLETION]
            if "prompt_token_ids" in holder
        ]
        assert prompts == [prompt_ids] * (2 if url == COMPLETION else 1)


def entry(token_id: int) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(
        token_id=token_id, logprob=-3.0, rank=9, top_ids=[token_id + 1, token_id + 2], top_logprobs=[-0.5, -1.5]
    )


async def test_prompt_logprobs_come_back_where_vllm_puts_them(stack: Stack) -> None:
    async def play(player: Player) -> None:
        prompt = player.sequence.prompt_token_ids
        assert player.sequence.sampling.prompt_logprobs == wanted
        player.tokens([1], prompt_logprobs=[entry(token_id) for token_id in prompt[1:]])
        player.finish()

    stack.verifier.script = play
    for url in (COMPLETION, CHAT):
        for wanted in (0, 1):
            answer = (await stack.http.post(url, json={**BODIES[url], "prompt_logprobs": wanted})).json()
            prompt = stack.verifier.submitted[-1].prompt_token_ids
            (choice,) = answer["choices"]
            lists = choice["prompt_logprobs"] if url == COMPLETION else answer["prompt_logprobs"]
            assert lists[0] is None and len(lists) == len(prompt)
            for token_id, position in zip(prompt[1:], lists[1:], strict=True):
                text = stack.tokenizer.token_text(token_id)[0]
                assert position.pop(str(token_id)) == {"logprob": -3.0, "rank": 9, "decoded_token": text}
                best = stack.tokenizer.token_text(token_id + 1)[0]
                assert position == (
                    {str(token_id + 1): {"logprob": -0.5, "rank": 1, "decoded_token": best}} if wanted else {}
                )


async def test_echoed_logprobs_keep_their_own_width_beside_prompt_logprobs(stack: Stack) -> None:
    async def play(player: Player) -> None:
        assert player.sequence.sampling.prompt_logprobs == 2
        prompt = player.sequence.prompt_token_ids
        player.tokens([1], logprobs=[entry(1)], prompt_logprobs=[entry(token_id) for token_id in prompt[1:]])
        player.finish()

    stack.verifier.script = play
    body = {"prompt": "hello world", "echo": True, "logprobs": 1, "prompt_logprobs": 2}
    (choice,) = (await stack.http.post(COMPLETION, json=body)).json()["choices"]
    num_prompt = len(stack.ids("hello world"))
    assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:num_prompt]] == [2] * (num_prompt - 1)
    assert all(len(position) == 3 for position in choice["prompt_logprobs"][1:])


async def test_the_openai_sdk_sends_and_reads_them(stack: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none") as client:
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hello"}],
            extra_body={"return_token_ids": True, "priority": 2, "bad_words": ["add"], "unheard_of": True},
        )
        assert answer.model_extra is not None and answer.model_extra["seed"] >= 0
        assert answer.model_extra["prompt_token_ids"] == list(stack.verifier.submitted[-1].prompt_token_ids)
        assert answer.choices[0].model_extra is not None and answer.choices[0].model_extra["token_ids"] == [1, 2]
        raw = await client.completions.with_raw_response.create(model=MODEL, prompt="a", extra_body={"unheard_of": 1})
        assert raw.headers[HEADER] == "unheard_of"


# --- Chat templates.

KWARGS_TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if tags %}{{ tags | join('+') }}{{ config.depth }}{{ documents[0].title }}{% endif %}"
    "{% if size %}{% for i in range(size) %}{% for j in range(size) %}{% endfor %}{% endfor %}{% endif %}"
    "{% if escape %}{{ messages.__class__.__mro__ }}{% endif %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


@pytest.fixture
async def with_kwargs(settings: GatewaySettings, tmp_path: Path) -> AsyncIterator[Stack]:
    folder = train_tokenizer(tmp_path / "kwargs", chat_template=KWARGS_TEMPLATE)
    settings = settings.model_copy(update={"model": folder})
    async for running in run_stack(settings, Tokenizer(folder), tmp_path / "v.sock"):
        yield running


async def test_a_template_gets_any_json(with_kwargs: Stack) -> None:
    kwargs = {"tags": ["x", "y"], "config": {"depth": 4}, "documents": [{"title": "T"}], "unused": None}
    answer = await with_kwargs.http.post(CHAT, json={**HELLO, "chat_template_kwargs": kwargs})
    assert answer.status_code == 200, answer.text
    (submitted,) = with_kwargs.verifier.submitted
    assert list(submitted.prompt_token_ids) == with_kwargs.ids("hellox+y4T>")


async def test_a_template_stays_in_its_sandbox_and_its_time(
    with_kwargs: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.openai.chat_request.TEMPLATE_TIMEOUT_S", 0.05)
    for kwargs in ({"escape": True}, {"size": 4000}, {"size": 10**9}, {"config": 5, "tags": [1]}):
        answer = await with_kwargs.http.post(CHAT, json={**HELLO, "chat_template_kwargs": kwargs})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages"), answer.text


async def test_the_end_of_the_prompt_follows_vllm(with_kwargs: Stack) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for more, text in (
        ({}, "ab>"),
        ({"add_generation_prompt": False}, "ab"),
        ({"add_generation_prompt": False, "continue_final_message": True}, "ab"),
    ):
        answer = await with_kwargs.http.post(CHAT, json={"messages": messages, **more})
        assert answer.status_code == 200, answer.text
        assert list(with_kwargs.verifier.submitted[-1].prompt_token_ids) == with_kwargs.ids(text)


# --- generation_config.json.

CONFIG = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "repetition_penalty": 1.05,
    "max_new_tokens": 40,
    "do_sample": True,
    "eos_token_id": [1],
    "min_p": None,
}


async def served_with(settings: GatewaySettings, tmp_path: Path, mode: str) -> AsyncIterator[Stack]:
    folder = train_tokenizer(tmp_path / "configured")
    (folder / "generation_config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    settings = settings.model_copy(update={"model": folder, "generation_config": mode})
    async for running in run_stack(settings, Tokenizer(folder), tmp_path / "v.sock"):
        yield running


@pytest.fixture
async def configured(settings: GatewaySettings, tmp_path: Path) -> AsyncIterator[Stack]:
    async for running in served_with(settings, tmp_path, "auto"):
        yield running


def sampled(stack: Stack) -> tuple[float, float, int, float, float, int]:
    params = stack.verifier.submitted[-1].sampling
    return (
        params.temperature,
        params.top_p,
        params.top_k,
        params.min_p,
        params.repetition_penalty,
        params.max_tokens,
    )


async def test_responses_and_messages_have_the_same_defaults(configured: Stack) -> None:
    answer = (await configured.http.post("/v1/responses", json={"input": "hello", "top_p": 1.0})).json()
    assert sampled(configured) == (0.6, 1.0, 20, 0.0, 1.05, 40) and answer["temperature"] == 0.6
    await configured.http.post("/v1/messages", json={**HELLO, "max_tokens": 50, "temperature": 1.0})
    assert sampled(configured) == (1.0, 0.95, 20, 0.0, 1.05, 50)


@pytest.mark.parametrize(("url", "max_tokens"), [(COMPLETION, 16), (CHAT, 40), (GENERATE, 40)])
async def test_the_checkpoints_sampling_defaults_are_applied(configured: Stack, url: str, max_tokens: int) -> None:
    await configured.http.post(url, json=BODIES[url])
    assert sampled(configured) == (0.6, 0.95, 20, 0.0, 1.05, max_tokens)
    # What the client gives wins, even if it equals OpenAI's default.
    given = {"temperature": 1.0, "top_k": 0, "repetition_penalty": 1.0}
    more = {**given, "max_new_tokens": 50} if url == GENERATE else {**given, "max_tokens": 50}
    await configured.http.post(url, json={**BODIES[url], **({"sampling_params": more} if url == GENERATE else more)})
    assert sampled(configured) == (1.0, 0.95, 0, 0.0, 1.0, 50)


async def test_grpc_has_the_same_defaults(configured: Stack) -> None:
    async with grpc.aio.insecure_channel(configured.grpc_address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        for sampling in (None, common_pb2.SamplingParams(temperature=0.0, max_tokens=50)):
            async for _ in stub.Generate(gateway_pb2.GenerateRequest(text="a", sampling=sampling)):
                pass
            temperature, *others, max_tokens = sampled(configured)
            assert others == [0.95, 20, 0.0, 1.05]
            assert (temperature, max_tokens) == ((0.6, 16) if sampling is None else (0.0, 50))


async def test_version_reports_the_defaults(configured: Stack) -> None:
    answer = (await configured.http.get("/version")).json()
    assert answer["generation_config"] == "auto"
    assert answer["sampling_defaults"] == {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.0,
        "repetition_penalty": 1.05,
        "max_tokens": 40,
    }


@pytest.mark.parametrize("mode", ["vllm", "none"])
async def test_the_file_can_be_left_out(settings: GatewaySettings, tmp_path: Path, mode: str) -> None:
    async for running in served_with(settings, tmp_path, mode):
        await running.http.post(CHAT, json=HELLO)
        prompt = running.verifier.submitted[-1].prompt_token_ids
        assert sampled(running) == (1.0, 1.0, 0, 0.0, 1.0, 128 - len(prompt))
        version = (await running.http.get("/version")).json()
        assert version["generation_config"] == mode and version["sampling_defaults"]["temperature"] == 1.0
