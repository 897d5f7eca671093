"""Microbenchmark of the n-gram drafter at full size: python -m benchmarks.ngram

It fills the trie with the standard library's source code until eviction runs. Then it streams
held-out files through the trie as a verifier would: in each step some rows get a few new tokens,
then a tree is drafted for each row. Inserting and matching are timed separately, as calls of
``NgramDrafter.draft``, Python included. A call without work has its own line; its time is
subtracted from the insert times (a batch pays it once), but not from the match times. All is
measured again with close predictions (the file's own text, one token in eight changed), with
useless predictions (another file), and with corpora. Bars are for the medians. The exit status is 1
above a bar.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drafter_svc.ngram.drafter import NgramDrafter
from drafter_svc.ngram.settings import NgramSettings
from foretoken.drafting import RAGGED_COLUMNS, ROW_COLUMNS, DraftRequest, TargetInfo
from models.demo.held_out import held_out_files

TOKENIZER = Path(__file__).parent.parent / "models" / "demo" / "target" / "tokenizer.json"
WORD = re.compile(r"\w+|\s+|[^\w\s]")
MAX_SEQUENCE = 8192
FILL_CHUNK = 512
CORPUS_TOKENS = 2_000_000
SALT = 1
# Clocks in seconds. "cpu" does not count time in which other processes had the core.
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.thread_time}

MAX_MATCH_US = 30.0
MAX_INSERT_US = 10.0
MAX_MEMORY_MB = 600.0


@dataclass
class BatchSlotFeed:
    """A batch slot, and the sequences that use it one after the other."""

    batch_slot: int
    sequences: Iterator[NDArray[np.int32]]
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    length: int = 0
    generation: int = 0

    def take(self, count: int) -> NDArray[np.int32]:
        """Return the next tokens; after the end of a sequence, those of a new one."""
        if self.length == len(self.tokens):
            self.tokens, self.length, self.generation = next(self.sequences), 0, self.generation + 1
        taken = self.tokens[self.length : self.length + count]
        self.length += len(taken)
        return taken


def make_tokenizer() -> tuple[str, int, Callable[[str], NDArray[np.int32]]]:
    """Return a tokenizer's name, its vocabulary's size and a function from text to ids."""
    if TOKENIZER.is_file():
        from tokenizers import Tokenizer

        demo = Tokenizer.from_file(str(TOKENIZER))
        return "the demo tokenizer", demo.get_vocab_size(), lambda text: np.array(demo.encode(text).ids, np.int32)

    def hash_words(text: str) -> NDArray[np.int32]:
        return np.array([zlib.crc32(word.encode()) % 8192 for word in WORD.findall(text)], np.int32)

    return "words hashed to 8192 ids (there is no demo tokenizer)", 8192, hash_words


def load(files: list[Path], encode: Callable[[str], NDArray[np.int32]]) -> list[NDArray[np.int32]]:
    """Return the token ids of files, cut into sequences."""
    sequences = []
    for file in files:
        ids = encode(file.read_text(encoding="utf-8", errors="replace"))
        sequences += [ids[start : start + MAX_SEQUENCE] for start in range(0, len(ids), MAX_SEQUENCE)]
    return [ids for ids in sequences if len(ids)]


def make_request(
    step: int,
    rows: list[BatchSlotFeed],
    taken: list[NDArray[np.int32]],
    max_nodes: int,
    predictions: list[NDArray[np.int32]] | None = None,
) -> DraftRequest:
    def column(values: list[int]) -> NDArray[np.int32]:
        return np.array(values, np.int32)

    def starts(parts: list[NDArray[np.int32]]) -> NDArray[np.int32]:
        return column([0, *itertools.accumulate(len(each) for each in parts)])

    nothing = [np.zeros(0, np.int32)] * len(rows)
    columns: dict[str, Any] = {name: np.zeros(len(rows), dtype) for name, dtype in ROW_COLUMNS.items()}
    columns |= {
        "batch_slots": column([row.batch_slot for row in rows]),
        "generations": column([row.generation for row in rows]),
        "lengths": column([row.length for row in rows]),
        "max_nodes": np.full(len(rows), max_nodes, np.int32),
        "max_depths": np.full(len(rows), max_nodes, np.int32),
        "max_branches": np.full(len(rows), max_nodes, np.int32),
        "salts": np.full(len(rows), SALT, np.uint64),
    }
    ragged = {"new_tokens": taken, "prediction": predictions or nothing}
    for values, offsets in RAGGED_COLUMNS.items():
        parts = ragged.get(values, nothing)
        columns[values], columns[offsets] = np.concatenate(parts), starts(parts)
    columns["hidden"] = np.zeros((0, 0), np.float32)
    return DraftRequest.of_columns(1, step, columns)


def edited(tokens: NDArray[np.int32], random: np.random.Generator) -> NDArray[np.int32]:
    """Return a text as a client might predict it: 0 to 16 tokens replace 8 of each 64."""
    parts = []
    for low in range(0, len(tokens), 64):
        changed = random.choice(tokens, size=int(random.integers(0, 17)))
        parts += [tokens[low : low + 28], changed, tokens[low + 36 : low + 64]]
    return np.concatenate(parts)


def fill(
    drafter: NgramDrafter, sequences: list[NDArray[np.int32]], batch_slot: int, extra_tokens: int, clock: Clock
) -> tuple[int, float]:
    """Insert sequences until the trie is full, then ``extra_tokens``; return tokens and seconds."""
    row = BatchSlotFeed(batch_slot, itertools.cycle(sequences))
    total, seconds, left = 0, 0.0, extra_tokens
    for step in itertools.count(1):
        taken = row.take(FILL_CHUNK)
        request = make_request(step, [row], [taken], max_nodes=1)
        start = clock()
        drafter.draft(request)
        seconds += clock() - start
        total += len(taken)
        left -= len(taken) if drafter.gauges()["ngram_evictions"] > 0 else 0
        if left <= 0 or row.generation > 3 * len(sequences):
            return total, seconds
    raise AssertionError("unreachable")


def idle_call(
    drafter: NgramDrafter, rows: list[BatchSlotFeed], nothing: list[NDArray[np.int32]], clock: Clock
) -> float:
    """Return the median seconds of a call for these rows that neither inserts nor matches."""
    request = make_request(0, rows, nothing, max_nodes=1)
    calls = []
    for _ in range(1000):
        start = clock()
        drafter.draft(request)
        calls.append(clock() - start)
    median = float(np.median(calls))
    print(f"a call for {len(rows)} rows with nothing to do: {median * 1e6:.2f} us")
    return median


def stream(
    drafter: NgramDrafter,
    rows: list[BatchSlotFeed],
    steps: int,
    new_tokens: int,
    max_nodes: int,
    clock: Clock,
    predict: Callable[[BatchSlotFeed], NDArray[np.int32]] | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Return each step's insert microseconds a token and match microseconds a row, and nodes a row.

    ``predict`` returns a row's prediction, which is sent with the first tokens of its sequence.
    """
    inserts, matches, nodes = [], [], 0
    nothing = [np.zeros(0, np.int32)] * len(rows)
    idle = idle_call(drafter, rows, nothing, clock)
    for step in range(steps):
        taken = [row.take(new_tokens) for row in rows]
        predictions = None
        if predict is not None:
            predictions = [predict(row) if row.length <= new_tokens else nothing[0] for row in rows]
        insert = make_request(2 * step, rows, taken, 1, predictions)
        match = make_request(2 * step + 1, rows, nothing, max_nodes=max_nodes)
        started = clock()
        drafter.draft(insert)
        inserted = clock()
        batch = drafter.draft(match)
        matched = clock()
        inserts.append((inserted - started - idle) * 1e6 / sum(map(len, taken)))
        matches.append((matched - inserted) * 1e6 / len(rows))
        nodes += len(batch.tokens) - len(rows)
    return np.array(inserts), np.array(matches), nodes / steps / len(rows)


