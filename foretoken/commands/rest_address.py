"""Read the REST address that a user types, and explain why nothing answers there."""

from __future__ import annotations

import os
import ssl

import httpx

from foretoken.errors import ConfigError, ForetokenError, UnavailableError

# OpenSSL's codes for a certificate that leads to no known root.
_UNKNOWN_ROOT = (2, 18, 19, 20, 21)


def rest_url(text: str) -> str:
    """Return the base URL for an address; it may lack a scheme or end in OpenAI's /v1."""
    url = text.rstrip("/").removesuffix("/v1")
    return url if "://" in url else f"http://{url}"


def key_headers() -> dict[str, str]:
    """Return the headers with the key of the environment, if there is one.

    A server takes several keys from the same variable; then this is the first.
    """
    keys = os.environ.get("FORETOKEN_API_KEY", "").split()
    return {"authorization": f"Bearer {keys[0]}"} if keys else {}


def key_hint(*, is_set: bool) -> str:
    """Return what to add to a refusal of the key. ``is_set``: whether ``key_headers`` had one."""
    return " (the key comes from FORETOKEN_API_KEY)" if is_set else "; set FORETOKEN_API_KEY"


def tls_context(url: str) -> ssl.SSLContext | bool:
    """Return how to check the server of ``url``: by public authorities or the environment's roots.

    Raises ConfigError for a file that holds no roots.
    """
    path = os.environ.get("SSL_CERT_FILE")
    if not path or not url.startswith("https:"):
        return True
    try:
        return ssl.create_default_context(cafile=path)
    except OSError as error:
        raise ConfigError(f"SSL_CERT_FILE: cannot read {path}: {error.strerror or error}") from None


def no_answer(url: str, error: httpx.HTTPError | httpx.InvalidURL) -> ForetokenError:
    """Return the error to raise when ``url`` gave no answer.

    That is UnavailableError if no server is reachable, ForetokenError if there is one but the call
    must be another: by another protocol, or with another certificate's root.
    """
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        if (failed := _tls_error(error)) is not None:
            return _no_handshake(url, failed)
        return UnavailableError(f"nothing answers at {url}")
    if isinstance(error, httpx.RemoteProtocolError) and "illegal" in str(error):
        # The library says "illegal" for bytes that are not HTTP/1, such as a gRPC server's HTTP/2
        # frame, but not when a server dies.
        return ForetokenError(
            f"the server at {url} does not answer in HTTP ({error}); is it the gRPC port? --url needs the REST port, "
            "by default 8000"
        )
    if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError) and url.startswith("http:"):
        # A server with TLS hangs up on plain text, but so does one that dies.
        said = str(error).removesuffix(".")
        return ForetokenError(f"{url}: {said}; if this server has TLS, give --url https:{url.removeprefix('http:')}")
    return UnavailableError(f"{url}: {error or type(error).__name__}")


def _no_handshake(url: str, error: ssl.SSLError) -> ForetokenError:
    """Return the error to raise when the TLS handshake failed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        message = f"the certificate of {url} is refused: {error.verify_message}"
        if error.verify_code in _UNKNOWN_ROOT:
            message += "; set SSL_CERT_FILE to a file with its root, or with the certificate if it signed itself"
        return ForetokenError(message)
    if error.reason == "WRONG_VERSION_NUMBER":
        return ForetokenError(
            f"the server at {url} does not answer in TLS; if it has none, give --url http:{url.removeprefix('https:')}"
        )
    return ForetokenError(f"{url}: no TLS connection: {error}")


def _tls_error(error: BaseException) -> ssl.SSLError | None:
    """Return the error of TLS that ``error`` wraps."""
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, ssl.SSLError):
        inner = inner.__cause__ or inner.__context__
    return inner
