"""The operator's endpoints for drafters: closed without a key, passed on to verifiers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from foretoken.cli import app
from foretoken.commands.drafters_client import DraftersClient
from foretoken.errors import ConfigError, ForetokenError, NotFoundError, PreconditionError
from gateway import verifier_metrics, verifier_pool
from gateway.config import GatewaySettings
from gateway.server import Gateway
from gateway.tokenizer import Tokenizer
from protos import verifier_pb2
from tests.gateway.conftest import Stack
from tests.gateway.scripted_verifier import ScriptedVerifier, serving
from tests.support.tcp_clients import JSON_TYPE

pytestmark = pytest.mark.anyio
KEY = "an operator's key"
URL = "/v1/drafters"
AUTH = {"authorization": f"Bearer {KEY}"}
BODY = {"name": "late", "address": "unix:/run/late"}


class ChangingVerifier(ScriptedVerifier):
    """A verifier that lists its drafters in GetInfo and counts these calls."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.attached: list[tuple[str, str, str]] = []
        self.num_infos = 0
        # The state of an attaching drafter, later with each call.
        self.outcomes: list[tuple[str, str]] = []

    async def GetInfo(self, request: verifier_pb2.GetInfoRequest, context: Any) -> verifier_pb2.GetInfoResponse:
        self.num_infos += 1
        for drafter in self.info.drafters:
            if drafter.state == "connecting" and self.outcomes:
                drafter.state, drafter.reason = self.outcomes.pop(0)
        return await super().GetInfo(request, context)

    @property
    def states(self) -> dict[str, str]:
        return {drafter.name: drafter.state for drafter in self.info.drafters}

    def add(self, name: str) -> verifier_pb2.DrafterState:
        drafter = verifier_pb2.DrafterState(
            name=name,
            transport="shared-memory",
            address="unix:/run/late",
            state="connecting",
            reason="nothing listens at unix:/run/late",
        )
        self.info.drafters.append(drafter)
        return drafter

    async def AttachDrafter(
        self, request: verifier_pb2.AttachDrafterRequest, context: Any
    ) -> verifier_pb2.AttachDrafterResponse:
        for drafter in self.info.drafters:
            # As verifier_svc/drafters/registry.py.
            if (drafter.name, drafter.address) == (request.name, request.address) and drafter.state != "detached":
                return verifier_pb2.AttachDrafterResponse(drafter=drafter)
        if self.states.get(request.name, "detached") != "detached":
            raise PreconditionError(f"a drafter {request.name!r} is attached", field="name")
        self.attached.append((request.name, request.address, request.transport))
        return verifier_pb2.AttachDrafterResponse(drafter=self.add(request.name))

    async def DetachDrafter(
        self, request: verifier_pb2.DetachDrafterRequest, context: Any
    ) -> verifier_pb2.DetachDrafterResponse:
        for drafter in self.info.drafters:
            if drafter.name == request.name and drafter.state != "detached":
                drafter.state = "detached"
                return verifier_pb2.DetachDrafterResponse()
        raise NotFoundError(f"there is no drafter {request.name!r}", field="name")


class Operated:
    """A gateway with operator's endpoints before two verifiers."""

    def __init__(self, verifiers: list[ChangingVerifier], addresses: list[str], http: httpx.AsyncClient, key: Path):
        self.verifiers, self.addresses, self.http, self.key = verifiers, addresses, http, key

    @property
    def states(self) -> list[dict[str, str]]:
        return [verifier.states for verifier in self.verifiers]

    async def complete(self, drafter: str) -> httpx.Response:
        body = {"prompt": "hello", "max_tokens": 2, "speculative": {"drafter": drafter}}
        return await self.http.post("/v1/completions", json=body)


@pytest.fixture
async def operated(settings: GatewaySettings, tokenizer: Tokenizer, tmp_path: Path) -> AsyncIterator[Operated]:
    key = tmp_path / "key"
    key.write_text(KEY + "\n")
    addresses = [f"unix:{tmp_path}/v{number}.sock" for number in range(2)]
    changes = {"admin_api_key_file": key, "verifiers": tuple(addresses)}
    async with contextlib.AsyncExitStack() as stack:
        verifiers = [ChangingVerifier(tokenizer.vocab_size) for _ in addresses]
        for verifier, address in zip(verifiers, addresses, strict=True):
            await stack.enter_async_context(serving(verifier, Path(address.removeprefix("unix:"))))
        gateway = await stack.enter_async_context(Gateway(settings.model_copy(update=changes)))
        for client in gateway.verifiers.clients:
            await client.wait_up()
        url = f"http://127.0.0.1:{settings.port}"
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=url, timeout=None, headers=JSON_TYPE, verify=False)
        )
        yield Operated(verifiers, addresses, http, key)


