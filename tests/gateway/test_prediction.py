"""A client's prediction is sent on with the sequence, and counted in the usage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken import rpc
from gateway.config import GatewaySettings
from gateway.prediction import PredictionMatch
from gateway.tokenizer import Tokenizer
from protos import common_pb2, gateway_pb2, gateway_pb2_grpc
from tests.gateway.conftest import Stack, events
from tests.gateway.deployment import TEXT, deployment, joined, playing
from tests.gateway.scripted_verifier import Player, steps

pytestmark = pytest.mark.anyio
TOKENS = st.lists(st.integers(0, 4), max_size=30)


def counts(prediction: list[int], output: list[int]) -> tuple[int, int]:
    match = PredictionMatch(prediction)
    match.feed(output)
    return match.num_accepted, match.num_rejected


@pytest.mark.parametrize(
    ("prediction", "output", "accepted"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], 4),
        ([1, 2, 3, 4], [1, 2], 2),
        ([1, 2, 3, 4], [], 0),
        ([], [1, 2], 0),
        # Replaced, inserted and deleted: the text after it comes true; a pair finds the place.
        ([1, 2, 3, 4, 5], [1, 2, 9, 4, 5], 4),
        ([1, 2, 3, 4, 5, 6], [1, 2, 9, 9, 9, 3, 4, 5, 6], 5),
        ([1, 2, 3, 4, 5, 6], [1, 4, 5, 6], 2),
        # Nothing in common, or in another order.
        ([1, 2, 3, 4], [5, 6, 7, 8], 0),
        ([1, 2, 3, 4], [4, 3, 9, 1], 0),
        # A token comes true once.
        ([1, 2, 3], [1, 2, 3, 1, 2, 3], 3),
        # The nearer of two places.
        ([1, 2, 3, 5, 6, 7, 4, 1, 2, 8, 9], [1, 2, 3, 5, 6, 0, 0, 1, 2, 8, 9], 7),
        # Not a token that has come true: the output splits a word that was one piece before.
        ([7, 8, 9, 1, 2, 3, 4, 7, 5, 6, 1, 2, 3, 4, 9], [7, 8, 9, 1, 2, 3, 4, 7, 8, 1, 2, 3, 4, 9], 11),
    ],
)
def test_tokens_that_came_true(prediction: list[int], output: list[int], accepted: int) -> None:
    assert counts(prediction, output) == (accepted, len(prediction) - accepted)


@given(TOKENS, TOKENS, st.integers(0, 30))
def test_counts_do_not_depend_on_steps(prediction: list[int], output: list[int], cut: int) -> None:
    match = PredictionMatch(prediction)
    match.feed(output[:cut])
    before = match.num_accepted
    match.feed(output[cut:])
    assert (match.num_accepted, match.num_rejected) == counts(prediction, output)
    assert before <= match.num_accepted <= min(len(prediction), len(output))


@given(TOKENS)
def test_what_was_predicted_exactly_is_accepted_whole(prediction: list[int]) -> None:
    assert counts(prediction, prediction) == (len(prediction), 0)


def usage(body: dict[str, Any]) -> tuple[int, int]:
    details = body["usage"]["completion_tokens_details"]
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


CHAT = {"messages": [{"role": "user", "content": "a"}]}
OPENAI: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": "a", "max_tokens": 50}),
]
CONTENTS = ["hello world", [{"type": "text", "text": "hello"}, {"type": "text", "text": " world"}]]


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize(("url", "body"), OPENAI)
async def test_openai(stack: Stack, url: str, body: dict[str, Any], content: Any) -> None:
    predicted, output = stack.ids("hello world"), stack.ids("hello")
    stack.verifier.script = steps(output[:1], output[1:])
    body = {**body, "prediction": {"type": "content", "content": content}}
    answer = (await stack.http.post(url, json=body)).json()
    assert list(stack.verifier.submitted[0].prediction_token_ids) == predicted
    assert usage(answer) == (len(output), len(predicted) - len(output))


@pytest.mark.parametrize(("url", "body"), OPENAI)
async def test_stream_usage(stack: Stack, url: str, body: dict[str, Any]) -> None:
    predicted = stack.ids("hello world")
    stack.verifier.script = steps(predicted[:2], predicted[2:])
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = body | {
        "prediction": {"type": "content", "content": "hello world"},
        "stream": True,
        "stream_options": options,
    }
    seen = [usage(chunk) for chunk in events((await stack.http.post(url, json=body)).text) if chunk.get("usage")]
    assert seen[-1] == (len(predicted), 0)
    assert all(sum(each) == len(predicted) for each in seen)


@pytest.mark.parametrize("given_by", [None, {"type": "content", "content": ""}, {"type": "content", "content": []}])
async def test_without_a_prediction_counts_are_zero(stack: Stack, given_by: Any) -> None:
    for url, body in OPENAI:
        answer = (await stack.http.post(url, json={**body, "prediction": given_by})).json()
        assert usage(answer) == (0, 0)
    assert not any(sequence.prediction_token_ids for sequence in stack.verifier.submitted)


async def test_several_choices_each_have_it(stack: Stack) -> None:
    predicted = stack.ids("hello world")

    async def play(player: Player) -> None:
        player.tokens(predicted if player.sequence.choice_index == 0 else predicted[:1])
        player.finish()

    stack.verifier.script = play
    body = {**CHAT, "n": 2, "prediction": {"type": "content", "content": "hello world"}}
    answer = (await stack.http.post("/v1/chat/completions", json=body)).json()
    assert [list(s.prediction_token_ids) for s in stack.verifier.submitted] == [predicted] * 2
    assert usage(answer) == (len(predicted) + 1, len(predicted) - 1)


async def test_tokens_after_a_stop_string_do_not_count(stack: Stack) -> None:
    predicted = stack.ids("hello world stop here")
    stack.verifier.script = steps(predicted)
    body = {"prompt": "a", "stop": [" world"], "prediction": {"type": "content", "content": "hello world stop here"}}
    answer = (await stack.http.post("/v1/completions", json=body)).json()
    assert answer["choices"][0]["text"] == "hello"
    assert usage(answer)[0] == answer["usage"]["completion_tokens"] < len(predicted)


@pytest.mark.parametrize("as_ids", [False, True])
async def test_generate(stack: Stack, as_ids: bool) -> None:
    predicted = stack.ids("hello world")
    stack.verifier.script = steps(predicted[:2])
    body = {"text": "a", "prediction": predicted if as_ids else "hello world"}
    meta = (await stack.http.post("/generate", json=body)).json()["meta_info"]
    assert list(stack.verifier.submitted[0].prediction_token_ids) == predicted
    assert (meta["accepted_prediction_tokens"], meta["rejected_prediction_tokens"]) == (2, len(predicted) - 2)


@pytest.mark.parametrize("as_ids", [False, True])
async def test_grpc(stack: Stack, as_ids: bool) -> None:
    predicted = stack.ids("hello world")
    stack.verifier.script = steps(predicted[:2])
    given_by: dict[str, Any] = {"prediction_text": "hello world"}
    if as_ids:
        given_by = {"prediction_token_ids": gateway_pb2.TokenIds(ids=predicted)}
    async with rpc.async_channel(stack.grpc_address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        sampling = common_pb2.SamplingParams(max_tokens=9)
        responses = [
            r async for r in stub.Generate(gateway_pb2.GenerateRequest(text="a", sampling=sampling, **given_by))
        ]
        complete = responses[-1].complete
        assert complete.num_accepted_prediction_tokens == 2
        assert complete.num_rejected_prediction_tokens == len(predicted) - 2
        too_long = gateway_pb2.TokenIds(ids=[1] * 129)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            _ = [r async for r in stub.Generate(gateway_pb2.GenerateRequest(text="a", prediction_token_ids=too_long))]
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert list(stack.verifier.submitted[0].prediction_token_ids) == predicted


@pytest.mark.parametrize(
    ("url", "body", "field"),
    [
        ("/v1/chat/completions", {**CHAT, "prediction": "text"}, "prediction"),
        ("/v1/chat/completions", {**CHAT, "prediction": {"type": "content"}}, "prediction.content"),
        ("/v1/chat/completions", {**CHAT, "prediction": {"type": "text", "content": "x"}}, "prediction.type"),
        ("/v1/chat/completions", {**CHAT, "prediction": {"type": "content", "content": 5}}, "prediction.content"),
        (
            "/v1/chat/completions",
            {**CHAT, "prediction": {"type": "content", "content": [{"type": "image_url"}]}},
            "prediction.content",
        ),
        (
            "/v1/completions",
            {"prompt": ["a", "b"], "prediction": {"type": "content", "content": "x"}},
            "prediction",
        ),
        ("/v1/completions", {"prompt": "a", "prediction": {"type": "content", "content": "+" * 400}}, "prediction"),
        ("/generate", {"text": "a", "prediction": 7}, "prediction"),
        ("/generate", {"text": "a", "prediction": [1, 10**9]}, "prediction"),
        ("/generate", {"text": "a", "prediction": [1] * 129}, "prediction"),
    ],
)
async def test_refused(stack: Stack, url: str, body: dict[str, Any], field: str) -> None:
    answer = await stack.http.post(url, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field
    assert not stack.verifier.submitted


async def test_a_resume_sends_it_again(settings: GatewaySettings, tokenizer: Tokenizer, tmp_path: Path) -> None:
    output = tokenizer.encode(TEXT)
    body = {"prompt": "a", "max_tokens": 50, "stream": True, "stream_options": {"include_usage": True}}
    body["prediction"] = {"type": "content", "content": TEXT}
    async with deployment(settings, tokenizer, 2) as running:
        first = await running.start(playing([output], [5]))
        async with running.http.stream("POST", "/v1/completions", json=body) as response:
            await first.until(lambda: bool(first.submitted))
            await running.until(lambda: running.gateway.verifiers.num_sequences == 1)
            await running.start(playing([output], [None]), 1)
            await running.kill(0)
            chunks = events((await response.aread()).decode())
    assert [attempt for _, attempt, _ in running.attempts] == [0, 1]
    assert [list(v.submitted[0].prediction_token_ids) for v in running.verifiers] == [output] * 2
    assert joined(chunks)[0][0] == TEXT
    assert usage(chunks[-1]) == (len(output), 0)
