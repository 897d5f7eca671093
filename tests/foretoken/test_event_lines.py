"""Events are read up to their newline, whatever their text contains and however it arrives."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from foretoken.event_lines import event_lines

LINES = ['data: {"text": "a\x85b\u2028c\u2029d é"}', "", "data: [DONE]"]


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("end", ["\n\n", ""])
def test_only_a_newline_ends_a_line(size: int, end: str) -> None:
    content = ("\n".join(LINES) + end).encode()

    def parts() -> Iterator[bytes]:
        yield from (content[at : at + size] for at in range(0, len(content), size))

    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=parts()))
    with httpx.Client(transport=transport) as client, client.stream("GET", "http://server/") as response:
        assert [line for line in event_lines(response) if line] == [line for line in LINES if line]
