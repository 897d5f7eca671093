"""Count what each key uses, over all gateway processes, and refuse what exceeds its limits.

The counts lie in memory that the processes share. Each process writes only its own cells and reads
all, so no lock is needed and no process can hold up another. Two processes may admit a request at
the same moment: a limit can be exceeded by one request for each further process.

The last minute is estimated from two fixed minutes: what was counted in the present one, and that
part of the one before which lies less than 60 s back, as if it had been spread evenly.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from foretoken.errors import ConfigError, RateLimitError
from gateway.access.key import ApiKey

MINUTE_S = 60.0
# Names for which there is room, of keys with limits; names that were removed keep their place.
MAX_ROWS = 16_384
# Cells of one process: the requests that run, then for even and odd minutes the minute's number, its
# requests and its tokens.
_RUNNING, _FIRST_MINUTE = 0, 1
_MINUTE, _REQUESTS, _TOKENS = 0, 1, 2
_NUM_CELLS = _FIRST_MINUTE + 2 * 3
_CELL_BYTES = 8


class Ledger:
    """Holds the counts of all keys."""

    def __init__(self, folder: Path | None = None, process: int = 0, num_processes: int = 1) -> None:
        """Share counts with the other processes of ``folder``; without one, keep them here.

        ``process``: number of this process, below ``num_processes``.
        """
        self._folder = folder
        self._process, self.num_processes = process, num_processes
        self._row_cells = num_processes * _NUM_CELLS
        size = MAX_ROWS * self._row_cells * _CELL_BYTES
        memory = mmap.mmap(-1, size) if folder is None else _shared_memory(folder / "quotas", size)
        self._cells = memoryview(memory).cast("q")
        self._names: dict[str, int] = {}

    def rows(self, names: Iterable[str]) -> dict[str, Row]:
        """Return the row of each name; a new name gets one. Raises ConfigError if too many had one."""
        wanted = list(names)
        if missing := [name for name in wanted if name not in self._names]:
            self._add(missing)
        return {name: self._row(name) for name in wanted}

    def _row(self, name: str) -> Row:
        first = self._names[name] * self._row_cells
        return Row(self._cells[first : first + self._row_cells], self._process)

    def _add(self, names: list[str]) -> None:
        """Agree with the other processes about the rows of new names."""
        with self._all_names() as known:
            # Other processes may have added names meanwhile.
            for name in [*known, *names]:
                if name not in self._names:
                    if len(self._names) == MAX_ROWS:
                        raise ConfigError(f"more than {MAX_ROWS} names of keys with limits since the start")
                    self._names[name] = len(self._names)
                    # A process that died may have left requests that ran.
                    self._row(name).reset()
            known[:] = self._names

    @contextlib.contextmanager
    def _all_names(self) -> Iterator[list[str]]:
        """Lock and yield the names by row, which the block may append to."""
        if self._folder is None:
            yield []
            return
        with (self._folder / "quota-names").open("a+", encoding="ascii") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            names = file.read().split()
            num_known = len(names)
            yield names
            file.writelines(f"{name}\n" for name in names[num_known:])


class Row:
    """The counts of one key, of all processes; this process writes its own part."""

    def __init__(self, cells: memoryview, process: int) -> None:
        self._cells = cells
        self._own = process * _NUM_CELLS

    def reset(self) -> None:
        """Forget the requests that run in this process."""
        self._cells[self._own + _RUNNING] = 0

    @property
    def num_running(self) -> int:
        return sum(self._cells[_RUNNING::_NUM_CELLS])

    def add_running(self, count: int) -> None:
        self._cells[self._own + _RUNNING] += count

    def add(self, minute: int, requests: int, tokens: int) -> None:
        """Count requests and tokens in a minute, the present one."""
        first = self._own + _FIRST_MINUTE + 3 * (minute % 2)
        cells = self._cells
        if cells[first + _MINUTE] != minute:
            cells[first + _REQUESTS] = cells[first + _TOKENS] = 0
            cells[first + _MINUTE] = minute
        cells[first + _REQUESTS] += requests
        cells[first + _TOKENS] += tokens

    def used(self, minute: int, what: int) -> int:
        """Return the requests or tokens of a minute, the present one or the one before."""
        cells = self._cells
        firsts = range(_FIRST_MINUTE + 3 * (minute % 2), len(cells), _NUM_CELLS)
        return sum(cells[first + what] for first in firsts if cells[first + _MINUTE] == minute)


class Quota:
    """Holds one key to its limits."""

    def __init__(self, key: ApiKey, row: Row, now: Callable[[], float] = time.monotonic) -> None:
        """``now``: a clock of the machine, the same for all processes, in seconds."""
        self._key, self._row, self._now = key, row, now

    def check(self) -> None:
        """Raise RateLimitError if the key may start no request now."""
        key = self._key
        most = key.max_concurrent_requests
        if most is not None and self._row.num_running >= most:
            raise RateLimitError(f"this key may have {most} requests at once", retry_after_s=1)
        self._check_rate(_REQUESTS, key.requests_per_minute, "requests")
        self._check_rate(_TOKENS, key.tokens_per_minute, "tokens")

    @contextlib.contextmanager
    def enter(self, num_tokens: int) -> Iterator[None]:
        """Count a request while the block runs, with its prompt's tokens. Raises as ``check``."""
        self.check()
        self._row.add(self._minute(), 1, num_tokens)
        self._row.add_running(1)
        try:
            yield
        finally:
            self._row.add_running(-1)

    def spend(self, num_tokens: int) -> None:
        """Count tokens that a request wrote."""
        self._row.add(self._minute(), 0, num_tokens)

    def _minute(self) -> int:
        return int(self._now() // MINUTE_S)

    def _check_rate(self, what: int, most: int | None, word: str) -> None:
        if most is None:
            return
        minute, second = divmod(self._now(), MINUTE_S)
        present, before = self._row.used(int(minute), what), self._row.used(int(minute) - 1, what)
        if present + before * (1 - second / MINUTE_S) <= most - 1:
            return
        raise RateLimitError(
            f"this key may use {most} {word} a minute", retry_after_s=_wait_s(present, before, second, most - 1)
        )


def _wait_s(present: int, before: int, second: float, least: int) -> float:
    """Return the seconds until the estimate has fallen to ``least``."""
    if present <= least:
        return MINUTE_S * (1 - (least - present) / before) - second
    return MINUTE_S - second + MINUTE_S * (1 - least / present)


def retry_after(seconds: float) -> int:
    """Return whole seconds, at least one, after which a request may be sent again."""
    return max(1, math.ceil(seconds))


def _shared_memory(path: Path, size: int) -> mmap.mmap:
    with path.open("a+b") as file:
        file.truncate(size)
        return mmap.mmap(file.fileno(), size)
