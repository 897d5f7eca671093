"""Gateways and verifiers that exist in numbers only, with the gateways' own routing code.

Each gateway has a router and sees what a real one sees: its own sequences at once, and those of
other gateways as of a verifier's last message, which is a step's or a heartbeat.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np

from benchmarks.routing.modelled_verifier import Costs, ModelledRequest, ModelledVerifier, SharedCores
from benchmarks.routing.trace import VOCAB_SIZE, Request, token_ids
from gateway.routing.defaults import DEFAULT_LOAD_BOUND
from gateway.routing.fleet import Fleet
from gateway.routing.prefix import prefix_keys
from gateway.routing.router import Router

HEARTBEAT_S = 1.0
MODEL = "model"


@dataclass(frozen=True)
class Death:
    """Verifiers that die at the same time, without a word; ``noticed_s`` later gateways know."""

    at_s: float
    numbers: frozenset[int]
    noticed_s: float = 0.0


@dataclass
class Run:
    """What happened: the requests in the order of their ends, and what decided where they ran."""

    finished: list[ModelledRequest] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    ends_s: float = 0.0


class _Gateway:
    """One gateway: its router, and what it knows of each verifier."""

    def __init__(self, addresses: Items[str], rows: int, load_bound: float) -> None:
        self.fleet = Fleet()
        for address in addresses:
            number = self.fleet.add(address)
            self.fleet.open(number, MODEL)
            self.fleet.update(number, load=0, rows=rows)
        self.router = Router(self.fleet, load_bound=load_bound)
        self.num_own = [0] * len(addresses)
        self.num_others = [0] * len(addresses)
        self.heard_s = [0.0] * len(addresses)
        self._rows = rows

    def hear(self, number: int, verifier: ModelledVerifier, now: float, *, is_step: bool) -> None:
        """Read a verifier's message, if it sends this gateway one now."""
        if (is_step and self.num_own[number]) or now >= self.heard_s[number] + HEARTBEAT_S:
            self.heard_s[number] = now
            self.num_others[number] = max(verifier.num_sequences - self.num_own[number], 0)
        self.update(number, verifier.fill)

    def count(self, number: int, change: int) -> None:
        self.num_own[number] += change
        self.fleet.load[number] += change

    def update(self, number: int, fill: float) -> None:
        load = self.num_own[number] + self.num_others[number]
        self.fleet.update(number, load=load, rows=self._rows, fill=fill)


def made_up_addresses(count: int) -> list[str]:
    """Return addresses in a private network."""
    return [f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}:50061" for n in range(count)]


class ModelledFleet:
    """Replays a trace over verifiers at ``addresses`` behind ``num_gateways`` gateways."""

    def __init__(
        self,
        costs: Costs,
        addresses: Items[str],
        block_tokens: int,
        *,
        vocab_size: int = VOCAB_SIZE,
        num_gateways: int = 1,
        load_bound: float = DEFAULT_LOAD_BOUND,
        by_load: bool = False,
        cores: SharedCores | None = None,
    ) -> None:
        """
        Args:
            by_load: leave prefixes out of account, for comparison.
            cores: that all verifiers share; None: each has its own.
        """
        cores = cores or SharedCores()
        self.verifiers = [ModelledVerifier(costs, block_tokens, cores) for _ in addresses]
        self._block_tokens = block_tokens
        self._vocab_size = vocab_size
        self._by_load = by_load
        self._gateways = [_Gateway(addresses, costs.rows, load_bound) for _ in range(num_gateways)]
        # Planned changes: time, and a verifier's number. An entry counts only if it is still so.
        self._agenda: list[tuple[float, int]] = []
        self._is_dead = [False] * len(addresses)
        # What waits until a death is noticed, and where.
        self._lost: list[tuple[int, ModelledRequest]] = []
        self._run = Run()

    def replay(self, requests: Iterable[Request], death: Death | None = None, seed: int = 1) -> Run:
        """Run a trace to the end of its last request.

        ``seed``: which gateway each request comes to.
        """
        random = np.random.default_rng(seed)
        happenings = []
        if death is not None:
            happenings = [(death.at_s, self._die), (death.at_s + death.noticed_s, self._notice)]
        for request in requests:
            while happenings and happenings[0][0] <= request.at_s:
                self._happen(*happenings.pop(0), death)
            self._advance(request.at_s)
            gateway = int(random.integers(len(self._gateways)))
            self._place(ModelledRequest(request, gateway), request.at_s)
        for at_s, happen in happenings:
            self._happen(at_s, happen, death)
        self._advance(math.inf)
        return self._run

    def _happen(self, at_s: float, happen: Callable[[float, Death], None], death: Death | None) -> None:
        assert death is not None
        self._advance(at_s)
        happen(at_s, death)

    def _die(self, now: float, death: Death) -> None:
        for number in death.numbers:
            self._is_dead[number] = True
            for sequence in self.verifiers[number].die(now):
                sequence.lost_at = now
                self._lost.append((number, sequence))

    def _notice(self, now: float, death: Death) -> None:
        """Send elsewhere what was lost, and what gateways sent to the dead meanwhile."""
        lost, self._lost = self._lost, []
        for gateway in self._gateways:
            for number in death.numbers:
                gateway.fleet.close(number)
        for number, sequence in lost:
            self._gateways[sequence.gateway].count(number, -1)
            self._place(sequence, now)

    def _advance(self, until_s: float) -> None:
        """Let everything happen that is planned before ``until_s``."""
        while self._agenda and self._agenda[0][0] <= until_s:
            at_s, number = heapq.heappop(self._agenda)
            verifier = self.verifiers[number]
            if at_s != verifier.next_s:
                continue
            finished = verifier.advance(at_s)
            for sequence in finished:
                self._gateways[sequence.gateway].count(number, -1)
                self._run.finished.append(sequence)
                self._run.ends_s = at_s
            for gateway in self._gateways:
                gateway.hear(number, verifier, at_s, is_step=True)
            self._plan(number)

    def _plan(self, number: int) -> None:
        if (next_s := self.verifiers[number].next_s) < math.inf:
            heapq.heappush(self._agenda, (next_s, number))

    def _place(self, sequence: ModelledRequest, now: float) -> None:
        gateway = self._gateways[sequence.gateway]
        tokens = [] if self._by_load else token_ids(sequence.request, self._block_tokens, self._vocab_size)
        decision = gateway.router.route(prefix_keys(tokens, None), model=MODEL)
        assert decision is not None, "no verifier is left"
        self._run.reasons[decision.reason.value] += 1
        gateway.count(decision.number, 1)
        if self._is_dead[decision.number]:
            self._lost.append((decision.number, sequence))
            return
        self.verifiers[decision.number].submit(sequence, now)
        self._plan(decision.number)
