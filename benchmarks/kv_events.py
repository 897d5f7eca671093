"""Measure what --kv-events costs the engine thread, by block that the prefix cache learns.

    python -m benchmarks.kv_events

Fills the prefix cache with prompts, without events and with them, in alternation; a subscriber in
another process reads all. Prints microseconds of the engine thread for each block.
"""

from __future__ import annotations

import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import zmq

from verifier_svc.kv_events import KvEventPublisher
from verifier_svc.scheduling.block_manager import BlockManager
from verifier_svc.scheduling.cache_events import CacheEvents

BLOCK_SIZE = 16
# Blocks that one step fills: a prefill chunk of 2048 tokens.
STEP_BLOCKS = 128
NUM_STEPS = 200
ROUNDS = 9


def follow(endpoint: str) -> None:
    """Read messages until there are none for a while."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
    socket.subscribe(b"")
    socket.connect(endpoint)
    while socket.poll(3000):
        socket.recv_multipart()


def time_round(prompts: list[list[int]], events: CacheEvents | None) -> float:
    """Return seconds to cache all prompts; later ones evict earlier ones."""
    manager = BlockManager(NUM_STEPS * STEP_BLOCKS // 2, BLOCK_SIZE, events=events)
    began = time.perf_counter()
    for tokens in prompts:
        table = manager.match_prefix(tokens, None)
        manager.reserve(table, len(tokens))
        manager.hash_full_blocks(table, tokens, len(tokens))
        manager.free(table)
        if events is not None:
            events.publish()
    return time.perf_counter() - began


def main() -> int:
    chooser = random.Random(0)
    prompts = [[chooser.randrange(150_000) for _ in range(STEP_BLOCKS * BLOCK_SIZE)] for _ in range(NUM_STEPS)]
    off, on = [], []
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{Path(folder) / 'events'}"
        publisher = KvEventPublisher(endpoint, None, "kv@bench@model", BLOCK_SIZE)
        subscriber = multiprocessing.get_context("spawn").Process(target=follow, args=(endpoint,))
        subscriber.start()
        for _ in range(ROUNDS):
            off.append(time_round(prompts, None))
            on.append(time_round(prompts, CacheEvents(publisher.publish)))
        publisher.close()
        subscriber.join()
    num_blocks = NUM_STEPS * STEP_BLOCKS
    for name, seconds in (("off", off), ("on", on)):
        print(f"{name}: {statistics.median(seconds) / num_blocks * 1e6:.2f} us a block")
    return 0


if __name__ == "__main__":
    sys.exit(main())
