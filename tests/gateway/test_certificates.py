"""TLS for REST and gRPC: certificates, their renewal under running streams, and clients' own."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from foretoken import probes
from foretoken.config import build
from foretoken.errors import ConfigError
from gateway import http_protocol
from gateway.access import tls_listener
from gateway.access.routes import ROUTES, RPCS, Who
from gateway.config import GatewaySettings
from gateway.server import Gateway
from gateway.tokenizer import Tokenizer
from protos import gateway_pb2, gateway_pb2_grpc
from tests.gateway.conftest import MODEL
from tests.gateway.scripted_verifier import Player, ScriptedVerifier, serving, steps
from tests.support.certificates import Authority, Issued

pytestmark = pytest.mark.anyio
URL = "/v1/completions"
BODY = {"prompt": "a", "max_tokens": 2}


@pytest.fixture(name="authority")
def _authority(tmp_path: Path) -> Authority:
    return authority_in(tmp_path / "authority")


@pytest.fixture(name="own")
def _own(authority: Authority) -> Issued:
    """Return the server's certificate."""
    return authority.issue("server")


def authority_in(folder: Path) -> Authority:
    folder.mkdir()
    return Authority(folder)


@contextlib.asynccontextmanager
async def running(
    settings: GatewaySettings, tokenizer: Tokenizer, **more: object
) -> AsyncIterator[tuple[Gateway, ScriptedVerifier]]:
    settings = build(GatewaySettings, settings.model_dump() | more)
    verifier = ScriptedVerifier(tokenizer.vocab_size)
    verifier.script = steps([65, 66])
    async with serving(verifier, Path(settings.verifiers[0].removeprefix("unix:"))), Gateway(settings) as gateway:
        verifier.gateway = gateway
        await gateway.verifiers.wait_up()
        yield gateway, verifier


def client(settings: GatewaySettings, root: Path, own: Issued | None = None) -> httpx.AsyncClient:
    context = ssl.create_default_context(cafile=root)
    if own is not None:
        context.load_cert_chain(own.chain, own.key)
    return httpx.AsyncClient(base_url=f"https://localhost:{settings.port}", verify=context, timeout=None)


def channel(settings: GatewaySettings, root: Path, own: Issued | None = None) -> grpc.aio.Channel:
    pair = (None, None) if own is None else (own.key.read_bytes(), own.chain.read_bytes())
    credentials = grpc.ssl_channel_credentials(root.read_bytes(), *pair)
    return grpc.aio.secure_channel(f"localhost:{settings.grpc_port}", credentials)


