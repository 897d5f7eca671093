"""The log of a controller, from which the same code decides the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
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


def write_anew(path: Path) -> Callable[[Record], None]:
    """Return a log that adds a line to a file for each record; the file is empty now.

    It holds no open file: a server that is killed leaves all of its log. Raises OSError if the file
    cannot be made.
    """
    path.write_text("", encoding="ascii")

    def log(record: Record) -> None:
        with path.open("a", encoding="ascii") as file:
            write_to(file)(record)

    return log


def read(lines: Iterable[str]) -> Iterator[Record]:
    """Return the records of such a file."""
    return (tuple(json.loads(line)) for line in lines if line.strip())
