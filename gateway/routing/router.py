"""Decide which verifier takes a request.

It is the one that has the request's prefix, unless that one has too much load.

No I/O and no clock, so that the simulator of ``benchmarks/routing`` runs the same
code. Gateways agree because they hash alike; what each remembers are estimates of popularity, which
another gateway makes from its own requests.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from gateway.routing.defaults import DEFAULT_LOAD_BOUND
from gateway.routing.fleet import Fleet, Mask
from gateway.routing.popularity import Popularity

# A prefix gets a verifier for each 16th of the mean load that its requests make, or each sequence.
PARTS_OF_MEAN = 16
# A prefix that needs more verifiers gets so many times what it needs.
HEADROOM = 1.25
# Up to this share of its rows, or two sequences, a verifier counts as free: a step of so few rows
# takes about as long as one of a single row.
FREE_SHARE, LEAST_FREE = 1 / 64, 2.0
# The load of verifiers with equal shares differs by chance, by about the root of its mean: above
# the bound by twice that, it is no chance.
CHANCE = 2.0
# Decisions over which load is smoothed, for each sequence in the fleet: so many lifetimes.
LIFETIMES = 8
# Above this share of used KV blocks a verifier would soon preempt.
FULL = 0.95
# Requests of a period of popularity, at least and for each verifier.
LEAST_PERIOD, PERIOD_PER_VERIFIER = 1024, 128
_MASK_64 = (1 << 64) - 1


class RoutingReason(StrEnum):
    """Why a verifier was chosen."""

    # It is the first for the prompt's prefix.
    AFFINITY = "affinity"
    # Those before it for the prefix have too much load, or several have it and this one the least.
    SPREAD = "spread"
    # It has the least load: the prompt has no prefix to go by, or all are full.
    LOAD = "load"
    # No other could take it.
    ONLY = "only"


@dataclass(frozen=True, slots=True)
class Decision:
    """The number of the verifier in the fleet, and why."""

    number: int
    reason: RoutingReason


class Router:
    """Routes requests over a fleet.

    The caller counts the sequences that it sends in the fleet's load.

    Each key's verifiers stand in an order of their own (rendezvous hashing), and the first whose
    load is within ``load_bound`` of the mean takes the request (after consistent hashing with
    bounded loads; Mirrokni, Thorup, Zadimoghaddam, 2016, arXiv 1608.01350). The bound is at most
    what the verifier runs at once, while the fleet can run all requests.

    The key is the shortest prefix whose requests fit on one verifier. A prefix with more requests,
    such as a system prompt, gets as many verifiers as its load needs, the first of its order. A
    longer prefix chooses among these. So a system prompt is computed on few verifiers, and each
    conversation that begins with it stays on one.
    """

    def __init__(self, fleet: Fleet, *, load_bound: float = DEFAULT_LOAD_BOUND) -> None:
        """``load_bound``: most load of a verifier of a prefix, as a multiple of the mean; > 1."""
        self._fleet = fleet
        self._load_bound = load_bound
        self._popularity = Popularity()
        self._popular: dict[int, _PopularPrefix] = {}
        self._num_unkeyed = itertools.count()

    def route(self, keys: Iterable[int], *, model: str = "", num_new: int = 1) -> Decision | None:
        """Return the verifier for a request; None if none can take it.

        Args:
            keys: of the prompt's prefixes, shortest first (``prefix_keys``). Read as far as needed.
            model: the fingerprint that the verifier must have; empty: any.
            num_new: sequences that its queue must have room for; 0 for a resume.
        """
        fleet = self._fleet
        open_ = fleet.open_for(model, num_new)
        num_open = int(np.count_nonzero(open_))
        if num_open == 0:
            return None
        if num_open == 1:
            return Decision(int(open_.argmax()), RoutingReason.ONLY)
        total = float(fleet.load @ open_)
        fleet.remember(1 / (LIFETIMES * total + num_open))
        key, sets, is_shared = self._narrow(keys, num_open, total)
        if key is None:
            return self._least_loaded(open_, RoutingReason.LOAD)
        below = open_ & self._is_below_bound(total + num_new, float(fleet.rows @ open_))
        members = next(found for found in (group & open_ for group in reversed(sets)) if found.any())
        if is_shared and (members & below).any():
            return self._least_loaded(members & below, RoutingReason.SPREAD)
        scores = fleet.scores(key)
        first = _best(scores, members)
        if below[first]:
            return Decision(first, RoutingReason.AFFINITY)
        for group in reversed(sets):
            if (members := group & below).any():
                return Decision(_best(scores, members), RoutingReason.SPREAD)
        return self._least_loaded(open_, RoutingReason.LOAD)

    def _narrow(self, keys: Iterable[int], num_open: int, total: float) -> tuple[int | None, list[Mask], bool]:
        """Count a request's prefixes until one fits on one verifier.

        Returns the last prefix's key (None without a prefix), the sets of verifiers of the popular
        ones (the first has all), and whether all prefixes are popular: all of the last set have the
        whole prompt.
        """
        fleet, popularity = self._fleet, self._popularity
        if popularity.begin(max(LEAST_PERIOD, PERIOD_PER_VERIFIER * num_open)):
            self._popular = {key: popular for key, popular in self._popular.items() if popularity.knows(key)}
        # What one verifier has for one prefix at most, in sequences.
        part = max(total / num_open / PARTS_OF_MEAN, 1.0)
        sets, size = [fleet.is_open], num_open
        key = None
        for key in keys:
            wanted = popularity.seen(key) * total / part
            popular = self._popular.get(key)
            if popular is None:
                if wanted <= 1:
                    return key, sets, False
                popular = self._popular[key] = _PopularPrefix()
            width = popular.resize(wanted)
            if width <= 1:
                del self._popular[key]
                return key, sets, False
            if width < size:
                sets.append(popular.members(fleet, key, sets[-1]))
                size = width
        return key, sets, True

    def _is_below_bound(self, total: float, all_rows: float) -> Mask:
        """Return which verifiers may take a request of a prefix that is theirs.

        The load that is usual must be within the bound. A load that is above it by chance moves no
        conversation, and one that is below the mean is never too much.
        """
        fleet = self._fleet
        mean = fleet.rows * (total / all_rows)
        free = np.maximum(FREE_SHARE * fleet.rows, LEAST_FREE)
        bound = self._load_bound * mean
        if total <= all_rows:
            # While other verifiers are free, waiting is no use.
            bound = np.minimum(bound, fleet.rows)
        bound = np.maximum(bound, free)
        is_usual = (fleet.usual < bound) | (fleet.load < mean)
        return is_usual & (fleet.load < bound + CHANCE * np.sqrt(mean)) & (fleet.fill < FULL)

    def _least_loaded(self, members: Mask, reason: RoutingReason) -> Decision:
        """Return the member with the least load for its rows; there must be a member."""
        fleet = self._fleet
        use = np.where(members, fleet.load / np.maximum(fleet.rows, 1), np.inf)
        ties = use == use.min()
        nonce = next(self._num_unkeyed) * 0x9E3779B97F4A7C15 & _MASK_64
        return Decision(_best(fleet.scores(nonce), ties), reason)


def _best(scores: npt.NDArray[np.uint64], members: Mask) -> int:
    """Return the member with the highest score; there must be a member."""
    numbers = np.flatnonzero(members)
    return int(numbers[scores[numbers].argmax()])


class _PopularPrefix:
    """How many verifiers a popular prefix has, and which."""

    def __init__(self) -> None:
        self._width = 1
        self._members: Mask | None = None
        self._parent: Mask | None = None
        self._version = -1

    def resize(self, wanted: float) -> int:
        """Return how many verifiers it has, for a load of ``wanted`` verifiers.

        It gets more than it needs, and loses some only when half of them would do: a load that
        wavers moves no conversation.
        """
        if not self._width / 2 < wanted <= self._width:
            self._width = max(math.ceil(HEADROOM * wanted), 1) if wanted > 1 else 1
            self._members = None
        return self._width

    def members(self, fleet: Fleet, key: int, parent: Mask) -> Mask:
        """Return its verifiers, the key's first among ``parent``, which has more."""
        if self._members is None or self._parent is not parent or self._version != fleet.version:
            numbers = np.flatnonzero(parent)
            scores = fleet.scores(key)[numbers]
            chosen = np.argpartition(scores, len(numbers) - self._width)[-self._width :]
            self._members = np.zeros(len(parent), np.bool_)
            self._members[numbers[chosen]] = True
            self._parent, self._version = parent, fleet.version
        return self._members