async def served_certificate(port: int, protocol: str) -> str:
    """Return a digest of the certificate that a new connection gets."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols([protocol])
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return hashlib.sha256(certificate).hexdigest()


async def test_rest_and_grpc_speak_tls_alone(
    settings: GatewaySettings, tokenizer: Tokenizer, authority: Authority, own: Issued
) -> None:
    async with running(settings, tokenizer, ssl_certfile=own.chain, ssl_keyfile=own.key):
        async with client(settings, authority.certificate) as http:
            assert (await http.post(URL, json=BODY)).status_code == 200
            # The server's own page comes with its scheme.
            assert (await http.get("/health", headers={"origin": str(http.base_url)})).status_code == 200
        async with channel(settings, authority.certificate) as secure:
            stub = gateway_pb2_grpc.GatewayServiceStub(secure)
            assert (await stub.GetModel(gateway_pb2.GetModelRequest())).model == MODEL
        async with httpx.AsyncClient() as plain:
            with pytest.raises(httpx.RemoteProtocolError):
                await plain.get(f"http://localhost:{settings.port}/health")
        async with grpc.aio.insecure_channel(f"localhost:{settings.grpc_port}") as insecure:
            with pytest.raises(grpc.aio.AioRpcError):
                await health_pb2_grpc.HealthStub(insecure).Check(health_pb2.HealthCheckRequest())
        probe = probes.GatewayProbe("127.0.0.1", settings.port, Path("/none"), is_encrypted=True)
        assert await probe.is_ready()


async def test_a_handshake_has_bounded_time(
    settings: GatewaySettings, tokenizer: Tokenizer, own: Issued, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_listener, "HANDSHAKE_TIMEOUT_S", 0.2)
    async with running(settings, tokenizer, ssl_certfile=own.chain, ssl_keyfile=own.key):
        for port in (settings.port, settings.grpc_port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            # Without the limit, the server would wait for a minute or two.
            assert await end_of(reader) == b""
            writer.close()


async def test_the_oldest_of_many_handshakes_gives_way(
    settings: GatewaySettings, tokenizer: Tokenizer, authority: Authority, own: Issued, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_listener, "MAX_HANDSHAKES", 3)
    monkeypatch.setattr(tls_listener, "HANDSHAKE_TIMEOUT_S", 3600.0)
    async with running(settings, tokenizer, ssl_certfile=own.chain, ssl_keyfile=own.key):
        silent = [await asyncio.open_connection("127.0.0.1", settings.port) for _ in range(5)]
        assert [await end_of(reader) for reader, _ in silent[:2]] == [b"", b""]
        async with client(settings, authority.certificate) as http:
            assert (await http.post(URL, json=BODY)).status_code == 200
        # The client took the place of one more; the last two still wait.
        assert await end_of(silent[2][0]) == b""
        assert not any(reader.at_eof() for reader, _ in silent[3:])
        for _, writer in silent:
            writer.close()


async def test_grpc_takes_connections_up_to_a_number(
    settings: GatewaySettings, tokenizer: Tokenizer, authority: Authority, own: Issued, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "MAX_CONNECTIONS", 2)
    async with running(settings, tokenizer, ssl_certfile=own.chain, ssl_keyfile=own.key):
        silent = [await asyncio.open_connection("127.0.0.1", settings.grpc_port) for _ in range(3)]
        assert await end_of(silent[2][0]) == b""
        for _, writer in silent:
            writer.close()
            await writer.wait_closed()
        async with channel(settings, authority.certificate) as secure:
            stub = gateway_pb2_grpc.GatewayServiceStub(secure)
            request = gateway_pb2.GetModelRequest()
            assert (await stub.GetModel(request, wait_for_ready=True)).model == MODEL


async def end_of(reader: asyncio.StreamReader) -> bytes:
    """Return what the server sends before it ends the connection."""
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


async def test_a_renewed_certificate_is_for_new_connections(
    settings: GatewaySettings, tokenizer: Tokenizer, authority: Authority, own: Issued, tmp_path: Path
) -> None:
    ports = ((settings.port, "http/1.1"), (settings.grpc_port, "h2"))
    go_on = asyncio.Event()

    async def play(player: Player) -> None:
        player.tokens([65])
        await go_on.wait()
        player.tokens([66])
        player.finish()

    async with running(settings, tokenizer, ssl_certfile=own.chain, ssl_keyfile=own.key) as (gateway, verifier):
        verifier.script = play
        old = [await served_certificate(*port) for port in ports]
        async with (
            client(settings, authority.certificate) as http,
            http.stream("POST", URL, json={**BODY, "stream": True}) as answer,
            channel(settings, authority.certificate) as secure,
        ):
            lines = answer.aiter_lines()
            assert '"text"' in await anext(lines)
            call = gateway_pb2_grpc.GatewayServiceStub(secure).Generate(
                gateway_pb2.GenerateRequest(text="a", sampling={"max_tokens": 2})
            )
            chunks = aiter(call)
            await anext(chunks)
            authority.issue("server")
            gateway.reload()
            new = [await served_certificate(*port) for port in ports]
            assert new[0] == new[1] and old[0] == old[1] and new[0] != old[0]
            own.key.write_text("no key")
            gateway.reload()
            assert [await served_certificate(*port) for port in ports] == new
            go_on.set()
            assert "data: [DONE]" in [line async for line in lines]
            assert [chunk async for chunk in chunks][-1].complete.num_output_tokens == 2


async def test_clients_need_a_certificate_that_is_valid(
    settings: GatewaySettings, tokenizer: Tokenizer, authority: Authority, own: Issued, tmp_path: Path
) -> None:
    good, expired = authority.issue("client"), authority.issue("expired", days=-1)
    foreign = authority_in(tmp_path / "another").issue("foreign")
    files = {"ssl_certfile": own.chain, "ssl_keyfile": own.key, "ssl_ca_certs": authority.certificate}
    async with running(settings, tokenizer, **files, host="127.0.0.1") as (_, verifier):
        async with client(settings, authority.certificate) as http:
            answer = await http.post(URL, json=BODY)
            assert answer.status_code == 401 and MODEL not in answer.text
            assert (await http.get("/health")).status_code == 200
            assert (await http.get("/ready")).json() == {"status": "ready"}
        for bad in (expired, foreign):
            async with client(settings, authority.certificate, bad) as http:
                with pytest.raises(httpx.TransportError):
                    await http.get("/health")
        for bad in (None, expired, foreign):
            async with channel(settings, authority.certificate, bad) as secure:
                with pytest.raises(grpc.aio.AioRpcError):
                    await gateway_pb2_grpc.GatewayServiceStub(secure).GetModel(gateway_pb2.GetModelRequest())
        assert not verifier.submitted
        async with (
            client(settings, authority.certificate, good) as http,
            channel(settings, authority.certificate, good) as secure,
        ):
            assert (await http.post(URL, json=BODY)).status_code == 200
            stub = gateway_pb2_grpc.GatewayServiceStub(secure)
            assert (await stub.GetModel(gateway_pb2.GetModelRequest())).model == MODEL


async def test_every_route_needs_a_certificate_that_is_valid(
    settings: GatewaySettings, tokenizer: Tokenizer, authority: Authority, own: Issued
) -> None:
    expired = authority.issue("expired", days=-1)
    files = {"ssl_certfile": own.chain, "ssl_keyfile": own.key, "ssl_ca_certs": authority.certificate}
    async with running(settings, tokenizer, **files, host="127.0.0.1") as (_, verifier):
        for route in ROUTES:
            path = re.sub(r"\{.*?\}", MODEL, route.path)
            async with client(settings, authority.certificate) as http:
                answer = await http.request(route.method, path, json={})
                assert (answer.status_code == 401) is (route.who is not Who.PUBLIC), (route, answer.text)
                assert MODEL not in answer.text + str(answer.headers)
            async with client(settings, authority.certificate, expired) as http:
                with pytest.raises(httpx.TransportError):
                    await http.request(route.method, path, json={})
        for rpc in (rpc for rpc in RPCS if rpc.who is not Who.SERVICE):
            for shown in (None, expired):
                async with channel(settings, authority.certificate, shown) as secure:
                    call = secure.stream_stream(rpc.path)()
                    assert await call.code() is grpc.StatusCode.UNAVAILABLE, rpc
                    assert MODEL not in (await call.details() or "")
        assert not verifier.submitted


async def test_roots_of_clients_are_renewed(
    settings: GatewaySettings, tokenizer: Tokenizer, authority: Authority, own: Issued, tmp_path: Path
) -> None:
    """A root that the file no longer has is no longer trusted."""
    first, second = authority_in(tmp_path / "first"), authority_in(tmp_path / "second")
    clients = (first.issue("client"), second.issue("client"))
    trusted = tmp_path / "trusted.pem"
    trusted.write_text(first.certificate.read_text())
    files = {"ssl_certfile": own.chain, "ssl_keyfile": own.key, "ssl_ca_certs": trusted}

    async def is_let_in(shown: Issued) -> tuple[bool, bool]:
        rest, rpc = True, True
        async with client(settings, authority.certificate, shown) as http:
            try:
                assert (await http.post(URL, json=BODY)).status_code == 200
            except httpx.TransportError:
                rest = False
        async with channel(settings, authority.certificate, shown) as secure:
            try:
                await gateway_pb2_grpc.GatewayServiceStub(secure).GetModel(gateway_pb2.GetModelRequest())
            except grpc.aio.AioRpcError:
                rpc = False
        return rest, rpc

    async with running(settings, tokenizer, **files) as (gateway, _):
        assert [await is_let_in(shown) for shown in clients] == [(True, True), (False, False)]
        trusted.write_text(second.certificate.read_text())
        gateway.reload()
        assert [await is_let_in(shown) for shown in clients] == [(False, False), (True, True)]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (("server.pem", None, None), "--ssl-certfile and --ssl-keyfile must be given together"),
        ((None, None, "ca.pem"), "--ssl-ca-certs needs --ssl-certfile"),
        (("server.pem", "nowhere.key", None), "--ssl-keyfile .*nowhere.key: cannot be used: No such file"),
        (("server.key", "server.pem", None), "^--ssl-certfile .*server.key: .* it holds no certificate in PEM form$"),
        (("server.pem", "server.pem", None), "^--ssl-keyfile .*server.pem: .* it holds no private key in PEM form"),
        (("server.pem", "ca.key", None), "^--ssl-keyfile .*ca.key: .* it is not the key of the certificate in "),
        (("server.pem", "server.locked", None), "^--ssl-keyfile .*server.locked: .* no private key .* password$"),
        (("server.pem", "server.key", "server.key"), "--ssl-ca-certs .*server.key: cannot be used: "),
    ],
)
def test_unusable_files_are_refused_at_the_start(
    settings: GatewaySettings, tmp_path: Path, files: tuple[str | None, ...], message: str
) -> None:
    authority = Authority(tmp_path)
    authority.encrypted(authority.issue("server").key)
    names = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
    values = {name: file and tmp_path / file for name, file in zip(names, files, strict=True)}
    with pytest.raises(ConfigError, match=message):
        build(GatewaySettings, settings.model_dump() | values).check_access()