def resident_mb() -> float:
    """Return the resident memory of this process in units of 10**6 bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024 / 1e6


def report(name: str, values: NDArray[np.float64], bar: float) -> bool:
    """Print a line, and return whether the median is under the bar."""
    p50, p99 = np.percentile(values, [50, 99])
    good = bool(p50 < bar)
    print(f"{name:<66} p50 {p50:6.2f} us   p99 {p99:6.2f} us   bar {bar:.0f} us at p50: {'ok' if good else 'OVER'}")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description="Insert and match times of the n-gram drafter at full size.")
    parser.add_argument("--capacity", type=int, default=10_000_000)
    parser.add_argument("--order", choices=("recency", "frequency"), default="recency")
    parser.add_argument("--max-nodes", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="wall", help="cpu on a machine that is busy")
    arguments = parser.parse_args()
    clock = CLOCKS[arguments.clock]

    name, vocab_size, encode = make_tokenizer()
    held_out = held_out_files()
    library = Path(sysconfig.get_paths()["stdlib"])
    installed = {file for file in library.rglob("*.py") if "site-packages" not in file.parts}
    history, streamed = load(sorted(installed - set(held_out)), encode), load(held_out, encode)
    print(f"{sum(map(len, history)):,} tokens of history, {sum(map(len, streamed)):,} held out; {name}")

    start = time.perf_counter()
    drafter = NgramDrafter(NgramSettings(capacity=arguments.capacity, order=arguments.order))
    print(f"start: {time.perf_counter() - start:.1f} s (compiled, or loaded from the cache)")
    drafter.attach(TargetInfo("benchmark", vocab_size, MAX_SEQUENCE, max_batch_slots=64, max_nodes=256), None)
    before = resident_mb()
    tokens, seconds = fill(drafter, history, batch_slot=63, extra_tokens=200_000, clock=clock)
    gauges = drafter.gauges()
    print(
        f"fill: {tokens:,} tokens, {seconds * 1e6 / tokens:.2f} us a token in chunks of {FILL_CHUNK}; "
        f"{gauges['ngram_nodes']:,.0f} nodes, {gauges['ngram_evictions']:,.0f} evictions; clock: {arguments.clock}"
    )
    good = True
    # The text of each part is new to the drafter.
    sequences = itertools.cycle(streamed[:-8])
    random = np.random.default_rng(0)
    kinds: dict[str, Callable[[BatchSlotFeed], NDArray[np.int32]] | None] = {
        "": None,
        ", close predictions": lambda row: edited(row.tokens, random),
        ", useless predictions": lambda row: streamed[-1 - row.batch_slot],
        ", corpora": None,
    }
    for (kind, predict), count in itertools.product(kinds.items(), (1, 8)):
        if "corpora" in kind and not drafter.corpora.list():
            start = time.perf_counter()
            corpus = np.concatenate(history)[:CORPUS_TOKENS]
            drafter.corpora.add("history", corpus)
            print(f"a corpus of {len(corpus):,} tokens: sorted in {time.perf_counter() - start:.1f} s")
        rows = [BatchSlotFeed(batch_slot, sequences) for batch_slot in range(count)]
        inserts, matches, nodes = stream(drafter, rows, arguments.steps, 2, arguments.max_nodes, clock, predict)
        good &= report(f"insert, {count} rows x 2 tokens{kind}, per token", inserts, MAX_INSERT_US)
        good &= report(f"match, {count} rows, {nodes:.1f} nodes drafted{kind}, per row", matches, MAX_MATCH_US)
        drafter.release(range(count))
    memory = resident_mb() - before
    good &= memory < MAX_MEMORY_MB and drafter.gauges()["ngram_evictions"] > gauges["ngram_evictions"] > 0
    print(f"memory: {memory:.0f} MB for {drafter.gauges()['ngram_nodes']:,.0f} nodes, bar {MAX_MEMORY_MB:.0f} MB")
    print(f"evictions while measuring: {drafter.gauges()['ngram_evictions'] - gauges['ngram_evictions']:,.0f}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
