"""Links over TCP: each call with and without token and
certificates, and what services refuse to start.
"""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from drafter_svc.config import DrafterSettings
from foretoken import links, rpc
from foretoken.common_settings import LinkSettings
from foretoken.config import build
from foretoken.errors import ConfigError
from foretoken.free_ports import free_ports
from foretoken.links import CALLERS, NO_CREDENTIALS, AllowedCaller, LinkCertificates, LinkCredentials
from protos import drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from tests.support.certificates import Authority
from tests.support.environment import child_environment
from verifier_svc.config import VerifierSettings

pytestmark = pytest.mark.anyio
TOKEN = "a-token-of-these-tests"
WITH_TOKEN = LinkCredentials(TOKEN)
VERIFIER = verifier_pb2.DESCRIPTOR.services_by_name["VerifierService"]
DRAFTER = drafter_pb2.DESCRIPTOR.services_by_name["DrafterService"]
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
REFLECTION = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
METHODS: dict[str, MethodDescriptor] = {
    f"/{service.full_name}/{method.name}": method
    for service in (VERIFIER, DRAFTER, HEALTH, REFLECTION)
    for method in service.methods
}
# The services' own, which this module's servers all answer.
OWN = {name: method for name, method in METHODS.items() if name.startswith("/foretoken.")}


def test_every_call_of_every_service_between_services_is_in_the_table() -> None:
    assert CALLERS.keys() == METHODS.keys()


def test_operators_calls_are_those_that_change_drafters_corpora_or_caches() -> None:
    operators = {name for name, caller in CALLERS.items() if caller is AllowedCaller.OPERATOR}
    assert operators == {
        name for name in CALLERS if "Corp" in name or name.endswith(("AttachDrafter", "DetachDrafter", "FlushCache"))
    }
    assert {name for name, caller in CALLERS.items() if caller is AllowedCaller.ANYBODY} == {
        name for name in CALLERS if name.startswith("/grpc.health.v1.")
    }


def _answering(method: MethodDescriptor) -> Any:
    """Return a handler that answers one empty message without waiting for a request."""
    answer: type[Message] = _class_of(method.output_type)
    if method.server_streaming:

        async def stream(self: Any, requests: Any, context: Any) -> AsyncIterator[Message]:
            yield answer()

        return stream

    async def one(self: Any, request: Any, context: Any) -> Message:
        return answer()

    return one


def _class_of(kind: Any) -> Any:
    return getattr({"verifier.proto": verifier_pb2, "drafter.proto": drafter_pb2}[Path(kind.file.name).name], kind.name)


@asynccontextmanager
async def answering(address: str, credentials: LinkCredentials = NO_CREDENTIALS) -> AsyncIterator[str]:
    """Serve all calls of both services at ``address`` as verifier and drafter do.

    Yield the address with its port.
    """
    server = rpc.link_server(address, credentials)
    health = rpc.HealthService(server, (VERIFIER.full_name, DRAFTER.full_name))
    for service, add, base in (
        (VERIFIER, verifier_pb2_grpc.add_VerifierServiceServicer_to_server, verifier_pb2_grpc.VerifierServiceServicer),
        (DRAFTER, drafter_pb2_grpc.add_DrafterServiceServicer_to_server, drafter_pb2_grpc.DrafterServiceServicer),
    ):
        add(type("Servicer", (base,), {method.name: _answering(method) for method in service.methods})(), server)
    await health.mark(True)
    port = rpc.bind(server, address, credentials)
    await server.start()
    try:
        yield address.replace(":0", f":{port}")
    finally:
        await server.stop(None)


