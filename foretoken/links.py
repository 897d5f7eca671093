"""Guard calls between services over TCP with a shared token, with certificates, or with both.

A Unix socket needs neither: only the services' own user can open it.
"""

from __future__ import annotations

import hmac
import ipaddress
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from foretoken.address import UNIX_PREFIX
from foretoken.common_settings import LinkSettings
from foretoken.errors import ConfigError, ForetokenError, PermissionDeniedError, UnauthenticatedError

MIN_TOKEN_CHARS = 16
METADATA_KEY = "authorization"
_SCHEME = "Bearer "


class AllowedCaller(Enum):
    """Who may make a call over TCP."""

    # Everybody who reaches the port.
    ANYBODY = auto()
    # A peer: it shows the token if the service has one. Without one,
    # everybody who reaches the port.
    PEER = auto()
    # A peer that shows a token or a certificate. A service that asks for neither refuses the call.
    OPERATOR = auto()


def _calls(service: str, caller: AllowedCaller, *names: str) -> dict[str, AllowedCaller]:
    return {f"/{service}/{name}": caller for name in names}


_VERIFIER = "foretoken.verifier.v1.VerifierService"
_DRAFTER = "foretoken.drafter.v1.DrafterService"
# A call that is missing here is an operator's. With certificates the handshake comes before all of
# them.
CALLERS: dict[str, AllowedCaller] = {
    **_calls("grpc.health.v1.Health", AllowedCaller.ANYBODY, "Check", "List", "Watch"),
    **_calls("grpc.reflection.v1alpha.ServerReflection", AllowedCaller.PEER, "ServerReflectionInfo"),
    **_calls(_VERIFIER, AllowedCaller.PEER, "Session", "Generate", "GetInfo"),
    **_calls(
        _VERIFIER, AllowedCaller.OPERATOR, "AddCorpus", "RemoveCorpus", "ListCorpora", "AttachDrafter", "DetachDrafter"
    ),
    **_calls(_VERIFIER, AllowedCaller.OPERATOR, "FlushCache"),
    **_calls(_DRAFTER, AllowedCaller.PEER, "Prepare", "Attach", "Draft", "Release", "TraceSequence", "GetInfo"),
    **_calls(_DRAFTER, AllowedCaller.OPERATOR, "AddCorpus", "RemoveCorpus", "ListCorpora"),
}


@dataclass(frozen=True)
class LinkCertificates:
    """PEM files of one service: its chain and key, and the authority that signs its peers'."""

    chain: bytes
    key: bytes = field(repr=False)
    authority: bytes


@dataclass(frozen=True)
class LinkCredentials:
    """What a service shows its peers over TCP, and expects from them."""

    token: str | None = field(default=None, repr=False)
    certificates: LinkCertificates | None = None


NO_CREDENTIALS = LinkCredentials()


def read_credentials(settings: LinkSettings) -> LinkCredentials:
    """Read the files that the settings name. Raises ConfigError that names the flag at fault."""
    return LinkCredentials(_read_token(settings.link_token_file), _read_certificates(settings))


def is_unix(address: str) -> bool:
    return address.startswith(UNIX_PREFIX)


def is_exposed(address: str) -> bool:
    """Return whether other machines may reach a server at ``address``."""
    if is_unix(address):
        return False
    host = address.rpartition(":")[0]
    try:
        return not ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return host != "localhost"


def check_listener(address: str, credentials: LinkCredentials, *, is_insecure: bool) -> None:
    """Raise ConfigError if other machines may call a server without credentials."""
    if is_exposed(address) and credentials == NO_CREDENTIALS and not is_insecure:
        raise ConfigError(
            f"--address {address}: every machine that reaches it could call this service. Give it and its peers "
            "--link-token-file, or --link-certfile, --link-keyfile and --link-ca; or allow that with --insecure-links"
        )


def server_credentials(address: str, credentials: LinkCredentials) -> grpc.ServerCredentials | None:
    """Return the TLS credentials of a server at ``address``, which demand a client's certificate.

    They are None without TLS.
    """
    found = credentials.certificates
    if found is None or is_unix(address):
        return None
    return grpc.ssl_server_credentials(
        [(found.key, found.chain)], root_certificates=found.authority, require_client_auth=True
    )


def channel_credentials(address: str, credentials: LinkCredentials) -> grpc.ChannelCredentials | None:
    """Return the TLS credentials of a client of ``address``; None: no TLS."""
    found = credentials.certificates
    if found is None or is_unix(address):
        return None
    return grpc.ssl_channel_credentials(found.authority, found.key, found.chain)