CALLS = [("POST", URL), ("GET", URL), ("DELETE", f"{URL}/ngram")]


@pytest.mark.parametrize(("method", "url"), CALLS)
async def test_without_a_key_file_there_are_no_such_routes(stack: Stack, method: str, url: str) -> None:
    answer = await stack.http.request(method, url, headers=AUTH)
    assert answer.status_code == 404
    document = (await stack.http.get("/openapi.json")).json()
    assert not [path for path in document["paths"] if "drafters" in path]


@pytest.mark.parametrize(("method", "url"), CALLS)
@pytest.mark.parametrize(("header", "status"), [(None, 401), (f"Basic {KEY}", 401), (f"Bearer {KEY}x", 401)])
async def test_a_key_is_needed(operated: Operated, method: str, url: str, header: str | None, status: int) -> None:
    headers = {} if header is None else {"authorization": header}
    answer = await operated.http.request(method, url, headers=headers, content=b"{")
    assert answer.status_code == status
    assert operated.states == [{"ngram": "attached"}] * 2


async def test_attach_list_detach_on_all_verifiers(operated: Operated) -> None:
    answer = await operated.http.post(URL, json={**BODY, "transport": "grpc"}, headers=AUTH)
    entry = {"object": "drafter", "name": "late", "algorithm": "", "transport": "shared-memory"}
    entry |= {"address": "unix:/run/late", "state": "connecting", "num_attaches": 0}
    entry["reason"] = "nothing listens at unix:/run/late"
    assert answer.json() == {"object": "list", "data": [{**entry, "verifier": a} for a in operated.addresses]}
    assert [v.attached for v in operated.verifiers] == [[("late", "unix:/run/late", "grpc")]] * 2
    listed = (await operated.http.get(URL, headers=AUTH)).json()["data"]
    assert [(d["verifier"], d["name"], d["state"]) for d in listed] == [
        (address, name, state)
        for address in operated.addresses
        for name, state in (("ngram", "attached"), ("late", "connecting"))
    ]
    again = await operated.http.post(URL, json=BODY, headers=AUTH)
    assert (again.status_code, again.json()) == (200, answer.json())
    again = await operated.http.post(URL, json={**BODY, "address": "unix:/run/other"}, headers=AUTH)
    assert (again.status_code, again.json()["error"]["param"]) == (409, "name")
    gone = await operated.http.delete(f"{URL}/late", headers=AUTH)
    assert gone.json() == {"object": "drafter", "name": "late", "detached": True}
    assert operated.states == [{"ngram": "attached", "late": "detached"}] * 2
    missing = await operated.http.delete(f"{URL}/late", headers=AUTH)
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, "name")


async def test_one_verifier(operated: Operated) -> None:
    second = operated.addresses[1]
    answer = await operated.http.post(URL, json={**BODY, "verifier": second}, headers=AUTH)
    assert [entry["verifier"] for entry in answer.json()["data"]] == [second]
    assert [len(states) for states in operated.states] == [1, 2]
    listed = (await operated.http.get(URL, headers=AUTH, params={"verifier": second})).json()["data"]
    assert [entry["name"] for entry in listed] == ["ngram", "late"]
    await operated.http.delete(f"{URL}/ngram", headers=AUTH, params={"verifier": second})
    assert [states["ngram"] for states in operated.states] == ["attached", "detached"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"address": "unix:/a"}, "name"),
        ({"name": "a"}, "address"),
        ({**BODY, "name": "A b"}, "name"),
        ({**BODY, "name": "auto"}, "name"),
        ({**BODY, "name": "merge"}, "name"),
        ({**BODY, "address": "nowhere"}, "address"),
        ({**BODY, "address": "unix:here"}, "address"),
        ({**BODY, "address": 5}, "address"),
        ({**BODY, "transport": "in-process"}, "transport"),
        ({**BODY, "verifier": "unix:/other"}, "verifier"),
        ({**BODY, "more": 1}, "more"),
    ],
)
async def test_refused(operated: Operated, body: dict[str, Any], field: str) -> None:
    answer = await operated.http.post(URL, json=body, headers=AUTH)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text
    assert operated.states == [{"ngram": "attached"}] * 2


