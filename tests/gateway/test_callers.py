"""Other sites' web pages and foreign host names do not reach a server on this machine."""

from __future__ import annotations

import asyncio
import socket

import pytest
from starlette.datastructures import Headers

from foretoken import probes
from foretoken.config import build, to_flags
from foretoken.errors import ConfigError
from gateway.callers import CallerCheck
from gateway.config import GatewaySettings
from gateway.server import Gateway
from tests.gateway.conftest import Stack
from tests.gateway.scripted_verifier import steps

pytestmark = pytest.mark.anyio
URL = "/v1/completions"
PATHS = [("GET", path) for path in ("/health", "/ready", "/metrics", "/version", "/v1/models", "/openapi.json", "/no")]
PATHS += [("POST", path) for path in (URL, "/v1/chat/completions", "/generate", "/tokenize", "/v1/corpora")]


@pytest.fixture
def settings(settings: GatewaySettings, request: pytest.FixtureRequest) -> GatewaySettings:
    return settings.model_copy(update=getattr(request, "param", {}))


async def status(stack: Stack, *lines: str, method: str = "GET", path: str = "/health") -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.settings.port)
    writer.write("\r\n".join([f"{method} {path} HTTP/1.1", "connection: close", *lines, "", ""]).encode())
    _, code, _ = (await reader.readline()).split(b" ", 2)
    writer.close()
    return int(code)


async def test_a_page_elsewhere_cannot_generate(stack: Stack) -> None:
    """Every page may send a text/plain POST unasked. Its Origin alone is enough to refuse it."""
    stack.verifier.script = steps([65])
    body = b'{"prompt": "a"}'
    foreign = {"origin": "https://evil.example"}
    for headers in ({"content-type": "text/plain"} | foreign, {"content-type": "application/json"} | foreign):
        answer = await stack.http.post(URL, content=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["type"]) == (403, "invalid_request_error")
        assert answer.json()["error"]["code"] is None
    assert not stack.verifier.submitted
    assert await stack.metric("foretoken_admission_rejections_total", reason="permission_denied") == 2.0
    own = {"origin": stack.url}
    assert (await stack.http.post(URL, json={"prompt": "a"}, headers=own)).status_code == 200


@pytest.mark.parametrize(("method", "path"), PATHS)
async def test_every_path_is_covered(stack: Stack, method: str, path: str) -> None:
    assert await status(stack, "host: localhost", "origin: http://evil.example", method=method, path=path) == 403
    assert await status(stack, "host: evil.example", method=method, path=path) == 421
    assert await status(stack, method=method, path=path) == 400
    assert await status(stack, "host: localhost", "host: localhost", method=method, path=path) == 400


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        (("host: localhost:8000",), 200),
        (("host: 127.0.0.1",), 200),
        (("host: [::1]:1",), 200),
        (("host: LOCALHOST",), 200),
        (("host: localhost.:8000",), 200),
        (("host: ",), 400),
        (("host: localhost.evil.example",), 421),
        (("host: 127.0.0.1.evil.example:80",), 421),
        (("host: 0.0.0.0",), 421),
        (("host: evil.example", "origin: http://evil.example"), 421),
        (("host: localhost:8000", "origin: http://localhost:8000"), 200),
        (("host: localhost:8000", "origin: http://localhost:3000"), 403),
        (("host: localhost:8000", "origin: null"), 403),
        (("host: localhost:8000", "origin: http://localhost:8000", "origin: http://evil.example"), 403),
    ],
)
async def test_names_of_loopback_are_own(stack: Stack, lines: tuple[str, ...], code: int) -> None:
    assert await status(stack, *lines) == code


ALLOWED = {"allowed_hosts": ("llm.example.com",), "allowed_origins": ("https://chat.example.com",)}


@pytest.mark.parametrize("settings", [ALLOWED], indirect=True)
async def test_what_is_allowed_may_come(stack: Stack) -> None:
    """A proxy may pass its Host on; another site's page may call after the browser's preflight."""
    stack.verifier.script = steps([65])
    assert await status(stack, "host: llm.example.com") == 200
    assert await status(stack, "host: llm.example.com.") == 200
    assert await status(stack, "host: localhost") == 200
    assert await status(stack, "host: other.example.com") == 421
    # The page's own server, reached by the proxy.
    assert await status(stack, "host: llm.example.com", "origin: https://llm.example.com") == 200
    page = {"origin": "https://chat.example.com"}
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    answer = await stack.http.options(URL, headers=page | asked)
    assert answer.status_code == 200
    answers = [answer, await stack.http.post(URL, json={"prompt": "a"}, headers=page)]
    assert [answer.headers["access-control-allow-origin"] for answer in answers] == [page["origin"]] * 2
    assert (await stack.http.options(URL, headers={"origin": "https://evil.example"} | asked)).status_code == 403


@pytest.mark.parametrize("settings", [{"allowed_hosts": ("*",), "allowed_origins": ("*",)}], indirect=True)
async def test_anything_may_be_allowed(stack: Stack) -> None:
    assert await status(stack, "host: evil.example", "origin: https://other.example") == 200
    assert await status(stack) == 200


@pytest.mark.parametrize(
    ("listens_at", "allowed", "is_refused"),
    [
        ("127.0.0.1", (), True),
        ("127.0.0.2", (), True),
        ("::1", (), True),
        ("localhost", (), True),
        ("0.0.0.0", (), False),
        ("192.0.2.1", (), False),
        ("0.0.0.0", ("localhost",), True),
        ("127.0.0.1", ("*",), False),
    ],
)
def test_hosts_are_checked_on_loopback_or_where_some_are_allowed(
    listens_at: str, allowed: tuple[str, ...], is_refused: bool
) -> None:
    check = CallerCheck(listens_at, allowed, ())
    own = f"[{listens_at}]" if ":" in listens_at else listens_at
    check(Headers({"host": f"{own}:8000"}))
    if is_refused:
        with pytest.raises(Exception, match="Host"):
            check(Headers({"host": "evil.example"}))
    else:
        check(Headers({"host": "evil.example"}))


def test_flags_are_lists_with_commas(settings: GatewaySettings) -> None:
    fields = settings.model_dump() | {"allowed_hosts": "LLM.example.com, [::1]", "allowed_origins": "https://a:1"}
    built = build(GatewaySettings, fields)
    assert (built.allowed_hosts, built.allowed_origins) == (("llm.example.com", "[::1]"), ("https://a:1",))
    words = to_flags(built)
    pairs = [words[at : at + 2] for at in range(1, len(words), 2)]
    assert ["--allowed-hosts", "[::1]"] in pairs and ["--allowed-origins", "https://a:1"] in pairs
    for name, value in (("allowed_hosts", "a:8000"), ("allowed_hosts", "http://a"), ("allowed_origins", "a.example")):
        with pytest.raises(ConfigError, match="--" + name.replace("_", "-")):
            build(GatewaySettings, settings.model_dump() | {name: value})


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "::1"])
async def test_the_supervisors_probe_is_no_foreigner(settings: GatewaySettings, host: str) -> None:
    """The probe works wherever a gateway listens, also with checked hosts."""
    if host == "::1" and not has_ipv6():
        pytest.skip("needs IPv6")
    settings = settings.model_copy(update={"host": host, "allowed_hosts": ("llm.example.com",)})
    async with Gateway(settings):
        answer = await probes.http_answer(host, settings.port, "/health")
        assert answer is not None and answer[0] == 200


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False
