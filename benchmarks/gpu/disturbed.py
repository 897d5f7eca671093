"""Run rounds of the same streams against one stack, with or without a fault in the first one."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.gpu.faults import Fault
from benchmarks.gpu.watch import Return, Sighting, Watch, drafters_return
from benchmarks.stack import StackError, service
from foretoken.bench.client import Address, OnArrival, complete
from foretoken.bench.completion import Recording, StreamedCompletion
from foretoken.supervisor import STABLE_AFTER_S

# Arrivals (of one or several tokens) that each stream has received before the fault.
ARRIVALS_BEFORE = 40
# The supervisor delays the restart of a process that has just started, and learns late that one is
# ready.
SETTLE_S = STABLE_AFTER_S + 1.0
# Also the timeout of each request, so that no stream waits forever.
RECOVERY_TIMEOUT_S = 120.0
POLL_S = 0.02
# Drafts of a random head are accepted by chance, too rarely to wait for.
LEAST_ACCEPTED_PER_DRAFT = 0.1
SERVICES = ("gateway", "verifier", "drafter")


@dataclass(frozen=True, slots=True)
class Course:
    """A fault and its effects. Times are perf_counter seconds.

    Attributes:
        rounds: the completions of the round with the fault, and of all later rounds.
        back: when the drafter was attached and used again.
        well_at: when every ended process was ready again, and drafts were as before.
        restarted: the services that have a new process.
        said: the supervisor's log lines.
    """

    rounds: list[list[StreamedCompletion]]
    fault_at: float
    back: Return
    well_at: float
    restarted: list[str]
    said: list[str]


@dataclass(slots=True)
class Subject:
    """A running stack with one drafter.

    Attributes:
        model: the served name.
        log: the log file.
        prompts: one for each stream of the largest round, or more.
    """

    address: Address
    root: psutil.Process
    model: str
    log: Path
    prompts: Sequence[Sequence[int]]
    output_tokens: int
    _stable_at: float = field(init=False, default_factory=lambda: time.perf_counter() + SETTLE_S)

    def round(self, batch: int, on_arrival: OnArrival = lambda recordings: None) -> list[StreamedCompletion]:
        """Complete the first ``batch`` prompts at once. Raises StreamError."""
        bodies = [
            {
                "model": self.model,
                "prompt": list(prompt),
                "max_tokens": self.output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                "cache_salt": uuid.uuid4().hex,
            }
            for prompt in self.prompts[:batch]
        ]
        return complete(self.address, bodies, RECOVERY_TIMEOUT_S, on_arrival)

    def settle(self, batch: int, fault: Fault) -> list[list[StreamedCompletion]]:
        """Run undisturbed rounds, at least one, until no process is too young for ``fault``."""
        rounds = [self.round(batch)]
        while fault.ends_at_once and time.perf_counter() < self._stable_at:
            rounds.append(self.round(batch))
        return rounds

    def disturb(self, batch: int, fault: Fault) -> Course:
        """Run rounds, with ``fault`` in the first one, until the stack has recovered.

        Raises:
            StackError: the fault had another effect, or the stack did not recover in time.
            StreamError: a stream broke.
        """
        processes = self._processes()
        num_lines = len(self._lines())
        strike = Strike(fault, processes[fault.service])
        with Watch(self._verifier_address(processes)) as watch, ThreadPoolExecutor(1) as pool:
            before = watch.look()
            if before.attachment is None:
                raise StackError(f"{fault.name}: the drafter is not attached before it")
            is_over = threading.Event()
            running = pool.submit(self._rounds, batch, strike, is_over)
            try:
                back, well_at = self._watch(watch, strike, before, running, num_lines)
            finally:
                is_over.set()
            rounds = running.result()
        assert strike.at is not None, "all is well only behind a fault"
        after = self._processes()
        restarted = [name for name in SERVICES if after[name] != processes[name]]
        self._stable_at = well_at + SETTLE_S
        return Course(rounds, strike.at, back, well_at, restarted, self._said(num_lines))

    def _rounds(self, batch: int, strike: Strike, is_over: threading.Event) -> list[list[StreamedCompletion]]:
        rounds = []
        while not is_over.is_set():
            rounds.append(self.round(batch, strike))
            if strike.at is None:
                raise StackError(f"a stream of {self.output_tokens} tokens is too short for a fault in its middle")
        return rounds

    def _watch(
        self,
        watch: Watch,
        strike: Strike,
        before: Sighting,
        running: Future[list[list[StreamedCompletion]]],
        num_lines: int,
    ) -> tuple[Return, float]:
        """Send the other signals of the fault when they are due, then wait for the recovery."""
        accepts = before.num_accepted >= LEAST_ACCEPTED_PER_DRAFT * before.num_drafts
        lost = before.attachment if strike.fault.said else None
        sightings: list[Sighting] = []
        deadline = time.perf_counter() + RECOVERY_TIMEOUT_S
        while True:
            time.sleep(POLL_S)
            if running.done():
                # Only an error ends it before ``is_over`` is set.
                running.result()
            if time.perf_counter() > deadline:
                said = "\n".join(self._lines()[num_lines:])
                raise StackError(f"{strike.fault.name}: not well after {RECOVERY_TIMEOUT_S:g} s:\n{said}")
            if not strike.is_done():
                continue
            sightings.append(watch.look())
            back = drafters_return(sightings, lost)
            drafts_as_before = back.drafted_at is not None and (back.accepted_at is not None or not accepts)
            if drafts_as_before and is_restored(strike.fault, self._said(num_lines)):
                return back, time.perf_counter()

    def _processes(self) -> dict[str, psutil.Process]:
        return {name: service(self.root, name) for name in SERVICES}

    def _verifier_address(self, processes: dict[str, psutil.Process]) -> str:
        words = processes["verifier"].cmdline()
        return words[words.index("--address") + 1]

    def _lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()

    def _said(self, num_lines: int) -> list[str]:
        return [line for line in self._lines()[num_lines:] if line.startswith("foretoken: ")]


def is_restored(fault: Fault, said: Sequence[str]) -> bool:
    """Return whether the supervisor reported every ended process as ready again.

    Raises:
        StackError: the fault ended no process, or it ended one and should not.
    """
    ends = [line for line in said if "; starting it again" in line]
    if not any(fault.said in line for line in ends) if fault.said else ends:
        raise StackError("\n".join([f"{fault.name}: that is not what happened:", *said]))
    return len(ends) == sum(" is ready again " in line for line in said)


class Strike:
    """Sends a fault's signals to a process: the first as tokens arrive, the others when due."""

    def __init__(self, fault: Fault, process: psutil.Process) -> None:
        self.fault = fault
        self.at: float | None = None
        self._process = process
        self._pending = list(fault.signals)

    def __call__(self, recordings: Sequence[Recording]) -> None:
        """Send the first signal once every stream has received ARRIVALS_BEFORE times."""
        if self.at is None and all(len(recording.times) >= ARRIVALS_BEFORE for recording in recordings):
            _, number = self._pending.pop(0)
            self.at = time.perf_counter()
            self._process.send_signal(number)

    def is_done(self) -> bool:
        """Send a due signal, and return whether all are sent. Not for the receiving thread."""
        if self.at is None:
            return False
        if self._pending and time.perf_counter() >= self.at + self._pending[0][0]:
            self._process.send_signal(self._pending.pop(0)[1])
        return not self._pending
