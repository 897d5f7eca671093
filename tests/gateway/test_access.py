"""Every route and RPC: who may call it, and that a refusal says nothing about the server."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from fastapi.routing import APIRoute
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from starlette.routing import Route as StarletteRoute

from foretoken.config import build
from foretoken.errors import PermissionDeniedError, UnauthenticatedError
from gateway.access.caller import ANYBODY
from gateway.access.key_file import entry_text
from gateway.access.keyring import Keyring
from gateway.access.policy import Credentials, Policy
from gateway.access.routes import ROUTES, RPCS, Route, Rpc, Who, table
from gateway.app import create_app
from gateway.config import GatewaySettings
from protos import drafter_pb2, gateway_pb2, verifier_pb2
from tests.gateway.conftest import MODEL, Stack
from tests.gateway.scripted_verifier import STOP, Player
from tests.support.fuzzed_requests import BODIES

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[2]
TENANT, ELSEWHERE, OPERATOR = "a tenant's secret", "a key for another model", "an operator's key"
NEIGHBOUR = "another tenant's secret"
WEB_PAGE = "https://chat.example.com"
# Not even the length of a name.
SECRETS_OF_THE_SERVER = (MODEL, "v.sock", "ngram", "acme", "globex", "initech", TENANT, ELSEWHERE, OPERATOR)


@pytest.fixture
def settings(settings: GatewaySettings, tmp_path: Path) -> GatewaySettings:
    keys = (("acme", TENANT, []), ("globex", ELSEWHERE, ["x"]), ("initech", NEIGHBOUR, []))
    (tmp_path / "keys.toml").write_text("".join(entry_text(name, key, models=models) for name, key, models in keys))
    (tmp_path / "operator").write_text(OPERATOR)
    more = {
        "api_key_file": tmp_path / "keys.toml",
        "admin_api_key_file": tmp_path / "operator",
        "allowed_origins": [WEB_PAGE],
    }
    return build(GatewaySettings, settings.model_dump() | more)


def routes_of(router: Any, prefix: str = "") -> set[tuple[str, str]]:
    """Return method and path of every route, but for HEAD, which Starlette adds to its own GETs."""
    found = set()
    for route in router.routes:
        if hasattr(route, "original_router"):
            # Newer versions of FastAPI keep an included router as it is.
            found |= routes_of(route.original_router, prefix + route.include_context.prefix)
            continue
        assert isinstance(route, APIRoute | StarletteRoute), f"{route} needs a rule for who may use it"
        found |= {(method, prefix + route.path) for method in (route.methods or set()) - {"HEAD"}}
    return found


async def test_the_table_has_every_route_and_no_other(stack: Stack) -> None:
    app = create_app(stack.gateway.core)
    listed = [(route.method, route.path) for route in ROUTES]
    assert len(listed) == len(set(listed))
    assert routes_of(app) == set(listed)


def test_the_table_has_every_rpc_and_no_other() -> None:
    def methods(*files: FileDescriptor) -> set[tuple[str, str]]:
        services = [service for file in files for service in file.services_by_name.values()]
        return {(service.full_name, method.name) for service in services for method in service.methods}

    inside = {rpc.service for rpc in RPCS if rpc.who is Who.SERVICE}
    served = methods(gateway_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR)
    assert {(rpc.service, rpc.method) for rpc in RPCS if rpc.who is not Who.SERVICE} == served
    assert inside == {service for service, _ in methods(verifier_pb2.DESCRIPTOR, drafter_pb2.DESCRIPTOR)}


def test_the_docs_show_the_table() -> None:
    text = (ROOT / "docs/access.md").read_text(encoding="utf-8")
    names = tuple(who.value for who in Who)
    rows = [
        line for line in text.splitlines() if line.startswith("| `") and line.endswith(tuple(f"{n} |" for n in names))
    ]
    assert rows == table(), "print it with: python -m gateway.access.routes"


CALLS = {
    "no key": {},
    "a wrong key": {"authorization": "Bearer wrong"},
    "a wrong x-api-key": {"x-api-key": "wrong"},
    "a key for another server's model": {"x-api-key": ELSEWHERE},
    "a tenant's key": {"authorization": f"Bearer {TENANT}"},
    "the operator's key": {"authorization": f"Bearer {OPERATOR}"},
    "a foreign page": {"authorization": f"Bearer {TENANT}", "origin": "https://evil.example"},
    "a page with no key": {"origin": WEB_PAGE},
    "a foreign host": {"authorization": f"Bearer {TENANT}", "host": "evil.example"},
}


def expected(who: Who, call: str) -> int | None:
    """Return the status of a refusal; None if the call is let through."""
    if call in ("a foreign page", "a foreign host"):
        return 403 if call == "a foreign page" else 421
    if who is Who.PUBLIC:
        return None
    match call:
        case "no key" | "a page with no key":
            return 401
        case "a wrong key" | "a wrong x-api-key":
            return 401
        case "a key for another server's model":
            return 403
        case "a tenant's key":
            return 403 if who in (Who.OPERATOR, Who.OBSERVER) else None
        case "the operator's key":
            return 403 if who is Who.CALLER else None
    raise AssertionError(call)


@pytest.mark.parametrize("call", CALLS)
async def test_a_refused_call_learns_nothing(stack: Stack, call: str) -> None:
    # Unlisted paths need a key, too.
    unlisted = [
        Route("GET", "/nothing", Who.CALLER),
        Route("POST", "/health", Who.CALLER),
        Route("PUT", "/v1/corpora", Who.CALLER),
    ]
    for route in (*ROUTES, *unlisted):
        path = re.sub(r"\{.*?\}", MODEL, route.path)
        answer = await stack.http.request(route.method, path, headers=CALLS[call], content=b"{")
        status = expected(route.who, call)
        if status is None:
            assert answer.status_code not in (401, 403, 421), (route, call, answer.text)
            if route.who is not Who.PUBLIC or call in ("a tenant's key", "the operator's key"):
                continue
        else:
            assert answer.status_code == status, (route, call, answer.text)
            # Anthropic's APIs have errors of their own shape.
            more = set() if route.path.startswith("/v1/messages") else {"param", "code"}
            assert set(answer.json()["error"]) == {"message", "type"} | more
            assert ("www-authenticate" in answer.headers) is (status == 401)
        shown = answer.text + str(answer.headers)
        assert not [word for word in SECRETS_OF_THE_SERVER if word in shown], (route, call, shown)
        assert "retry-after" in answer.headers.get("access-control-expose-headers", "retry-after")
        assert ("access-control-allow-origin" in answer.headers) is (call == "a page with no key")
    # /health_generate needs no body: a tenant may call it.
    ran = [sequence for sequence in stack.verifier.submitted if not sequence.request_id.startswith("health-")]
    assert not ran and (call == "a tenant's key" or not stack.verifier.submitted)


async def test_head_is_answered_as_get_where_no_key_is_needed(stack: Stack) -> None:
    """Uptime monitors send HEAD, without a key."""
    public = [route.path.replace("{name}", "style.css") for route in ROUTES if route.who is Who.PUBLIC]
    assert {"/", "/health", "/ready", "/ping"} <= set(public)
    for path in public:
        got, head = await stack.http.get(path), await stack.http.head(path)
        assert head.status_code == got.status_code == 200, path
        assert head.content == b"" and head.headers["content-length"] == str(len(got.content))
        assert head.headers["content-type"] == got.headers["content-type"]
    assert (await stack.http.head("/v1/models")).status_code == 401
    for path in ("/", "/health"):
        refused = await stack.http.post(path, headers={"x-api-key": TENANT})
        assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")


async def test_another_tenants_key_reaches_nothing_of_a_request_that_runs(stack: Stack) -> None:
    """Whatever a tenant calls, another's request goes on.

    No answer names the request or has its words.
    """
    go_on = asyncio.Event()

    async def play(player: Player) -> None:
        player.tokens(stack.ids("hello"))
        if player.sequence.cache_salt == "acme":
            await go_on.wait()
        player.finish(STOP)

    stack.verifier.script = play
    own = {"authorization": f"Bearer {TENANT}", "x-request-id": "acmes-request"}
    body = {"input": "acme's own words", "stream": True}
    async with stack.http.stream("POST", "/v1/responses", json=body, headers=own) as answer:
        lines = answer.aiter_lines()
        created = await anext(line async for line in lines if line.startswith("data: "))
        answer_id = json.loads(created.removeprefix("data: "))["response"]["id"]
        for route in ROUTES:
            for name in ("acmes-request", answer_id):
                path = re.sub(r"\{.*?\}", name, route.path)
                more = {"rid": name} if route.path == "/abort_request" else {}
                sent = await stack.http.request(
                    route.method, path, headers={"x-api-key": NEIGHBOUR}, json=BODIES.get(route.path, {}) | more
                )
                assert sent.status_code < 500, (route, sent.text)
                shown = (sent.text + str(sent.headers)).replace(name, "")
                assert not [word for word in ("acme", "own words", answer_id) if word in shown], (route, shown)
        everything = await stack.http.post("/abort_request", headers={"x-api-key": NEIGHBOUR}, json={"abort_all": True})
        assert everything.json() == {"num_aborted": 0}
        go_on.set()
        assert "event: response.completed" in [line async for line in lines]
    salts = {sequence.cache_salt for sequence in stack.verifier.submitted}
    assert {"acme", "initech"} <= salts


async def test_a_page_asks_first_without_a_key(stack: Stack) -> None:
    """A browser's preflight has no key; the key's headers are what it asks for."""
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-api-key"}
    answer = await stack.http.options("/v1/completions", headers={"origin": WEB_PAGE} | asked)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == WEB_PAGE
    assert "authorization" in answer.headers["access-control-allow-headers"]
    # Not a preflight: any other call needs a key.
    assert (await stack.http.options("/v1/completions")).status_code == 401


async def test_a_page_can_read_the_headers_that_are_for_it(stack: Stack) -> None:
    headers = {"origin": WEB_PAGE, "x-api-key": TENANT}
    for url, request_id in (("/v1/completions", "x-request-id"), ("/v1/messages", "request-id")):
        body = {"prompt": "a"} if url == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
        answer = await stack.http.post(url, json={**body, "max_tokens": 2, "later": 1}, headers=headers)
        exposed = answer.headers["access-control-expose-headers"].split(", ")
        assert {"retry-after", request_id, "x-foretoken-ignored-fields"} <= set(exposed)
        assert answer.headers["x-foretoken-ignored-fields"] == "later" and request_id in answer.headers


async def test_readiness_has_details_for_whoever_has_a_key(stack: Stack) -> None:
    async def shown(headers: dict[str, str]) -> set[str]:
        return set((await stack.http.get("/ready", headers=headers)).json())

    assert await shown({}) == await shown({"x-api-key": ELSEWHERE}) == {"status"}
    assert await shown({"x-api-key": TENANT}) == {"status", "model", "verifiers"}


@pytest.mark.parametrize("operator_key", [OPERATOR, None])
def test_an_operators_call_of_either_protocol_needs_a_known_key(tmp_path: Path, operator_key: str | None) -> None:
    """REST and gRPC ask this policy, and an error has its status in both."""
    (tmp_path / "keys.toml").write_text(entry_text("acme", TENANT))
    policy = Policy(Keyring([], tmp_path / "keys.toml"), models=(MODEL,), operator_key=operator_key)
    for shown in (Credentials(), Credentials(b"Bearer wrong"), Credentials(api_key=b"wrong")):
        with pytest.raises(UnauthenticatedError) as unknown:
            policy.admit(Who.OPERATOR, shown)
        assert unknown.value.status is grpc.StatusCode.UNAUTHENTICATED
    with pytest.raises(PermissionDeniedError) as known:
        policy.admit(Who.OPERATOR, Credentials(api_key=TENANT.encode()))
    assert known.value.status is grpc.StatusCode.PERMISSION_DENIED
    if operator_key is not None:
        assert policy.admit(Who.OPERATOR, Credentials(f"Bearer {operator_key}".encode())) is ANYBODY


@pytest.mark.parametrize("rpc", [rpc for rpc in RPCS if rpc.who is not Who.SERVICE], ids=lambda rpc: rpc.path)
async def test_an_rpc_is_refused_before_its_message_is_read(stack: Stack, rpc: Rpc) -> None:
    refusals = {
        (): grpc.StatusCode.UNAUTHENTICATED,
        (("authorization", "Bearer wrong"),): grpc.StatusCode.UNAUTHENTICATED,
        (("x-api-key", ELSEWHERE),): grpc.StatusCode.PERMISSION_DENIED,
        (("x-api-key", OPERATOR),): grpc.StatusCode.PERMISSION_DENIED,
    }
    async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
        for metadata, code in refusals.items():
            call = channel.stream_stream(rpc.path)(metadata=metadata)
            if rpc.who is Who.PUBLIC:
                # The call waits for its message.
                call.cancel()
                continue
            assert await call.code() is code
            assert not [word for word in SECRETS_OF_THE_SERVER if word in (await call.details() or "")]
        stub = health_pb2_grpc.HealthStub(channel)
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        unknown = channel.stream_stream("/foretoken.gateway.v1.GatewayService/Other")
        assert await unknown().code() is grpc.StatusCode.UNAUTHENTICATED
        assert await unknown(metadata=(("x-api-key", TENANT),)).code() is grpc.StatusCode.UNIMPLEMENTED


async def test_without_keys_everybody_may_call(model_folder: Path, stack: Stack) -> None:
    """Settings with an operator's key alone leave clients as they were."""
    core = stack.gateway.core
    open_settings = core.settings.model_copy(update={"api_key_file": None})
    policy = type(core.policy)(None, models=(MODEL,), operator_key=OPERATOR)
    app = create_app(type(core)(open_settings, core.tokenizer, core.verifiers, None, OPERATOR, policy))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for path in ("/v1/models", "/metrics", "/ready", "/version"):
            answer = await client.get(path)
            assert answer.status_code == 200 and MODEL in answer.text
        assert (await client.get("/v1/corpora")).status_code == 401
        assert (await client.get("/v1/drafters", headers={"x-api-key": "no"})).status_code == 401
