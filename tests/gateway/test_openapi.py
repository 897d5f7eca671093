"""The OpenAPI document describes every route with answers, statuses and bounds; /docs shows it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from foretoken import limits
from foretoken.limits import SAMPLING_RANGES
from gateway.access.routes import ROUTES
from gateway.config import GatewaySettings
from gateway.openapi import answers
from gateway.openapi.document import ANSWERS, EXAMPLES, NONE
from tests.gateway.conftest import Stack

pytestmark = pytest.mark.anyio
KEY = "an operator's key"


@pytest.fixture
def settings(settings: GatewaySettings, tmp_path: Any) -> GatewaySettings:
    (tmp_path / "key").write_text(KEY)
    return settings.model_copy(update={"admin_api_key_file": tmp_path / "key"})


@pytest.fixture
async def document(stack: Stack) -> dict[str, Any]:
    answer = await stack.http.get("/openapi.json")
    found: dict[str, Any] = answer.json()
    return found


def inside(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects of a JSON value."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from inside(item)


def body(document: dict[str, Any], path: str) -> dict[str, Any]:
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    found: dict[str, Any] = content["schema"]
    return found


def bounds(schema: dict[str, Any]) -> tuple[float, float]:
    found = next(part for part in inside(schema) if "maximum" in part)
    return found.get("minimum", found.get("exclusiveMinimum")), found["maximum"]


async def test_every_route_has_an_answer_and_all_statuses(document: dict[str, Any]) -> None:
    routes = {(method.upper(), path) for path, operations in document["paths"].items() for method in operations}
    # A route that is missing here needs a row in ANSWERS.
    assert routes == ANSWERS.keys()
    # The document describes all but pages and itself.
    pages = {"/", "/playground/{name}", "/docs", "/openapi.json"}
    served = {(route.method, route.path.replace(":path}", "}")) for route in ROUTES if route.path not in pages}
    assert routes == served
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            statuses = set(operation["responses"])
            assert ("200" in statuses) == (ANSWERS[method.upper(), path] != NONE)
            assert {"400", "401", "403", "421", "500"} <= statuses, (method, path)
            assert "requestBody" not in operation or {"408", "413", "415", "429", "503"} <= statuses
            assert operation["tags"] and operation["description"], (method, path)


async def test_a_streams_schema_is_that_of_each_event(document: dict[str, Any]) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/generate"):
        schema = document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]
        assert (schema["type"], schema["required"]) == ("object", ["data"])


async def test_references_lead_somewhere_and_operations_have_names_of_their_own(document: dict[str, Any]) -> None:
    references = {part["$ref"] for part in inside(document) if "$ref" in part}
    names = {reference.removeprefix("#/components/schemas/") for reference in references}
    assert names and names <= set(document["components"]["schemas"])
    ids = [operation["operationId"] for operations in document["paths"].values() for operation in operations.values()]
    assert len(ids) == len(set(ids))
    schemes = {name for part in inside(document["paths"]) for item in part.get("security", ()) for name in item}
    assert schemes <= set(document["components"]["securitySchemes"])


async def test_bounds_are_those_of_the_limits(document: dict[str, Any]) -> None:
    completion, chat = (body(document, path)["properties"] for path in ("/v1/completions", "/v1/chat/completions"))
    for properties in (completion, chat):
        for name in SAMPLING_RANGES.keys() & properties.keys() - {"logprobs"}:
            # A completion may echo its prompt alone.
            low = 0 if properties is completion and name == "max_tokens" else SAMPLING_RANGES[name].low
            assert bounds(properties[name]) == (low, SAMPLING_RANGES[name].high), name
        assert bounds(properties["n"]) == (1, limits.MAX_N)
    assert bounds(chat["top_logprobs"]) == bounds(completion["logprobs"]) == (0, 20)
    assert chat["messages"]["maxItems"] == limits.MAX_CHAT_MESSAGES
    sampling = body(document, "/generate")["properties"]["sampling_params"]["anyOf"][0]["properties"]
    assert bounds(sampling["max_new_tokens"]) == (1, SAMPLING_RANGES["max_tokens"].high)


ANSWERED: list[tuple[str, str, dict[str, Any] | None]] = [
    *((method, path, None) for method, path in ANSWERS if method == "GET" and "{" not in path),
    *(("POST", path, example) for path, example in EXAMPLES.items() if path not in ("/v1/corpora", "/v1/drafters")),
    ("POST", "/v1/completions", {"prompt": [5], "n": 2, "logprobs": 1}),
    ("GET", "/v1/models/tiny", None),
]


@pytest.mark.parametrize(("method", "path", "given"), ANSWERED)
async def test_answers_are_as_described(stack: Stack, method: str, path: str, given: dict[str, Any] | None) -> None:
    if "model" in (given or {}):
        given = {**(given or {}), "model": "tiny"}
    kind = ANSWERS[method, "/v1/models/{name}" if path == "/v1/models/tiny" else path]
    stack.verifier.info.num_running = 0
    headers = {"authorization": f"Bearer {KEY}"}
    answer = await stack.http.request(method, path, json=given, headers=headers)
    if path == "/v1/corpora":
        # The scripted verifier has none.
        assert answer.status_code == 500
        answers.Error.model_validate(answer.json())
        return
    assert answer.status_code == 200, answer.text
    if isinstance(kind, str):
        assert answer.headers["content-type"].startswith(kind)
    else:
        kind.model_validate(answer.json())


async def test_errors_are_as_described(stack: Stack) -> None:
    for path, status in [("/v1/models/other", 404), ("/nothing", 404), ("/v1/completions", 405)]:
        answer = await stack.http.get(path)
        assert answer.status_code == status
        answers.Error.model_validate(answer.json())


async def test_a_wrong_method_is_told_all_that_the_path_has(stack: Stack) -> None:
    for path, allow in [("/flush_cache", "GET, POST"), ("/v1/corpora", "GET, POST"), ("/v1/corpora/a", "DELETE")]:
        answer = await stack.http.patch(path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allow)
    assert (await stack.http.patch("/docs")).headers["allow"] == "GET"


async def test_the_page_shows_all_operations_and_loads_nothing(stack: Stack, document: dict[str, Any]) -> None:
    answer = await stack.http.get("/docs")
    text = answer.text
    assert answer.headers["content-type"].startswith("text/html")
    for path in document["paths"]:
        assert f"<code>{path}</code>" in text
    assert re.findall(r'(?:href|src)="([^"]*)"', text) == ["openapi.json"]
    assert not re.search(r"<script|<link|<img|@import|url\(", text)
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert "integer (≥ 1, ≤ 1000000)" in text
    example = re.search(r"-d &#x27;(.*?)&#x27;</pre>", text)
    assert example is not None and json.loads(example[1].replace("&quot;", '"')) in EXAMPLES.values()
    assert f"curl -X POST {str(stack.http.base_url).rstrip('/')}/v1/completions" in text
