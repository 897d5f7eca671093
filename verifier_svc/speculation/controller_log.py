"""The log of a controller, from which the same code decides the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO

# What happened, and its values.
Record = tuple[str | int | float, ...]


class LoggedTimes:
    """The target's times by rows, each logged when it is asked for."""

    def __init__(self, verify_s: Callable[[int], float], log: Callable[[Record], None]) -> None:
        self._verify_s = verify_s
        self._log = log

    def __call__(self, num_rows: int) -> float:
        seconds = self._verify_s(num_rows)
        self._log(("verify", num_rows, seconds))
        return seconds


def write_to(file: TextIO) -> Callable[[Record], None]:
    """Return a log that writes one JSON array a line."""
    return lambda record: print(json.dumps(record), file=file)


def read(lines: Iterable[str]) -> Iterator[Record]:
    """Return the records of such a file."""
    return (tuple(json.loads(line)) for line in lines if line.strip())
