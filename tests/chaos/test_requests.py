"""Random requests: the same for the same seed, of every kind, and all valid."""

from __future__ import annotations

import collections
import itertools
import json
from typing import Any

import pytest
from google.protobuf import json_format

from foretoken import limits, wire
from foretoken.limits import ModelLimits
from gateway.openai.request import parse_chat, parse_completion
from gateway.sampling_defaults import SamplingDefaults
from gateway.sglang.generate import GenerateFields, SglangSamplingFields
from protos import gateway_pb2
from tests.chaos.answer import Answer, Choice
from tests.chaos.requests import Material, Request, draw_requests, num_sequences, with_stop
from tests.chaos.stack import MODEL

COUNT = 120
LIMITS = ModelLimits(vocab_size=8192, max_model_len=2048, drafter_names=("eagle3", "ngram"))


@pytest.fixture(scope="module")
def material() -> Material:
    return Material.load(MODEL, seed=1)


@pytest.fixture(scope="module")
def requests(material: Material) -> list[Request]:
    return draw_requests(COUNT, 1, material)


def test_a_number_of_a_seed_is_always_the_same_request(material: Material, requests: list[Request]) -> None:
    assert draw_requests(5, 1, material) == requests[:5]
    assert draw_requests(5, 2, material) != requests[:5]
    # As a failed run prints them.
    assert all(json.loads(json.dumps(request.body)) == request.body for request in requests)


def test_all_are_valid(requests: list[Request]) -> None:
    for request in requests:
        body = request.body
        if request.api == "grpc":
            message = json_format.ParseDict(body, gateway_pb2.GenerateRequest())
            limits.check_sampling(wire.sampling_from_proto(message.sampling), LIMITS)
            limits.check_speculation(wire.speculation_from_proto(message.speculation), LIMITS)
        elif request.api == "generate":
            fields = {name: value for name, value in body.items() if value is not None}
            SglangSamplingFields.model_validate(GenerateFields.model_validate(fields).sampling_params)
        else:
            _, options = (parse_chat if request.api == "chat" else parse_completion)(body, SamplingDefaults())
            limits.check_sampling(options.sampling, LIMITS)
            limits.check_speculation(options.speculation, LIMITS)


def test_every_kind_is_there(requests: list[Request]) -> None:
    kinds = collections.Counter(request.kind for request in requests)
    assert set(kinds) == {
        f"{api}, {how}" for api, how in itertools.product(("completions", "chat", "generate"), ("streamed", "whole"))
    } | {"grpc, streamed"}
    assert sum(request.wants_stop for request in requests) > COUNT / 10
    values = collections.defaultdict(set)
    for request in requests:
        body: dict[str, Any] = request.body
        sampling = body.get("sampling_params") or body.get("sampling") or body
        for name, value in itertools.chain(body.items(), sampling.items()):
            values[name].add(json.dumps(value))
    assert {"1", "2", "3"} <= values["n"]
    assert len(values["temperature"]) >= 5 and len(values["cache_salt"]) > 3
    assert len(values["speculative"]) >= 5 and len(values["speculation"]) >= 3
    for name in (
        *("top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
        *("min_tokens", "ignore_eos", "stop_token_ids", "stream_options"),
        *("logprobs", "top_logprobs", "echo", "prompt_logprobs", "logprob_start_len"),
    ):
        assert values[name], name
    assert any(isinstance(request.body.get("prompt"), list) for request in requests)
    assert num_sequences(requests) > COUNT


def test_no_request_has_more_sequences_than_the_queue_is_sized_for(requests: list[Request]) -> None:
    assert max(num_sequences([request]) for request in requests) <= 4


@pytest.mark.parametrize("api", ["completions", "generate", "grpc"])
def test_a_stop_string_is_taken_from_the_output(requests: list[Request], api: str) -> None:
    request = next(request for request in requests if request.api == api and not request.body.get("echo"))
    text = "def add(first, second):\n    return first + second\n"
    stopped = with_stop(request, Answer({0: Choice(text=text)}), seed=1)
    stops = (stopped.body["sampling_params"] if api == "generate" else stopped.body)["stop"]
    assert [stop in text for stop in sorted(stops, key=len)] == [True, False]
    assert stopped == with_stop(request, Answer({0: Choice(text=text)}), seed=1)
    assert with_stop(request, Answer({0: Choice(text="")}), seed=1) == request