async def test_a_name_may_be_used_as_soon_as_it_is_attached(operated: Operated) -> None:
    unknown = await operated.complete("late")
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "speculative.drafter")
    await operated.http.post(URL, json=BODY, headers=AUTH)
    assert (await operated.complete("ngram+late")).status_code == 200
    assert (await operated.http.delete(f"{URL}/late", headers=AUTH)).status_code == 200
    assert (await operated.complete("late")).status_code == 200
    # Its name is still known, but it is no longer listed.
    message = (await operated.complete("nobody")).json()["error"]["message"]
    assert "available: auto, merge, ngram;" in message


async def test_a_name_that_was_attached_through_another_gateway(
    operated: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many requests at once cause one question, and a known name causes none."""
    monkeypatch.setattr(verifier_pool, "REFRESH_EVERY_S", 3600.0)
    before = [verifier.num_infos for verifier in operated.verifiers]
    assert (await operated.complete("ngram")).status_code == 200
    assert [verifier.num_infos for verifier in operated.verifiers] == before
    for verifier in operated.verifiers:
        verifier.add("late")
    answers = await asyncio.gather(*(operated.complete("late") for _ in range(8)))
    assert [answer.status_code for answer in answers] == [200] * 8
    assert [verifier.num_infos for verifier in operated.verifiers] == [count + 1 for count in before]
    await asyncio.gather(*(operated.complete("nobody") for _ in range(8)))
    assert [verifier.num_infos for verifier in operated.verifiers] == [count + 1 for count in before]


async def test_gauges_of_drafters_are_metrics(operated: Operated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier_metrics, "MAX_DRAFTER_GAUGES", 3)
    ngram = operated.verifiers[0].info.drafters[0]
    ngram.gauges.update({"ngram_nodes": 41.0, "info": 7.0})

    async def samples(name: str) -> dict[str, float]:
        lines = (await operated.http.get("/metrics")).text.splitlines()
        found = [line for line in lines if line.startswith(f"foretoken_{name}{{")]
        assert all('drafter="ngram"' in line for line in found)
        return {line.split('verifier="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in found}

    first, second = operated.addresses
    assert await samples("drafter_ngram_nodes") == {first: 41.0}
    assert await samples("drafter_info") == {first: 1.0, second: 1.0}, "not the gauge of that name"
    ngram.has_low_acceptance = True
    assert await samples("drafter_low_acceptance") == {first: 1.0, second: 0.0}
    operated.verifiers[1].info.drafters[0].gauges.update({"ngram_nodes": 2.0})
    ngram.gauges.update({"ngram_nodes": 40.0})
    assert await samples("drafter_ngram_nodes") == {first: 40.0, second: 2.0}
    ngram.gauges.clear()
    assert await samples("drafter_ngram_nodes") == {second: 2.0}
    ngram.gauges.update({f"more_{number}": 1.0 for number in range(9)})
    text = (await operated.http.get("/metrics")).text
    assert sum(line.startswith("foretoken_drafter_more_") for line in text.splitlines()) == 2


async def test_commands(operated: Operated) -> None:
    async def run(*words: str) -> Any:
        options = ("--url", str(operated.http.base_url), "--admin-api-key-file", str(operated.key))
        return await asyncio.to_thread(CliRunner().invoke, app, ["drafters", *words, *options])

    first, second = operated.addresses
    attached = await run("attach", "late", "unix:/run/late", "--transport", "grpc", "--verifier", second)
    late = (
        "late: connecting (nothing listens at unix:/run/late), over shared-memory at unix:/run/late "
        f"for the verifier at {second}\n"
    )
    assert attached.stdout == late, attached.output
    assert attached.exit_code == 3
    assert "late is known to the server but not attached yet" in attached.stderr
    # The examples can be copied as they are.
    there = f"--url {operated.http.base_url} --admin-api-key-file {operated.key}"
    assert f"drafters list {there} " in attached.stderr and f"drafters detach late {there} " in attached.stderr
    assert [v.attached for v in operated.verifiers] == [[], [("late", "unix:/run/late", "grpc")]]
    listed = await run("list")
    ngram = "ngram: attached, NGRAM over shared-memory for the verifier at"
    assert listed.output == f"{ngram} {first}\n{ngram} {second}\n{attached.stdout}"
    assert (await run("list", "--verifier", first)).output == f"{ngram} {first}\n"
    listed = json.loads((await run("list", "--json", "--verifier", second)).output)
    assert [(drafter["name"], drafter["state"], drafter["verifier"]) for drafter in listed] == [
        ("ngram", "attached", second),
        ("late", "connecting", second),
    ]
    detached = await run("detach", "ngram")
    assert (detached.exit_code, detached.output) == (0, "ngram: detached\n")
    assert [states["ngram"] for states in operated.states] == ["detached"] * 2
    refused = await run("attach", "late", "unix:/run/other", "--verifier", second)
    assert isinstance(refused.exception, ForetokenError) and refused.exit_code == 1
    missing = await run("detach", "ngram")
    assert isinstance(missing.exception, ForetokenError) and "no drafter 'ngram'" in str(missing.exception)
    operated.key.unlink()
    assert isinstance((await run("list")).exception, ConfigError)


@pytest.mark.parametrize("outcome", [("attached", ""), ("broken", "another target"), ("connecting", "nothing listens")])
async def test_attach_says_what_became_of_it(operated: Operated, outcome: tuple[str, str]) -> None:
    """The call returns before the verifier has reached the drafter; the command waits for that."""
    first, second = operated.verifiers
    first.outcomes = [("attached", "")]
    second.outcomes = [("connecting", "")] * 4 + [outcome]
    words = ["attach", "late", "unix:/run/late", "--url", str(operated.http.base_url)]
    words += ["--admin-api-key-file", str(operated.key)]
    result = await asyncio.to_thread(CliRunner().invoke, app, ["drafters", *words])
    state, reason = outcome
    shown = f"late: {state} ({reason})," if reason else f"late: {state},"
    lines = result.stdout.splitlines()
    assert lines[0].startswith("late: attached,") and lines[1].startswith(shown), result.output
    assert (result.exit_code, "not attached yet" in result.stderr) == ((0, False) if state == "attached" else (3, True))
    assert not second.outcomes


async def test_attach_of_a_drafter_that_is_attached_already(operated: Operated) -> None:
    words = ["--url", str(operated.http.base_url), "--admin-api-key-file", str(operated.key)]

    async def attach(address: str = "unix:/run/late") -> Any:
        return await asyncio.to_thread(CliRunner().invoke, app, ["drafters", "attach", "late", address, *words])

    assert (await attach()).exit_code == 3
    # It attached itself meanwhile, to one verifier and then to the other.
    for verifier, status in zip(operated.verifiers, (3, 0), strict=True):
        verifier.info.drafters[-1].state, verifier.info.drafters[-1].reason = "attached", ""
        again = await attach()
        assert (again.exit_code, "late was attached already" in again.stderr) == (status, status == 0), again.output
    assert again.stdout.count("late: attached,") == 2
    assert [verifier.attached for verifier in operated.verifiers] == [[("late", "unix:/run/late", "auto")]] * 2
    refused = await attach("unix:/run/other")
    assert refused.exit_code == 1 and isinstance(refused.exception, ForetokenError)


async def test_the_wait_for_a_drafter_that_loads_has_an_end(operated: Operated) -> None:
    operated.verifiers[1].outcomes = [("connecting", "")] * 100

    def attach() -> list[str]:
        with DraftersClient(str(operated.http.base_url), KEY) as client:
            client.attach("late", "unix:/run/late", "auto", operated.addresses[1])
            return [drafter.state for drafter in client.outcome("late", operated.addresses[1], timeout_s=0.0)]

    assert await asyncio.to_thread(attach) == ["connecting"]


async def test_client_of_a_server_without_operators_endpoints(stack: Stack) -> None:
    def without_routes() -> None:
        with DraftersClient(stack.url, KEY) as client:
            for call in (client.list, lambda: client.detach("a"), lambda: client.attach("a", "unix:/a", "auto")):
                with pytest.raises(ForetokenError, match="--admin-api-key-file"):
                    call()

    await asyncio.to_thread(without_routes)