async def status(address: str, method: str, credentials: LinkCredentials) -> tuple[grpc.StatusCode, str]:
    """Make one call as a client of asyncio; return its status and details."""
    descriptor = OWN[method]
    async with rpc.async_channel(address, credentials) as channel:
        form = "_".join(
            "stream" if streams else "unary" for streams in (descriptor.client_streaming, descriptor.server_streaming)
        )
        request = _class_of(descriptor.input_type)()
        call = getattr(channel, form)(
            method,
            request_serializer=type(request).SerializeToString,
            response_deserializer=_class_of(descriptor.output_type).FromString,
        )
        try:
            if not descriptor.server_streaming:
                await call(request, timeout=20)
            else:
                # A stream sends nothing first: a refusal must not wait for a message.
                running = call(timeout=20) if descriptor.client_streaming else call(request, timeout=20)
                assert await running.read() is not grpc.aio.EOF
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


def sync_status(address: str, credentials: LinkCredentials) -> dict[str, grpc.StatusCode]:
    """Call as the verifier's threads do: unary calls by future, and a stream."""
    with rpc.sync_channel(address, credentials) as channel:
        stub = drafter_pb2_grpc.DrafterServiceStub(channel)
        found = {}
        for name, make in {
            "Attach": lambda: stub.Attach.future(drafter_pb2.AttachRequest(), timeout=20).result(),
            "Release": lambda: stub.Release(drafter_pb2.ReleaseRequest(), timeout=20),
            "Draft": lambda: next(stub.Draft(iter([]), timeout=20)),
        }.items():
            try:
                make()
                found[name] = grpc.StatusCode.OK
            except grpc.RpcError as error:
                found[name] = error.code()
    return found


async def is_healthy(address: str, credentials: LinkCredentials = NO_CREDENTIALS) -> bool:
    async with rpc.async_channel(address, credentials) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=VERIFIER.full_name)
        try:
            reply = await stub.Check(request, timeout=20)
        except grpc.aio.AioRpcError:
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


async def test_with_a_token_each_call_needs_it_and_health_does_not(caplog: pytest.LogCaptureFixture) -> None:
    async with answering("127.0.0.1:0", WITH_TOKEN) as address:
        for method in OWN:
            none, details = await status(address, method, NO_CREDENTIALS)
            wrong, wrong_details = await status(address, method, LinkCredentials(TOKEN + "x"))
            assert none is grpc.StatusCode.UNAUTHENTICATED and "--link-token-file" in details, method
            assert wrong is grpc.StatusCode.PERMISSION_DENIED, method
            assert TOKEN not in details + wrong_details
            assert (await status(address, method, WITH_TOKEN))[0] is grpc.StatusCode.OK, method
        assert await is_healthy(address)
        for credentials, expected in {
            NO_CREDENTIALS: grpc.StatusCode.UNAUTHENTICATED,
            LinkCredentials(TOKEN[:-1]): grpc.StatusCode.PERMISSION_DENIED,
            WITH_TOKEN: grpc.StatusCode.OK,
        }.items():
            # In this thread the server could not answer.
            found = await asyncio.to_thread(sync_status, address, credentials)
            assert set(found.values()) == {expected}
    assert TOKEN not in caplog.text and TOKEN not in repr(WITH_TOKEN)


@pytest.mark.parametrize("shown", ["", TOKEN, f"Basic {TOKEN}", f"Bearer{TOKEN}", "Bearer ", f"Bearer {TOKEN} "])
async def test_other_forms_of_the_metadata_are_refused(shown: str) -> None:
    async with answering("127.0.0.1:0", WITH_TOKEN) as address, rpc.async_channel(address) as channel:
        stub: Any = verifier_pb2_grpc.VerifierServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetInfo(verifier_pb2.GetInfoRequest(), metadata=(("authorization", shown),), timeout=20)
    assert caught.value.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


async def test_the_token_costs_a_stream_nothing_per_message() -> None:
    """gRPC's own interceptors would put a queue and a task between a stream and its messages."""
    async with answering("127.0.0.1:0", WITH_TOKEN) as address:
        found = []
        for credentials in (NO_CREDENTIALS, WITH_TOKEN):
            async with rpc.async_channel(address, credentials) as channel:
                stub: Any = verifier_pb2_grpc.VerifierServiceStub(channel)
                call = stub.Session(timeout=20)
                found.append(type(call))
                call.cancel()
    assert found[0] is found[1]


