"""Collect what all gateway processes do and did lately, for the operator.

Each worker answers on a private Unix socket, and the worker that gets the call asks all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from gateway import process_socket

Activity = dict[str, Any]
ACTIVITY_TIMEOUT_S = 2.0


def activity_socket(folder: Path, number: int) -> Path:
    """Return the path of the socket on which a worker says what it does."""
    return folder / f"activity-{number}.sock"


def serve_activity(path: Path, activity: Callable[[], Activity]) -> contextlib.AbstractAsyncContextManager[None]:
    """Answer each line with this process's activity, in JSON."""

    async def answer_to(request: bytes) -> bytes:
        return orjson.dumps(activity())

    return process_socket.serve(path, answer_to)


async def activity_of_all_workers(folder: Path, num_workers: int) -> list[Activity]:
    """Return the activity of each worker that answers.

    One that starts anew has forgotten its requests.
    """
    answers = await asyncio.gather(*(_activity_of(activity_socket(folder, number)) for number in range(num_workers)))
    return [answer for answer in answers if answer is not None]


async def _activity_of(path: Path) -> Activity | None:
    try:
        answer = await process_socket.ask(path, b"\n", ACTIVITY_TIMEOUT_S)
    except (OSError, TimeoutError):
        return None
    return orjson.loads(answer) if answer else None
