"""A model may have several names: requests use any of them, and metrics have the first."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from foretoken.config import build
from gateway.access.key_file import entry_text
from gateway.config import GatewaySettings
from gateway.tokenizer import Tokenizer
from protos import gateway_pb2, gateway_pb2_grpc
from tests.gateway.conftest import Stack, events, run_stack

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
    # Some clients join the path with an empty name.
    assert (await stack.http.get("/v1/models/")).json()["data"] == data


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


# Keys of some of the names.

FIRST, SECOND, BOTH, NONE = "a key for the first", "a key for the second", "a key for all", "a key for another model"


@pytest.fixture
async def guarded(settings: GatewaySettings, tokenizer: Tokenizer, tmp_path: Path) -> AsyncIterator[Stack]:
    keys = (("first", FIRST, NAMES[:1]), ("second", SECOND, NAMES[1:]), ("both", BOTH, ()), ("none", NONE, ("x",)))
    path = tmp_path / "keys.toml"
    path.write_text("".join(entry_text(name, key, models=list(models)) for name, key, models in keys))
    settings = build(GatewaySettings, settings.model_dump() | {"api_key_file": path})
    async for running in run_stack(settings, tokenizer, tmp_path / "v.sock"):
        running.verifier.info.model_name = NAMES[0]
        yield running


@pytest.mark.parametrize(
    ("key", "own"), [(FIRST, NAMES[:1]), (SECOND, NAMES[1:]), (BOTH, NAMES)], ids=["first", "second", "both"]
)
async def test_a_key_uses_and_sees_its_own_names_alone(guarded: Stack, key: str, own: tuple[str, ...]) -> None:
    guarded.http.headers["x-api-key"] = key
    data = (await guarded.http.get("/v1/models")).json()["data"]
    assert [(entry["id"], entry["root"]) for entry in data] == [(name, own[0]) for name in own]
    for name in NAMES:
        status = 200 if name in own else 403
        assert (await guarded.http.get(f"/v1/models/{name}")).status_code == status
        for path, body in (("/v1/completions", {"prompt": "a"}), ("/generate", {"text": "a"})):
            assert (await guarded.http.post(path, json={**body, "model": name})).status_code == status
    # A request without a name means the first of its own.
    assert (await guarded.http.post("/v1/completions", json={"prompt": "a"})).json()["model"] == own[0]
    for path, member in (
        ("/ready", "model"),
        ("/version", "model"),
        ("/server_info", "served_model_name"),
        ("/model_info", "served_model_name"),
    ):
        answer = await guarded.http.get(path)
        assert answer.json()[member] == own[0]
        assert not [name for name in NAMES if f'"{name}"' in answer.text and name not in own], answer.text
    async with grpc.aio.insecure_channel(guarded.grpc_address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        model = await stub.GetModel(gateway_pb2.GetModelRequest(), metadata=(("x-api-key", key),))
        assert model.model == own[0]
        async for _ in stub.Generate(gateway_pb2.GenerateRequest(text="a"), metadata=(("x-api-key", key),)):
            pass


async def test_a_key_of_no_served_name_may_do_nothing(guarded: Stack) -> None:
    for path in ("/v1/models", "/version", "/server_info"):
        answer = await guarded.http.get(path, headers={"x-api-key": NONE})
        assert answer.status_code == 403 and not [name for name in NAMES if name in answer.text]