async def test_a_call_that_no_table_names_needs_the_token() -> None:
    async with answering("127.0.0.1:0", WITH_TOKEN) as address:
        for credentials, expected in (
            (NO_CREDENTIALS, grpc.StatusCode.UNAUTHENTICATED),
            (WITH_TOKEN, grpc.StatusCode.UNIMPLEMENTED),
        ):
            async with rpc.async_channel(address, credentials) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary("/foretoken.verifier.v1.VerifierService/Shutdown")(b"", timeout=20)
                assert caught.value.code() is expected


async def test_over_tcp_without_credentials_operators_are_refused_and_peers_are_not() -> None:
    async with answering("127.0.0.1:0") as address:
        for method in OWN:
            code, details = await status(address, method, NO_CREDENTIALS)
            if CALLERS[method] is AllowedCaller.OPERATOR:
                assert code is grpc.StatusCode.PERMISSION_DENIED and "operator" in details, method
            else:
                assert code is grpc.StatusCode.OK, method


@pytest.mark.parametrize("credentials", [NO_CREDENTIALS, WITH_TOKEN])
async def test_a_unix_socket_asks_for_nothing(credentials: LinkCredentials, tmp_path: Path) -> None:
    async with answering(f"unix:{tmp_path}/s", credentials) as address:
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
        for method, shown in itertools.product(OWN, (NO_CREDENTIALS, WITH_TOKEN)):
            assert (await status(address, method, shown))[0] is grpc.StatusCode.OK, method


@pytest.fixture(name="authority", scope="module")
def _authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def certified(authority: Authority, name: str, token: str | None = None, **more: Any) -> LinkCredentials:
    issued = authority.issue(name, **more)
    settings = LinkSettings(link_certfile=issued.chain, link_keyfile=issued.key, link_ca=authority.certificate)
    return LinkCredentials(token, links.read_credentials(settings).certificates)


async def test_with_certificates_each_call_needs_one_of_the_authority(authority: Authority, tmp_path: Path) -> None:
    verifier, gateway = certified(authority, "verifier"), certified(authority, "gateway")
    ours = verifier.certificates
    foreign = certified(Authority(tmp_path), "gateway").certificates
    assert ours is not None and foreign is not None
    # It trusts the server, which does not trust it.
    strangers = {
        "none": NO_CREDENTIALS,
        "a token": WITH_TOKEN,
        "foreign": LinkCredentials(certificates=LinkCertificates(foreign.chain, foreign.key, ours.authority)),
        "expired": certified(authority, "expired", days=-1),
        "of a server only": certified(authority, "drafter", usage="serverAuth"),
    }
    async with answering("127.0.0.1:0", verifier) as address:
        for method in OWN:
            assert (await status(address, method, gateway))[0] is grpc.StatusCode.OK, method
            for kind, credentials in strangers.items():
                assert (await status(address, method, credentials))[0] is grpc.StatusCode.UNAVAILABLE, (kind, method)
        assert set((await asyncio.to_thread(sync_status, address, gateway)).values()) == {grpc.StatusCode.OK}
        refused = await asyncio.to_thread(sync_status, address, strangers["foreign"])
        assert set(refused.values()) == {grpc.StatusCode.UNAVAILABLE}
        # A TLS handshake knows no calls: health needs a certificate too.
        assert await is_healthy(address, gateway) and not await is_healthy(address)


async def test_a_client_calls_no_server_of_another_authority_or_name(authority: Authority, tmp_path: Path) -> None:
    gateway = certified(authority, "gateway")
    other = Authority(tmp_path)
    impostors = [certified(other, "verifier"), certified(authority, "elsewhere", names="DNS:elsewhere")]
    for impostor in impostors:
        async with answering("127.0.0.1:0", impostor) as address:
            code, _ = await status(address, "/foretoken.verifier.v1.VerifierService/GetInfo", gateway)
            assert code is grpc.StatusCode.UNAVAILABLE


