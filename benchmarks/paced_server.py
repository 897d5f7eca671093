"""Serve made-up chats at a known pace, so that a load tool can be held against the truth.

    python -m benchmarks.paced_server --port 8000 --ttft-ms 100 --tpot-ms 20 --tokens-a-chunk 1

Every answer's first chunk is due ``ttft`` after its request, and the following ones
``tpot`` x their tokens after each other. All are timed from the request, so a late
chunk makes no other one late.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import dataclass
from typing import Any

import uvloop

MODEL = "paced"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds to the first chunk, seconds a token after it, and tokens in each later chunk."""

    ttft_s: float
    tpot_s: float
    tokens_a_chunk: int = 1


class PacedServer:
    """Answer GETs with the model's name, and POSTs with a stream.

    A stream has as many tokens as the POST wants.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection's requests until it is closed."""
        try:
            while (line := await reader.readline()).strip():
                length = 0
                while (header := await reader.readline()).strip():
                    name, _, value = header.lower().partition(b":")
                    length = int(value) if name == b"content-length" else length
                at = asyncio.get_running_loop().time()
                body = json.loads(await reader.readexactly(length)) if length else {}
                if line.startswith(b"GET") or not body.get("stream"):
                    self._answer(writer)
                else:
                    await self._stream(writer, body, at)
        except ConnectionError:
            # The client has gone, and the rest has no reader.
            pass
        finally:
            writer.close()

    def _answer(self, writer: asyncio.StreamWriter) -> None:
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        payload = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}], "usage": usage}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
        writer.write(f"content-length: {len(payload)}\r\n\r\n".encode() + payload)

    async def _stream(self, writer: asyncio.StreamWriter, body: dict[str, Any], at: float) -> None:
        wanted = body.get("max_completion_tokens") or body["max_tokens"]
        writer.write(HEAD)
        done = 0
        while done < wanted:
            due = at + self._pace.ttft_s + done * self._pace.tpot_s
            size = min(self._pace.tokens_a_chunk if done else 1, wanted - done)
            # The last token of a chunk is what it waited for.
            due += (size - 1) * self._pace.tpot_s
            await asyncio.sleep(due - asyncio.get_running_loop().time())
            done += size
            text = " word" * size
            choice = {"delta": {"content": text}} if "messages" in body else {"text": text}
            _write(writer, [{"index": 0, "finish_reason": "length" if done == wanted else None, **choice}], None)
            await writer.drain()
        _write(writer, [], {"prompt_tokens": 1, "completion_tokens": done, "total_tokens": done + 1})
        payload = b"data: [DONE]\n\n"
        writer.write(f"{len(payload):x}\r\n".encode() + payload + b"\r\n0\r\n\r\n")
        await writer.drain()


def _write(writer: asyncio.StreamWriter, choices: list[dict[str, Any]], usage: dict[str, int] | None) -> None:
    event = {"id": "0", "object": "chat.completion.chunk", "created": 0, "model": MODEL}
    payload = b"data: " + json.dumps(event | {"choices": choices, "usage": usage}).encode() + b"\n\n"
    writer.write(f"{len(payload):x}\r\n".encode() + payload + b"\r\n")


async def run(port: int, pace: Pace) -> None:
    """Serve on 127.0.0.1 until cancelled."""
    server = await asyncio.start_server(PacedServer(pace).serve, "127.0.0.1", port)
    async with server:
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.paced_server", description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ttft-ms", type=float, default=100.0, help="from a request to its first chunk")
    parser.add_argument("--tpot-ms", type=float, default=20.0, help="of each token after the first")
    parser.add_argument("--tokens-a-chunk", type=int, default=1, help="in each chunk after the first")
    options = parser.parse_args()
    pace = Pace(options.ttft_ms / 1e3, options.tpot_ms / 1e3, options.tokens_a_chunk)
    uvloop.run(run(options.port, pace))


if __name__ == "__main__":
    main()
