"""Count what each key uses, over all gateway processes, and refuse what exceeds its limits.

The counts lie in memory that the processes share. Each process writes only its own cells and reads
all, so no lock is needed and no process can hold up another. Two processes may admit a request at
the same moment: a limit can be exceeded by one request for each further process.

A request reserves the most tokens that it may write while it runs, and spends what it wrote at its
end.

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
from typing import NamedTuple

from foretoken.errors import ConfigError, RateLimitError
from gateway.access.key import ApiKey

MINUTE_S = 60.0
# Names for which there is room, of keys with limits; names that were removed keep their place.
MAX_ROWS = 16_384
# Cells of one process: the requests that run, the tokens that these may write, then for even and
# odd minutes the minute's number, its requests and its tokens.
_RUNNING, _RESERVED, _FIRST_MINUTE = 0, 1, 2
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
        self._process = process
        self._row_cells = num_processes * _NUM_CELLS
        size = MAX_ROWS * self._row_cells * _CELL_BYTES
        memory = mmap.mmap(-1, size) if folder is None else _shared_memory(folder / "quotas", size)
        self._cells = memoryview(memory).cast("q")
        self._names: dict[str, int] = {}

    def rows(self, names: Iterable[str]) -> dict[str, KeyCounts]:
        """Return the row of each name; a new name gets one.

        Raises ConfigError if too many had one.
        """
        wanted = list(names)
        if missing := [name for name in wanted if name not in self._names]:
            self._add(missing)
        return {name: self._row(name) for name in wanted}

    def _row(self, name: str) -> KeyCounts:
        first = self._names[name] * self._row_cells
        return KeyCounts(self._cells[first : first + self._row_cells], self._process)

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


class Totals(NamedTuple):
    """What a key uses in all processes."""

    running: int
    # Tokens that these may write.
    reserved: int
    # In the present minute, and in the one before.
    requests: int
    requests_before: int
    tokens: int
    tokens_before: int


class KeyCounts:
    """The counts of one key, of all processes; this process writes its own part."""

    def __init__(self, cells: memoryview, process: int) -> None:
        self._cells = cells
        self._own = process * _NUM_CELLS

    def reset(self) -> None:
        """Forget the requests that run in this process."""
        self._cells[self._own + _RUNNING] = self._cells[self._own + _RESERVED] = 0

    def start(self, reserved: int) -> None:
        """Count a request that runs, and the tokens that it may write."""
        self._cells[self._own + _RUNNING] += 1
        self._cells[self._own + _RESERVED] += reserved

    def end(self, reserved: int) -> None:
        """Undo ``start``."""
        self._cells[self._own + _RUNNING] -= 1
        self._cells[self._own + _RESERVED] -= reserved

    def add(self, minute: int, requests: int, tokens: int) -> None:
        """Count requests and tokens in a minute, the present one."""
        first = self._own + _FIRST_MINUTE + 3 * (minute % 2)
        cells = self._cells
        if cells[first + _MINUTE] != minute:
            cells[first + _REQUESTS] = cells[first + _TOKENS] = 0
            cells[first + _MINUTE] = minute
        cells[first + _REQUESTS] += requests
        cells[first + _TOKENS] += tokens

    def totals(self, minute: int) -> Totals:
        """Return the sums over all processes; ``minute``: the present one."""
        # One copy: reading cell by cell takes longer.
        cells = self._cells.tolist()
        running = reserved = requests = tokens = requests_before = tokens_before = 0
        present, before = _FIRST_MINUTE + 3 * (minute % 2), _FIRST_MINUTE + 3 * ((minute - 1) % 2)
        for first in range(0, len(cells), _NUM_CELLS):
            running += cells[first + _RUNNING]
            reserved += cells[first + _RESERVED]
            if cells[first + present + _MINUTE] == minute:
                requests += cells[first + present + _REQUESTS]
                tokens += cells[first + present + _TOKENS]
            if cells[first + before + _MINUTE] == minute - 1:
                requests_before += cells[first + before + _REQUESTS]
                tokens_before += cells[first + before + _TOKENS]
        return Totals(running, reserved, requests, requests_before, tokens, tokens_before)


class Quota:
    """Holds one key to its limits."""

    def __init__(self, key: ApiKey, row: KeyCounts, now: Callable[[], float] = time.monotonic) -> None:
        """``now``: a clock of the machine, the same for all processes, in seconds."""
        self._key, self._row, self._now = key, row, now

    def check(self, num_tokens: int = 0) -> None:
        """Raise RateLimitError if the key may not start a request of ``num_tokens`` now."""
        key = self._key
        minute, second = divmod(self._now(), MINUTE_S)
        totals = self._row.totals(int(minute))
        if key.max_concurrent_requests is not None and totals.running >= key.max_concurrent_requests:
            raise RateLimitError(f"this key may have {key.max_concurrent_requests} requests at once", retry_after_s=1)
        _check_rate(key.requests_per_minute, "requests", totals.requests, totals.requests_before, second)
        _check_rate(key.tokens_per_minute, "tokens", totals.tokens, totals.tokens_before, second)
        self._check_reserved(totals, second, num_tokens)

    def _check_reserved(self, totals: Totals, second: float, num_tokens: int) -> None:
        """Raise RateLimitError if a further request might exceed the limit of tokens.

        A key's only request may: the limit may be less than its context has room for.
        """
        most, reserved = self._key.tokens_per_minute, totals.reserved
        if most is None or not reserved:
            return
        if _last_minute(totals.tokens, totals.tokens_before, second) + reserved + num_tokens > most:
            raise RateLimitError(
                f"this key may use {most} tokens a minute, and its running requests may write {reserved}; "
                "a lower max_tokens lets more of them run at once",
                retry_after_s=1,
            )

    @contextlib.contextmanager
    def enter(self, num_prompt_tokens: int, max_output_tokens: int) -> Iterator[None]:
        """Count a request and its prompt, and reserve its output while the block runs.

        Raises as ``check``.
        """
        self.check(num_prompt_tokens + max_output_tokens)
        self._row.add(self._minute(), 1, num_prompt_tokens)
        self._row.start(max_output_tokens)
        try:
            yield
        finally:
            self._row.end(max_output_tokens)

    def spend(self, num_tokens: int) -> None:
        """Count tokens that a request wrote."""
        self._row.add(self._minute(), 0, num_tokens)

    def _minute(self) -> int:
        return int(self._now() // MINUTE_S)


def _check_rate(most: int | None, word: str, present: int, before: int, second: float) -> None:
    """Raise RateLimitError if the estimate of the last minute has reached ``most``."""
    if most is not None and _last_minute(present, before, second) > most - 1:
        wait_s = _wait_s(present, before, second, most - 1)
        raise RateLimitError(f"this key may use {most} {word} a minute", retry_after_s=wait_s)


def _last_minute(present: int, before: int, second: float) -> float:
    """Return the estimate of the last minute."""
    return present + before * (1 - second / MINUTE_S)


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
