"""GET /v1/activity: load, drafters and the last minutes' requests, for the operator alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretoken.config import build
from gateway import recent_requests
from gateway.config import GatewaySettings
from gateway.recent_requests import KEPT_S, MOST_KEPT, RecentRequests
from protos import common_pb2
from tests.gateway.conftest import Stack
from tests.gateway.scripted_verifier import Player, steps

pytestmark = pytest.mark.anyio
KEY = "an operator's key"
AUTH = {"authorization": f"Bearer {KEY}"}
URL = "/v1/activity"


@pytest.fixture
def settings(settings: GatewaySettings, tmp_path: Path) -> GatewaySettings:
    (tmp_path / "operator").write_text(KEY)
    return build(GatewaySettings, settings.model_dump() | {"admin_api_key_file": tmp_path / "operator"})


async def test_it_tells_load_drafters_and_requests_without_their_texts(stack: Stack) -> None:
    stats = common_pb2.SpeculationStats(
        num_decode_steps=2, num_spec_steps=2, num_draft_tokens=8, num_accepted_tokens=3, drafter="ngram"
    )
    secret = "a text that nobody else may read"
    stack.verifier.script = steps(stack.ids("hello world"), stats=stats)
    for prompt in ("first", secret):
        answer = await stack.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 20, "user": secret})
        assert answer.status_code == 200
    refused = await stack.http.post("/v1/completions", json={"prompt": "third", "max_tokens": -1})
    assert refused.status_code == 400
    answer = await stack.http.get(URL, headers=AUTH)
    found = answer.json()
    assert (found["num_requests"], found["num_waiting"]) == (0, 0)
    (verifier,) = found["verifiers"]
    loads = ("up", "num_running", "num_waiting", "num_blocks", "num_free_blocks")
    assert [verifier[name] for name in loads] == [True, 3, 2, 10, 4]
    (drafter,) = verifier["drafters"]
    assert (drafter["name"], drafter["state"], drafter["num_accepted_tokens"]) == ("ngram", "attached", 30)
    last, first = found["requests"]
    assert last["ended_at"] >= first["ended_at"]
    assert (last["prompt_tokens"], first["prompt_tokens"]) == (len(stack.ids(secret)), len(stack.ids("first")))
    assert (last["api"], last["outcome"], last["drafter"]) == ("/v1/completions", "ok", "ngram")
    assert (last["draft_tokens"], last["accepted_tokens"]) == (8, 3)
    assert secret not in answer.text and "hello" not in answer.text


async def test_a_request_that_its_client_left_has_its_tokens_drafter(stack: Stack) -> None:
    """Its verifier's figures never come."""

    async def play(player: Player) -> None:
        player.tokens(stack.ids("hello world"))
        await player.aborted.wait()

    stack.verifier.script = play
    async with stack.http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as answer:
        await anext(answer.aiter_lines())
    await stack.verifier.until(lambda: len(stack.verifier.aborts) == 1)
    (ended,) = (await stack.http.get(URL, headers=AUTH)).json()["requests"]
    assert (ended["outcome"], ended["drafter"], ended["draft_tokens"]) == ("cancelled", "ngram", 0)


async def test_only_the_operator_may_ask(stack: Stack) -> None:
    assert (await stack.http.get(URL)).status_code == 401
    refused = await stack.http.get(URL, headers={"authorization": "Bearer other"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")


def test_only_the_latest_are_remembered_and_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(recent_requests.time, "time", lambda: now)
    recent = RecentRequests()
    for number in range(MOST_KEPT + 5):
        recent.add({"number": number})
    assert [entry["number"] for entry in recent.latest()] == [*range(MOST_KEPT + 4, 4, -1)]
    now += 1
    recent.add({"number": -1})
    now += KEPT_S - 0.5
    assert recent.latest() == [{"ended_at": 1001.0, "number": -1}]
