"""Make requests at random, from a seed: nearly valid ones, nonsense, and bytes that are no JSON."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from gateway.access.routes import ROUTES, RPCS, Who
from protos import common_pb2, gateway_pb2

GENERATE_RPC = "/foretoken.gateway.v1.GatewayService/Generate"
REFLECTION_RPC = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
# Sends a status whenever it changes, until the client hangs up.
ENDLESS_RPC = "/grpc.health.v1.Health/Watch"
PUBLIC_RPCS = [rpc.path for rpc in RPCS if rpc.who is not Who.SERVICE]
# The gateway serves none of them.
OTHER_RPCS = [
    "/foretoken.verifier.v1.VerifierService/GetInfo",
    "/foretoken.gateway.v1.GatewayService/None",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/x",
]
SERVICES = ["", "foretoken.gateway.v1.GatewayService", "grpc.health.v1.Health", "foretoken.gateway.v1.Chunk", "x"]
MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
# A valid body for each path, with fields that are then changed.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "prompt": "def add(a, b):",
        "max_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "stop": ["\n\n"],
        "seed": 7,
        "n": 1,
        "stream": False,
        "stream_options": {"include_usage": True},
        "logprobs": 2,
        "echo": False,
        "logit_bias": {"5": 1.5},
        "speculative": {"enabled": True, "max_draft_tokens": 4},
    },
    "/v1/chat/completions": {
        "messages": MESSAGES,
        "max_completion_tokens": 3,
        "temperature": 0,
        "stream": True,
        "logprobs": True,
        "top_logprobs": 1,
        "tools": [TOOL],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "prediction": {"type": "content", "content": "Hi"},
    },
    "/v1/responses": {
        "input": MESSAGES,
        "instructions": "Be short.",
        "max_output_tokens": 16,
        "temperature": 0,
        "stream": True,
        "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}],
        "tool_choice": "auto",
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
        "include": ["message.output_text.logprobs"],
        "truncation": "auto",
        "metadata": {"a": "b"},
        "store": False,
    },
    "/v1/messages": {
        "system": "Be short.",
        "messages": MESSAGES[1:],
        "max_tokens": 3,
        "temperature": 0,
        "stop_sequences": ["x"],
        "stream": True,
        "tools": [{"name": "add", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "disabled"},
        "metadata": {"user_id": "fuzz"},
    },
    "/v1/messages/count_tokens": {"messages": MESSAGES[1:], "system": [{"type": "text", "text": "Be short."}]},
    "/generate": {
        "text": "def add(a, b):",
        "sampling_params": {"max_new_tokens": 3, "temperature": 0, "stop": "x"},
        "stream": False,
        "return_logprob": True,
        "logprob_start_len": 0,
        "rid": "fuzz",
    },
    "/tokenize": {"prompt": "Hello", "add_special_tokens": True, "return_token_strs": True},
    "/detokenize": {"tokens": [1, 2, 3], "skip_special_tokens": False},
    "/abort_request": {"rid": "fuzz", "abort_all": False},
    "/v1/corpora": {"name": "fuzz", "text": "def add(a, b):", "append": False},
    # Nothing listens there.
    "/v1/drafters": {"name": "fuzz", "address": "127.0.0.1:1", "transport": "grpc"},
}
PATHS = sorted({re.sub(r"\{[^}]+\}", "x", route.path) for route in ROUTES})
OPERATORS_PATHS = ("/v1/activity", "/v1/corpora", "/v1/drafters", "/flush_cache")
METHODS = ["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"]
NAMES = [
    *("max_tokens", "top_k", "min_p", "stop_token_ids", "min_tokens", "ignore_eos", "repetition_penalty", "user"),
    *("structured_outputs", "guided_regex", "guided_json", "guided_choice", "cache_salt", "model", "input_ids"),
    *("suffix", "best_of", "prediction", "chat_template_kwargs", "return_token_sources", "messages", "prompt", "tools"),
    "return_draft_tree",
    *("allowed_token_ids", "bad_words", "prompt_logprobs", "truncate_prompt_tokens", "return_token_ids", "priority"),
    *(
        "ebnf",
        "regex",
        "json_schema",
        "logit_bias",
        "seed",
        "n",
        "input",
        "system",
        "tool_choice",
        "response_format",
        "previous_response_id",
    ),
]
TEXTS = [
    *(
        "",
        "a",
        "\x00",
        "\ud800",
        "🙂" * 40,
        "é́" * 9,
        "</s><|end|>",
        "x" * 5000,
        "../../etc/passwd",
        "{{ 7*7 }}",
        "%s%n",
    ),
    *("none", "auto", "required", "NaN", "[a-z]{1,9}", "(((((", "-1", "1e999", "tiny", "target", "\r\nx: y"),
]
NUMBERS = [0, 1, -1, 2, 16, 17, 255, 256, 2**31, 2**63, -(2**63) - 1, 10**40, 0.0, 1e308, -0.5, 1e-320, 0.1]


@dataclass(frozen=True, slots=True)
class RestRequest:
    method: str
    path: str
    content: bytes
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RpcRequest:
    """A call. One without a stream of requests may still have none or several."""

    path: str
    messages: tuple[bytes, ...]
    metadata: tuple[tuple[str, str], ...] = ()


class FuzzedRequests:
    """Makes requests; the same seed and keys make the same ones."""

    def __init__(self, seed: int, keys: Sequence[str] = (), operator_key: str = "") -> None:
        """``keys``: clients'; most requests show the key that their path needs."""
        self._random = random.Random(seed)
        self._keys = tuple(keys)
        self._operator_key = operator_key

    def rest(self) -> RestRequest:
        """Return a REST request; three in four are a valid one with up to three changes."""
        draw = self._random
        path = draw.choice([*BODIES] * 3 + PATHS)
        if path not in BODIES or draw.random() < 0.1:
            path = draw.choice(
                [path, path + "/", path + "?a=%ff&a", "//" + path, path + "/%2e%2e", "/" + self._token()]
            )
            return RestRequest(draw.choice(METHODS), path, draw.choice([b"", self._nonsense()]), self._headers(path))
        body = json.loads(json.dumps(BODIES[path]))
        for _ in range(draw.choice([0, 1, 1, 2, 3])):
            self._change(body)
        content = json.dumps(body).encode()
        if draw.random() < 0.1:
            content = self._broken(content)
        return RestRequest("POST", path, content, self._headers(path))

    def rpc(self) -> RpcRequest:
        """Return a call, of Generate in half of the cases; its bytes may be no message."""
        draw = self._random
        path = GENERATE_RPC if draw.random() < 0.5 else draw.choice([*PUBLIC_RPCS, draw.choice(OTHER_RPCS)])
        usual = draw.randrange(1, 5) if path == REFLECTION_RPC else 1
        count = draw.choice([0, 2]) if draw.random() < 0.05 else usual
        messages = [self._message(path) for _ in range(count)]
        return RpcRequest(path, tuple(messages), tuple(self._key().items()))

    def _message(self, path: str) -> bytes:
        draw = self._random
        if path == GENERATE_RPC:
            data = self._generation()
        elif path == REFLECTION_RPC:
            data = self._question()
        else:
            # GetModel and List have no fields: this one is unknown to them.
            data = health_pb2.HealthCheckRequest(service=self._service()).SerializeToString()
        return self._broken(data) if draw.random() < 0.15 else data

    def _question(self) -> bytes:
        """Return a message for reflection."""
        draw = self._random
        message = reflection_pb2.ServerReflectionRequest(host=draw.choice(["", "fuzz"]))
        match draw.randrange(6):
            case 0:
                message.file_by_filename = draw.choice(["protos/gateway.proto", "grpc/health/v1/health.proto", "x"])
            case 1:
                message.file_containing_symbol = self._service()
            case 2:
                message.file_containing_extension.containing_type = self._service()
                message.file_containing_extension.extension_number = draw.choice([0, 1, -1, 2**31 - 1])
            case 3:
                message.all_extension_numbers_of_type = self._service()
            case 4:
                message.list_services = self._service()
        return bytes(message.SerializeToString())

    def _service(self) -> str:
        return self._random.choice(SERVICES) if self._random.random() < 0.8 else self._utf8()

    def _utf8(self) -> str:
        """Return a text that protobuf takes: one without halves of surrogates."""
        return self._text().encode("utf-8", "replace").decode()

    def _generation(self) -> bytes:
        """Return a message for Generate."""
        draw = self._random
        message = gateway_pb2.GenerateRequest(
            sampling=self._sampling(), request_id=draw.choice(["", "fuzz", "é", "x" * 200])
        )
        if draw.random() < 0.6:
            message.token_ids.ids.extend(draw.choices([0, 1, 5, 7, 300], k=draw.randrange(1, 6)))
        elif draw.random() < 0.8:
            message.text = self._utf8()
        if draw.random() < 0.2:
            message.n = draw.choice([0, 1, 2, 17, 2**31])
        if draw.random() < 0.2:
            message.stop.extend(self._utf8() for _ in range(draw.randrange(7)))
        if draw.random() < 0.1:
            message.model = draw.choice(["", "other"])
        self._add_extras(message)
        return message.SerializeToString()

    def _add_extras(self, message: gateway_pb2.GenerateRequest) -> None:
        draw = self._random
        if draw.random() < 0.2:
            message.speculation.enabled = draw.choice([True, False])
            message.speculation.drafter = draw.choice(["", "auto", "merge", "ngram", "x+x", self._utf8()])
            message.speculation.max_draft_tokens = draw.choice([0, 1, 7, 2**32 - 1])
        if draw.random() < 0.2:
            message.bad_words.extend(self._utf8() for _ in range(draw.randrange(4)))
        if draw.random() < 0.2:
            message.prediction_text = self._utf8()
        if draw.random() < 0.2:
            message.truncate_prompt_tokens = draw.choice([-1, 0, 1, 2**31 - 1, -(2**31)])
        if draw.random() < 0.2:
            message.priority = draw.choice([0, 1, -1, 2**31 - 1, -(2**31)])

    def _sampling(self) -> common_pb2.SamplingParams:
        draw = self._random
        sampling = common_pb2.SamplingParams(max_tokens=draw.choice([0, 1, 3, 2**31]))
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"):
            if draw.random() < 0.2:
                setattr(sampling, name, draw.choice([0.0, 1.0, -1.0, 0.5, float("nan"), float("inf"), 1e30]))
        if draw.random() < 0.3:
            sampling.seed = draw.choice([0, -1, 2**63 - 1])
        if draw.random() < 0.2:
            sampling.stop_token_ids.extend(draw.choices([0, 1, 5, 2**32 - 1], k=draw.randrange(70)))
        return sampling

    def _change(self, body: dict[str, Any]) -> None:
        draw = self._random
        name = draw.choice([*body, draw.choice(NAMES)]) if body else draw.choice(NAMES)
        inner = body.get(name)
        match draw.randrange(5):
            case 0:
                body.pop(name, None)
            case 1 if isinstance(inner, dict) and inner:
                inner[draw.choice([*inner])] = self._value(2)
            case 2 if isinstance(inner, list) and inner:
                inner[draw.randrange(len(inner))] = self._value(2)
            case 3:
                body[draw.choice([name, self._token()])] = self._value(3)
            case _:
                body[name] = self._value(3)

    def _value(self, depth: int) -> Any:
        draw = self._random
        match draw.randrange(8 if depth else 5):
            case 0:
                return draw.choice(NUMBERS)
            case 1:
                return self._text()
            case 2:
                return draw.choice([None, True, False])
            case 3 | 4:
                return draw.choice([draw.randint(-5, 40), draw.random() * 3])
            case 5:
                return [self._value(depth - 1) for _ in range(draw.choice([0, 1, 3, 70]))]
            case 6:
                return [draw.randint(0, 400) for _ in range(draw.choice([1, 5, 100, 1200]))]
        return {draw.choice([*NAMES, "type", "content", "text", "role"]): self._value(depth - 1) for _ in range(3)}

    def _text(self) -> str:
        draw = self._random
        return draw.choice(TEXTS) if draw.random() < 0.7 else "".join(chr(draw.randrange(0x3000)) for _ in range(20))

    def _token(self) -> str:
        return "".join(self._random.choices("abcdefghijklmnopqrstuvwxyz_./%0", k=8)).replace("%", "%25")

    def _nonsense(self) -> bytes:
        return self._random.choice([b"{", b"null", b"[]", b'"a"', b"[" * 3000, b"{}", self._random.randbytes(50)])

    def _broken(self, data: bytes) -> bytes:
        draw = self._random
        place = draw.randrange(len(data) + 1)
        match draw.randrange(3):
            case 0:
                return data[:place]
            case 1:
                return data[:place] + draw.randbytes(3) + data[place:]
        return data[:place] + data[place + 1 :]

    def _headers(self, path: str) -> dict[str, str]:
        draw = self._random
        headers = {"content-type": "application/json"}
        if draw.random() < 0.05:
            headers["content-type"] = draw.choice(["text/plain", "", "application/x+json; charset=latin-1", "a" * 300])
        if draw.random() < 0.1:
            name = draw.choice(["x-request-id", "traceparent", "authorization", "origin", "accept", "x-api-key"])
            headers[name] = draw.choice(["", "x" * 200, "00-0-0-0", "Bearer x", "http://localhost", "*/*"])
        return self._key(path) | headers

    def _key(self, path: str = "") -> dict[str, str]:
        """Return the header of a key, now and then one that may not make the call, or none."""
        draw = self._random
        is_operators = path.startswith(OPERATORS_PATHS)
        keys = [self._operator_key] if is_operators and self._operator_key else [*self._keys]
        if draw.random() < 0.05:
            keys = ["", "wrong", self._operator_key, *self._keys]
        key = draw.choice(keys) if keys else ""
        if not key:
            return {}
        return draw.choice([{"authorization": f"Bearer {key}"}, {"x-api-key": key}])
