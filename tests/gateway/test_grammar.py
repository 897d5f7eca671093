"""Structured output: the grammar sent to the verifier, and errors under the client's names."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from pydantic import BaseModel
from tokenizers import Tokenizer

from foretoken.limits import MAX_GRAMMAR_BYTES
from gateway.grammar import GrammarFields, requested_grammar
from protos import common_pb2, gateway_pb2, gateway_pb2_grpc
from tests.gateway.conftest import MODEL, Stack, events
from tests.gateway.scripted_verifier import STOP, Player, steps
from verifier_svc.sampling.grammar import Vocabulary, compile_grammar

pytestmark = pytest.mark.anyio
DEMO = Path(__file__).parents[2] / "models" / "demo" / "target"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
URLS = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}
WRAPPED = {"type": "json_schema", "json_schema": {"name": "x", "description": None, "strict": True, "schema": SCHEMA}}
OPENAI: list[tuple[dict[str, Any], tuple[str, Any]]] = [
    ({"response_format": {"type": "json_object"}}, ("json_object", True)),
    ({"response_format": WRAPPED}, ("json_schema", SCHEMA)),
    ({"guided_json": SCHEMA}, ("json_schema", SCHEMA)),
    ({"guided_json": json.dumps(SCHEMA)}, ("json_schema", SCHEMA)),
    ({"guided_regex": "a+"}, ("regex", "a+")),
    ({"structured_outputs": {"json": SCHEMA}}, ("json_schema", SCHEMA)),
    ({"structured_outputs": {"regex": "a|b"}}, ("regex", "a|b")),
    ({"structured_outputs": {"json_object": True}}, ("json_object", True)),
    ({"structured_outputs": {"choice": ["yes", "a.b|c"]}}, ("regex", r"(yes|a\.b\|c)")),
    ({"regex": "a+"}, ("regex", "a+")),
    ({"ebnf": 'root ::= "a"'}, ("lark", 'root ::= "a"')),
    ({"json_schema": SCHEMA}, ("json_schema", SCHEMA)),
    ({"json_schema": json.dumps(SCHEMA)}, ("json_schema", SCHEMA)),
    ({"json_schema": None, "regex": None, "ebnf": None}, (None, None)),
    ({"guided_choice": ["$1 [x]", "\\^"]}, ("regex", r"(\$1 \[x\]|\\\^)")),
    ({"structured_outputs": {"json_object": False}, "response_format": {"type": "text"}}, (None, None)),
]


def grammar_of(sampling: common_pb2.SamplingParams) -> tuple[str | None, Any]:
    kind = sampling.WhichOneof("grammar")
    if kind is None:
        return None, None
    value = getattr(sampling, kind)
    return kind, json.loads(value) if kind == "json_schema" else value


@pytest.mark.parametrize("url", URLS)
async def test_openai_bodies(stack: Stack, url: str) -> None:
    for number, (fields, expected) in enumerate(OPENAI):
        answer = await stack.http.post(url, json={**URLS[url], **fields})
        assert answer.status_code == 200, (fields, answer.text)
        assert grammar_of(stack.verifier.submitted[number].sampling) == expected
    # In the client's order, which is the order of the output.
    text = stack.verifier.submitted[1].sampling.json_schema
    assert text.index('"b"') < text.index('"a"')


async def test_sglang_bodies(stack: Stack) -> None:
    for number, (fields, expected) in enumerate(
        [
            ({"json_schema": json.dumps(SCHEMA)}, ("json_schema", SCHEMA)),
            ({"json_schema": SCHEMA}, ("json_schema", SCHEMA)),
            ({"regex": "a{2}"}, ("regex", "a{2}")),
            ({"regex": None, "json_schema": None}, (None, None)),
        ]
    ):
        answer = await stack.http.post("/generate", json={"text": "a", "sampling_params": fields})
        assert answer.status_code == 200, (fields, answer.text)
        assert grammar_of(stack.verifier.submitted[number].sampling) == expected


async def test_grpc(stack: Stack) -> None:
    async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        for sampling in (
            common_pb2.SamplingParams(json_schema=json.dumps(SCHEMA)),
            common_pb2.SamplingParams(regex=""),
            common_pb2.SamplingParams(json_object=True),
        ):
            async for _ in stub.Generate(gateway_pb2.GenerateRequest(text="a", sampling=sampling)):
                pass
            got = stack.verifier.submitted[-1].sampling
            assert got.WhichOneof("grammar") is not None
            assert grammar_of(got) == grammar_of(sampling)
        off = gateway_pb2.GenerateRequest(text="a", sampling=common_pb2.SamplingParams(json_object=False))
        async for _ in stub.Generate(off):
            pass
        assert stack.verifier.submitted[-1].sampling.WhichOneof("grammar") is None
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            sampling = common_pb2.SamplingParams(regex="a" * (MAX_GRAMMAR_BYTES["regex"] + 1))
            async for _ in stub.Generate(gateway_pb2.GenerateRequest(text="a", sampling=sampling)):
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"not": value}
    return value


LONG_SCHEMA = {"description": "é" * (MAX_GRAMMAR_BYTES["json_schema"] // 2)}
BAD: list[tuple[str | None, dict[str, Any]]] = [
    ("response_format.type", {"response_format": {"type": "xml"}}),
    ("response_format", {"response_format": {"type": "json_schema"}}),
    ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}),
    ("response_format.json_schema.schema", {"response_format": {**WRAPPED, "json_schema": {"schema": "{}"}}}),
    ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"schema": LONG_SCHEMA}}}),
    # The body is refused before anybody looks for fields.
    (None, {"response_format": {"type": "json_schema", "json_schema": {"schema": nested(300)}}}),
    ("guided_json", {"guided_json": "{"}),
    ("guided_json", {"guided_json": "[1]"}),
    ("guided_json", {"guided_json": 5}),
    ("guided_json", {"guided_json": json.dumps(LONG_SCHEMA)}),
    ("guided_regex", {"guided_regex": "a" * (MAX_GRAMMAR_BYTES["regex"] + 1)}),
    ("guided_regex", {"guided_regex": "é" * (MAX_GRAMMAR_BYTES["regex"] // 2 + 1)}),
    ("guided_regex", {"guided_regex": "a", "guided_json": {}}),
    ("structured_outputs", {"structured_outputs": {"json": {}, "regex": "a"}}),
    ("structured_outputs", {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}),
    ("structured_outputs.choice", {"structured_outputs": {"choice": []}}),
    ("structured_outputs.choice", {"structured_outputs": {"choice": "a"}}),
    ("structured_outputs", {"structured_outputs": {"choice": ["a"], "regex": "a"}}),
    ("structured_outputs", {"structured_outputs": {"grammar": "root ::= a", "regex": "a"}}),
    ("structured_outputs.structural_tag", {"structured_outputs": {"structural_tag": "{}"}}),
    ("guided_grammar", {"guided_grammar": "é" * (MAX_GRAMMAR_BYTES["lark"] // 2 + 1)}),
    ("guided_choice", {"guided_choice": ["a" * MAX_GRAMMAR_BYTES["regex"]]}),
    ("regex", {"regex": "a" * (MAX_GRAMMAR_BYTES["regex"] + 1)}),
    ("regex", {"regex": 5}),
    ("regex", {"regex": "a", "guided_regex": "a"}),
    ("ebnf", {"ebnf": "root ::= a", "response_format": {"type": "json_object"}}),
    ("regex", {"regex": "a", "json_schema": {}}),
    ("json_schema", {"json_schema": [1]}),
]


@pytest.mark.parametrize("url", URLS)
async def test_bad_fields_are_named(stack: Stack, url: str) -> None:
    for field, body in BAD:
        answer = await stack.http.post(url, json={**URLS[url], **body})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), (field, answer.text)
    assert not stack.verifier.submitted


async def test_a_second_form_of_the_output_is_named_with_the_first(stack: Stack) -> None:
    body = {"prompt": "a", "regex": "a", "json_schema": "{}"}
    error = (await stack.http.post("/v1/completions", json=body)).json()["error"]
    assert error["message"] == "regex asks for a second form of the output, beside json_schema"
    assert error["param"] == "regex"
    body = {"prompt": "a", "structured_outputs": {"regex": "a", "choice": ["a"]}}
    error = (await stack.http.post("/v1/completions", json=body)).json()["error"]
    assert error["message"] == "structured_outputs asks for a second form of the output"


async def test_bad_fields_of_sglang_are_named(stack: Stack) -> None:
    for field, sampling in (
        ("json_schema", {"json_schema": "{"}),
        ("json_schema", {"json_schema": [1]}),
        ("regex", {"regex": "a" * (MAX_GRAMMAR_BYTES["regex"] + 1)}),
        ("regex", {"regex": "a", "json_schema": "{}"}),
    ):
        answer = await stack.http.post("/generate", json={"text": "a", "sampling_params": sampling})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text
    assert not stack.verifier.submitted


@pytest.mark.parametrize("stream", [True, False])
async def test_what_the_verifier_refuses_is_a_400_of_the_field_that_the_client_sent(stack: Stack, stream: bool) -> None:
    async def play(player: Player) -> None:
        player.error(grpc.StatusCode.INVALID_ARGUMENT, "the JSON schema cannot be used: no", field="json_schema")

    stack.verifier.script = play
    for url, fields, field in (
        ("/v1/chat/completions", {"response_format": WRAPPED}, "response_format"),
        ("/v1/completions", {"guided_json": SCHEMA}, "guided_json"),
        ("/v1/completions", {"structured_outputs": {"json": SCHEMA}}, "structured_outputs"),
        ("/generate", {"text": "a", "sampling_params": {"json_schema": SCHEMA}}, "json_schema"),
        ("/generate", {"text": "a", "sampling_params": {"ebnf": 'root ::= "a"'}}, "ebnf"),
    ):
        answer = await stack.http.post(url, json={**URLS.get(url, {}), **fields, "stream": stream})
        assert answer.status_code == 400
        assert answer.json()["error"] == {
            "message": "the JSON schema cannot be used: no",
            "type": "invalid_request_error",
            "param": field,
            "code": None,
        }
    # The client's fault, so no failure is counted.
    assert await stack.metric("foretoken_admission_rejections_total", reason="invalid_argument") == 5
    assert await stack.metric("foretoken_request_failure_total", reason="invalid_argument") == 0


async def test_an_output_that_cannot_go_on_ends_its_stream_with_the_field(stack: Stack) -> None:
    async def play(player: Player) -> None:
        player.tokens(stack.ids("hello"))
        while not seen:
            await stack.http.get("/health")
        player.error(grpc.StatusCode.INVALID_ARGUMENT, "the grammar cannot go on", field="regex")

    seen: list[str] = []
    stack.verifier.script = play
    body = {"prompt": "a", "guided_regex": "hello.", "stream": True}
    async with stack.http.stream("POST", "/v1/completions", json=body) as response:
        async for part in response.aiter_text():
            seen.append(part)
    *chunks, last = events("".join(seen))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello"
    assert last["error"]["param"] == "guided_regex"
    assert await stack.metric("foretoken_admission_rejections_total", reason="invalid_argument") == 0
    assert await stack.metric("foretoken_request_failure_total", reason="invalid_argument") == 1


class Point(BaseModel):
    x: int
    y: int


async def test_the_openai_sdk_parses_what_it_asked_for(stack: Stack) -> None:
    stack.verifier.script = steps(stack.ids('{"x": 1, '), stack.ids('"y": 22}'), reason=STOP)
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none") as client:
        answer = await client.chat.completions.parse(
            model=MODEL, messages=[{"role": "user", "content": "a point"}], response_format=Point
        )
    assert answer.choices[0].message.parsed == Point(x=1, y=22)
    kind, schema = grammar_of(stack.verifier.submitted[0].sampling)
    assert kind == "json_schema" and schema["properties"].keys() == {"x", "y"}
    assert schema["additionalProperties"] is False


@pytest.fixture(scope="module")
def demo() -> Vocabulary:
    return Vocabulary(DEMO, vocab_limit=8192, eos_ids=frozenset({0, 3}))


@pytest.mark.parametrize("odd", [*string.printable, "日本", "\\d+", "a|b", "(?i)x", "[[:alpha:]&&b]", "a//b", ""])
def test_a_choice_is_taken_literally(odd: str, demo: Vocabulary) -> None:
    choices = [f"x{odd}y", odd]
    fields = GrammarFields.model_validate({"structured_outputs": {"choice": choices}})
    grammar, field = requested_grammar(fields)
    assert grammar is not None and field == "structured_outputs"
    compiled = compile_grammar(grammar, demo)
    encode = Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode
    for text, is_one in ((choices[0], True), (choices[1], True), (f"x{odd}", False), (f"{odd}y", False)):
        matcher = compiled.anew()
        follows = not text or matcher.advance(encode(text, add_special_tokens=False).ids)
        assert (follows and matcher.is_accepting) == is_one, text
