"""Read the lines of a stream of server-sent events."""

from __future__ import annotations

from collections.abc import Iterator

import httpx


def event_lines(response: httpx.Response) -> Iterator[str]:
    """Yield a response's lines as they come.

    Lines end with a newline alone. ``httpx.Response.iter_lines`` also splits at U+0085 and U+2028,
    which JSON may contain as they are.
    """
    rest = b""
    for part in response.iter_bytes():
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")
