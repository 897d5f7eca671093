"""A model may have several names: requests use any of them, and metrics have the first."""

from __future__ import annotations

import pytest

from gateway.config import GatewaySettings
from tests.gateway.conftest import Stack, events

pytestmark = pytest.mark.anyio
NAMES = ("tiny", "org/tiny-other")


@pytest.fixture
def settings(settings: GatewaySettings) -> GatewaySettings:
    return settings.model_copy(update={"served_model_names": NAMES})


async def test_all_names_are_listed_with_the_context(stack: Stack) -> None:
    data = (await stack.http.get("/v1/models")).json()["data"]
    assert [(entry["id"], entry["root"], entry["max_model_len"]) for entry in data] == [
        (name, "tiny", 128) for name in NAMES
    ]
    for name in NAMES:
        one = (await stack.http.get(f"/v1/models/{name}")).json()
        assert one == next(entry for entry in data if entry["id"] == name)


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {})])
async def test_the_answer_has_the_name_of_the_request(stack: Stack, path: str, body: dict[str, object]) -> None:
    body = body or {"messages": [{"role": "user", "content": "a"}]}
    for asked, answered in [("tiny", "tiny"), (NAMES[1], NAMES[1]), (None, "tiny"), ("", "tiny")]:
        given = {**body, "model": asked}
        assert (await stack.http.post(path, json=given)).json()["model"] == answered
        chunks = events((await stack.http.post(path, json={**given, "stream": True})).text)
        assert {chunk["model"] for chunk in chunks} == {answered}
    error = (await stack.http.post(path, json={**body, "model": "org"})).json()["error"]
    assert error["code"] == "model_not_found" and "'tiny', 'org/tiny-other'" in error["message"]


async def test_metrics_have_the_first_name(stack: Stack) -> None:
    assert (await stack.http.post("/v1/completions", json={"prompt": "a", "model": NAMES[1]})).status_code == 200
    text = (await stack.http.get("/metrics")).text
    assert 'model_name="tiny"' in text and NAMES[1] not in text
