"""Read the REST address that a user types, and explain why nothing answers there."""

from __future__ import annotations

import os
import ssl

import httpx

from foretoken.errors import ConfigError, ForetokenError, UnavailableError


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

    That is UnavailableError if no server is reachable, ForetokenError if one speaks another
    protocol.
    """
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return UnavailableError(f"nothing answers at {url}")
    if isinstance(error, httpx.RemoteProtocolError) and "illegal" in str(error):
        # The library says "illegal" for bytes that are not HTTP/1, such as a gRPC server's HTTP/2
        # frame, but not when a server dies.
        return ForetokenError(
            f"the server at {url} does not answer in HTTP ({error}); is it the gRPC port? --url needs the REST port, "
            "by default 8000"
        )
    return UnavailableError(f"{url}: {error or type(error).__name__}")