def show_token(channel: Any, address: str, credentials: LinkCredentials) -> None:
    """Send the token in the metadata of each call over ``channel``.

    Messages of a stream carry nothing more and pass no other code: grpc.aio's own interceptors
    would put a queue before them.
    """
    if credentials.token is None or is_unix(address):
        return
    metadata = ((METADATA_KEY, _SCHEME + credentials.token),)
    for form in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
        setattr(channel, form, partial(_with_metadata, getattr(channel, form), metadata))


class _Call:
    """One call of a stub, always with the given metadata."""

    def __init__(self, call: Any, metadata: tuple[tuple[str, str], ...]) -> None:
        self._call, self._metadata = call, metadata

    def __call__(self, *args: Any, metadata: Any = (), **more: Any) -> Any:
        return self._call(*args, metadata=(*(metadata or ()), *self._metadata), **more)

    def future(self, *args: Any, metadata: Any = (), **more: Any) -> Any:
        return self._call.future(*args, metadata=(*(metadata or ()), *self._metadata), **more)


def _with_metadata(make_call: Any, metadata: tuple[tuple[str, str], ...], *args: Any, **more: Any) -> _Call:
    return _Call(make_call(*args, **more), metadata)


class LinkInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls over TCP whose caller may not make them, before their messages are read."""

    def __init__(self, token: str | None) -> None:
        """``token``: the one that callers must show; None: operators' calls are refused."""
        self._expected = None if token is None else token.encode()

    # Any: synchronous and asyncio handlers share grpc's handler type.
    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        caller = CALLERS.get(handler_call_details.method, AllowedCaller.OPERATOR)
        refusal = None if caller is AllowedCaller.ANYBODY else self._refusal(caller, handler_call_details)
        return await continuation(handler_call_details) if refusal is None else _refuse(refusal)

    def _refusal(self, caller: AllowedCaller, details: grpc.HandlerCallDetails) -> ForetokenError | None:
        if self._expected is None:
            if caller is AllowedCaller.PEER:
                return None
            return PermissionDeniedError(
                "an operator's call over TCP needs --link-token-file or certificates at this service and its peers"
            )
        # Any: the types of metadata vary between grpc's stubs.
        pairs: Any = details.invocation_metadata or ()
        shown = dict(pairs).get(METADATA_KEY)
        if not isinstance(shown, str) or not shown.startswith(_SCHEME):
            return UnauthenticatedError("this service needs its link token: give the caller --link-token-file")
        if not hmac.compare_digest(shown.removeprefix(_SCHEME).encode(), self._expected):
            return PermissionDeniedError("this is not the service's link token: see --link-token-file")
        return None


def server_interceptors(address: str, credentials: LinkCredentials) -> Sequence[grpc.aio.ServerInterceptor]:
    """Return what guards a server's calls at ``address`` besides TLS."""
    if is_unix(address) or (credentials.token is None and credentials.certificates is not None):
        return ()
    return (LinkInterceptor(credentials.token),)


def _refuse(error: ForetokenError) -> Any:
    """Return a handler for every form of call that ends it with ``error``."""

    async def refuse(requests: Any, context: Any) -> None:
        await context.abort(error.status, error.message)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _read_token(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        # The text of a decoding error shows a byte of the token.
        reason = error.strerror if isinstance(error, OSError) else "it is not ASCII"
        raise ConfigError(f"--link-token-file: cannot read {path}: {reason}") from None
    if len(token) < MIN_TOKEN_CHARS or not token.isprintable() or " " in token:
        raise ConfigError(
            f"--link-token-file: the token must have at least {MIN_TOKEN_CHARS} printable characters and no space"
        )
    return token


def _read_certificates(settings: LinkSettings) -> LinkCertificates | None:
    """Read the certificates and check that they belong together."""
    if settings.link_certfile is None or settings.link_keyfile is None or settings.link_ca is None:
        return None
    chain = _read_pem("--link-certfile", settings.link_certfile)
    key = _read_pem("--link-keyfile", settings.link_keyfile)
    authority = _read_pem("--link-ca", settings.link_ca)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # A password would be asked for on the terminal.
        context.load_cert_chain(settings.link_certfile, settings.link_keyfile, password="")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--link-certfile and --link-keyfile: no certificate with its unencrypted key in PEM: {error}"
        ) from None
    try:
        context.load_verify_locations(settings.link_ca)
    except OSError as error:
        raise ConfigError(f"--link-ca: {settings.link_ca} holds no certificate in PEM: {error}") from None
    return LinkCertificates(chain, key, authority)


def _read_pem(flag: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag}: cannot read {path}: {error.strerror}") from None
