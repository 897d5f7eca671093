"""Find out how well a server speculated during a load, from whichever place it says so."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from foretoken.bench.client import Address, get
from foretoken.bench.completion import StreamError
from foretoken.bench.counters import Counters, by_label, counters, increase, tokens_per_step, total
from foretoken.bench.load import CompletedRequest

ACCEPTED_BY_POSITION = "spec_decode_num_accepted_tokens_per_pos"
SERVER_INFO = ("/server_info", "/get_server_info")


@dataclass(frozen=True, slots=True)
class DrafterAcceptance:
    """How many of one drafter's tokens were accepted."""

    name: str
    num_draft_tokens: int
    num_accepted_tokens: int


@dataclass(frozen=True, slots=True)
class Speculation:
    """How a load was decoded.

    Attributes:
        source: where the server says so.
        tokens_per_step: tokens that one decode step gave to a request.
        acceptance: for each position of a draft, the share of drafts that were accepted up to it;
            empty if the server does not say so. In a tree, a position is a depth.
        drafters: of each drafter that the server names.
    """

    source: str
    tokens_per_step: float
    acceptance: tuple[float, ...] = ()
    drafters: tuple[DrafterAcceptance, ...] = ()


def from_answers(answers: Sequence[CompletedRequest]) -> Speculation | None:
    """Return the sum of the answers' own figures (``metrics.speculative_decoding``).

    It is None if no answer has any.

    A step without a draft gives one token. vLLM does not count such steps.
    """
    found = [answer.speculation for answer in answers if answer.speculation]
    if not found or len(found) < len(answers):
        return None
    drafted, accepted, plain = (
        sum(each.get(key) or 0 for each in found)
        for key in ("num_spec_steps", "num_accepted_draft_tokens", "fallback_steps")
    )
    steps = drafted + plain
    histograms = (each.get("acceptance_histogram") or () for each in found)
    # Entry k counts the drafts with k accepted tokens.
    histogram = list(map(sum, zip_longest(*histograms, fillvalue=0)))
    acceptance = tuple(sum(histogram[k:]) / drafted for k in range(1, len(histogram))) if drafted else ()
    drafters: dict[str, list[int]] = {}
    for name, counts in (item for each in found for item in (each.get("drafters") or {}).items()):
        share = drafters.setdefault(name, [0, 0])
        share[0] += counts["num_draft_tokens"]
        share[1] += counts["num_accepted_draft_tokens"]
    shares = tuple(DrafterAcceptance(name, *counts) for name, counts in sorted(drafters.items()))
    return Speculation("answers", 1 + accepted / steps if steps else 1.0, acceptance, shares)


def from_counters(rises: Mapping[str, float]) -> Speculation | None:
    """Return the figures of counters that rose during the load (/metrics).

    They are None if nothing was drafted.
    """
    drafts = total(rises, "spec_decode_num_drafts")
    if not drafts:
        return None
    accepted = {int(position): value for position, value in by_label(rises, ACCEPTED_BY_POSITION, "position").items()}
    most = max(accepted, default=-1) + 1
    acceptance = tuple(accepted.get(position, 0.0) / drafts for position in range(most))
    taken = by_label(rises, "spec_decode_num_accepted_tokens", "drafter")
    shares = tuple(
        DrafterAcceptance(name, int(drafted), int(taken.get(name, 0)))
        for name, drafted in sorted(by_label(rises, "spec_decode_num_draft_tokens", "drafter").items())
    )
    return Speculation("/metrics", tokens_per_step(rises), acceptance, shares)


def from_server_info(info: Mapping[str, Any]) -> Speculation | None:
    """Return SGLang's mean of all steps since the server started (/server_info).

    It is None if the server has none.
    """
    states: Sequence[Mapping[str, Any]] = info.get("internal_states") or [{}]
    length = states[0].get("avg_spec_accept_length")
    if not isinstance(length, int | float) or not math.isfinite(length) or length <= 0:
        return None
    return Speculation("/server_info, since its start", float(length))


class WatchedServer:
    """Reads a server's figures before and after a load."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._before = self._counters()

    def speculation(self, answers: Sequence[CompletedRequest]) -> Speculation | None:
        """Return the load's figures, from the nearest place; None if the server says nothing."""
        if (own := from_answers(answers)) is not None:
            return own
        if (counted := from_counters(increase(self._before, self._counters()))) is not None:
            return counted
        return from_server_info(self._info())

    def _counters(self) -> Counters:
        """Return the counters; none from a server that has no /metrics, or another kind of them."""
        try:
            return counters(self._address)
        except (StreamError, ValueError):
            return {}

    def _info(self) -> dict[str, Any]:
        for path in SERVER_INFO:
            try:
                status, body = get(self._address, path)
                if status == 200 and isinstance(info := json.loads(body), dict):
                    return info
            except (StreamError, ValueError):
                continue
        return {}
