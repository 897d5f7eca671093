"""Where a gateway's REST API is, as users type it, and what is said where none is there."""

from __future__ import annotations

import httpx

from foretoken.errors import ForetokenError, UnavailableError


def rest_url(text: str) -> str:
    """As people have it at hand: without a scheme, or with the /v1 that OpenAI clients want."""
    url = text.rstrip("/").removesuffix("/v1")
    return url if "://" in url else f"http://{url}"


def no_answer(url: str, error: httpx.HTTPError | httpx.InvalidURL) -> ForetokenError:
    """What ``error`` says of ``url``, of which nothing has been read: UnavailableError where no server is to be had,
    and ForetokenError where one is that speaks something else."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return UnavailableError(f"nothing answers at {url}")
    if isinstance(error, httpx.RemoteProtocolError) and "illegal" in str(error):
        # The library's word for bytes that are no HTTP/1: a gRPC server sends a frame of HTTP/2. Of a server that dies
        # it says something else.
        return ForetokenError(
            f"what listens at {url} gives no HTTP answer ({error}); is it the port of gRPC? --url wants that of REST, "
            "by default 8000"
        )
    return UnavailableError(f"{url}: {error or type(error).__name__}")