async def test_with_both_the_token_is_asked_for_over_tls(authority: Authority) -> None:
    method = "/foretoken.verifier.v1.VerifierService/Session"
    async with answering("127.0.0.1:0", certified(authority, "verifier", TOKEN)) as address:
        without = certified(authority, "gateway")
        assert (await status(address, method, without))[0] is grpc.StatusCode.UNAUTHENTICATED
        assert (await status(address, method, LinkCredentials(TOKEN, without.certificates)))[0] is grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("address", "exposed"),
    [
        ("unix:/run/v.sock", False),
        ("127.0.0.1:7000", False),
        ("127.8.9.1:7000", False),
        ("[::1]:7000", False),
        ("localhost:7000", False),
        ("0.0.0.0:7000", True),
        ("[::]:7000", True),
        ("10.0.0.2:7000", True),
        ("verifier.example:7000", True),
        ("localhost.example:7000", True),
        ("dns:///localhost:7000", True),
        ("unix-abstract:verifier:7000", True),
    ],
)
def test_which_addresses_other_machines_may_reach(address: str, exposed: bool) -> None:
    assert links.is_exposed(address) is exposed
    if not exposed:
        links.check_listener(address, NO_CREDENTIALS, is_insecure=False)
        return
    with pytest.raises(ConfigError, match=r"--link-token-file.*--insecure-links"):
        links.check_listener(address, NO_CREDENTIALS, is_insecure=False)
    links.check_listener(address, NO_CREDENTIALS, is_insecure=True)
    links.check_listener(address, WITH_TOKEN, is_insecure=False)


@contextmanager
def foretoken(*words: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "foretoken", *words],
        env=child_environment() | environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("service", ["drafter", "verifier"])
def test_a_service_that_strangers_could_call_does_not_start(service: str, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    model = ["models/demo/target"] if service == "verifier" else []
    with foretoken(service, *model, "--address", f"0.0.0.0:{port}") as process:
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 2 and errors.count("\n") == 1
    assert "--link-token-file" in errors and "--insecure-links" in errors


@pytest.mark.parametrize("text", ["", "short\n", "with a space in the middle", "\u00e9" * 20, "tab\there" * 5])
def test_an_unsuitable_token_is_refused_and_not_shown(text: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    with pytest.raises(ConfigError, match="--link-token-file") as caught:
        links.read_credentials(LinkSettings(link_token_file=file))
    assert not text.strip() or text.strip() not in str(caught.value)


def test_unusable_files_are_refused_by_their_flag(authority: Authority, tmp_path: Path) -> None:
    issued, other = authority.issue("one"), authority.issue("other")
    with pytest.raises(ConfigError, match="belong together"):
        build(LinkSettings, {"link_certfile": issued.chain, "link_ca": authority.certificate})
    junk = tmp_path / "junk"
    junk.write_text("no PEM")
    missing = tmp_path / "missing"
    for chain, key, ca, match in (
        (issued.chain, other.key, authority.certificate, "--link-certfile and --link-keyfile"),
        (junk, issued.key, authority.certificate, "--link-certfile and --link-keyfile"),
        (issued.chain, authority.encrypted(issued.key), authority.certificate, "--link-certfile and --link-keyfile"),
        (issued.chain, issued.key, junk, "--link-ca"),
        (missing, issued.key, authority.certificate, "--link-certfile"),
        (issued.chain, missing, authority.certificate, "--link-keyfile"),
        (issued.chain, issued.key, missing, "--link-ca"),
    ):
        with pytest.raises(ConfigError, match=match):
            links.read_credentials(LinkSettings(link_certfile=chain, link_keyfile=key, link_ca=ca))
    with pytest.raises(ConfigError, match="--link-token-file: cannot read"):
        links.read_credentials(LinkSettings(link_token_file=missing))


def test_the_settings_of_both_listeners_have_the_flags() -> None:
    shared = set(LinkSettings.model_fields) | {"address", "insecure_links"}
    assert shared <= set(VerifierSettings.model_fields) and shared <= set(DrafterSettings.model_fields)
