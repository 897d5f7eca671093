"""Measure how long streams stand still while a long prompt comes, by --max-step-ms.

    python -m benchmarks.prompt_gap [--model models/demo/target] [--limits 0 60] [--streams 1] [--prompt 900]

An engine without gateway and drafters decodes some streams. Then a long prompt comes. It prints the
longest time between two tokens of a stream, and the time to the prompt's first token: the medians
and, in brackets, least and most of several rounds; rounds with different limits alternate.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import threading
import time
from collections import defaultdict
from pathlib import Path

from foretoken.sampling import SamplingParams, SpeculationOptions
from verifier_svc import assembly
from verifier_svc.config import VerifierSettings
from verifier_svc.messages import FinishedEvent, SequenceKey, Submit, TokensEvent
from verifier_svc.outbox import Outbox

STREAM_PROMPT, FIRST_TOKENS, PROMPT_OUTPUT = 50, 10, 8


class EngineClient:
    """Sends requests to one engine, and notes when their tokens come."""

    def __init__(self, settings: VerifierSettings) -> None:
        self._verifier = assembly.build(settings)
        self._engine = self._verifier.engine
        self._outbox = Outbox(self._take)
        self._session = self._engine.open_session(self._outbox)
        self._most_id = self._verifier.info.limits.vocab_size - 1
        self._draw = random.Random(1)
        self._changed = threading.Condition()
        self.times: defaultdict[str, list[float]] = defaultdict(list)
        self._ended: set[str] = set()
        self._engine.start()

    def send(self, name: str, length: int, max_tokens: int) -> None:
        prompt = tuple(self._draw.randint(0, self._most_id) for _ in range(length))
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        key = SequenceKey(self._session, name, 0)
        self._engine.send(
            Submit(key, 0, prompt, (), sampling, speculation=SpeculationOptions(), cache_salt=None, deadline=None)
        )

    def wait(self, name: str, num_events: int | None = None) -> None:
        """Wait until so many steps have given tokens to a request; None: until its end."""
        with self._changed:
            self._changed.wait_for(
                lambda: name in self._ended or (num_events is not None and len(self.times[name]) >= num_events)
            )

    def close(self) -> None:
        self._verifier.close()

    def _take(self) -> None:
        now = time.perf_counter()
        with self._changed:
            for event in self._outbox.take():
                if isinstance(event, TokensEvent):
                    self.times[event.key.request_id].append(now)
                elif isinstance(event, FinishedEvent):
                    self._ended.add(event.key.request_id)
            self._changed.notify_all()


def measure(client: EngineClient, number: int, num_streams: int, prompt: int, output: int) -> tuple[float, float]:
    """Return the longest gap of the streams and the time to the prompt's first token, in ms."""
    names = [f"stream {number} {index}" for index in range(num_streams)]
    long = f"prompt {number}"
    for name in names:
        client.send(name, STREAM_PROMPT, output)
    for name in names:
        client.wait(name, FIRST_TOKENS)
    sent_at = time.perf_counter()
    client.send(long, prompt, PROMPT_OUTPUT)
    for name in (*names, long):
        client.wait(name)
    gaps = [
        after - before for name in names for before, after in itertools.pairwise(client.times[name]) if after > sent_at
    ]
    return max(gaps) * 1e3, (client.times[long][0] - sent_at) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/demo/target"))
    parser.add_argument("--limits", type=int, nargs="+", default=[0, 60], help="ms; 0: no limit")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=900, help="tokens of the long prompt")
    parser.add_argument("--output", type=int, default=150, help="tokens of each stream")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    clients = {
        limit: EngineClient(
            VerifierSettings(
                model=args.model,
                served_model_names=("model",),
                address="unix:/none",
                threads=args.threads,
                max_step_ms=limit,
                disable_radix_cache=True,
            )
        )
        for limit in args.limits
    }
    found: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    # The first round warms up and teaches what prompts take.
    for number in range(args.rounds + 1):
        for limit, client in clients.items():
            result = measure(client, number, args.streams, args.prompt, args.output)
            if number:
                found[limit].append(result)
    for limit, results in found.items():
        gap, first = (
            f"{statistics.median(values):.0f} [{min(values):.0f}, {max(values):.0f}]"
            for values in zip(*results, strict=True)
        )
        print(f"--max-step-ms {limit}: longest gap {gap} ms, first token after {first} ms", flush=True)
        clients[limit].close()


if __name__ == "__main__":
    main()
