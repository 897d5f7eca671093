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
from foretoken.bench.counters import Counters, counters, increase, tokens_per_step, total
from foretoken.bench.load import Answer

ACCEPTED_BY_POSITION = "spec_decode_num_accepted_tokens_per_pos"
SERVER_INFO = ("/server_info", "/get_server_info")


@dataclass(frozen=True, slots=True)
class Speculation:
    """How a load was decoded.

    Attributes:
        source: where the server says so.
        tokens_per_step: tokens that one decode step gave to a request.
        acceptance: for each position of a draft, the share of drafts that were accepted up to it;
            empty if the server does not say so. In a tree, a position is a depth.
    """

    source: str
    tokens_per_step: float
    acceptance: tuple[float, ...] = ()


def from_answers(answers: Sequence[Answer]) -> Speculation | None:
    """Return the sum of the answers' own figures (``metrics.speculative_decoding``); None without any.

    A step without a draft gives one token. vLLM does not count such steps.
    """
    found = [answer.speculation for answer in answers if answer.speculation]
    if not found or len(found) < len(answers):
        return None
    drafted = sum(each.get("num_spec_steps", 0) for each in found)
    accepted = sum(each.get("num_accepted_draft_tokens", 0) for each in found)
    steps = drafted + sum(each.get("fallback_steps", 0) for each in found)
    histograms = (each.get("acceptance_histogram", ()) for each in found)
    # Entry k counts the drafts of which k tokens were accepted.
    histogram = list(map(sum, zip_longest(*histograms, fillvalue=0)))
    acceptance = tuple(sum(histogram[k:]) / drafted for k in range(1, len(histogram))) if drafted else ()
    return Speculation("answers", 1 + accepted / steps if steps else 1.0, acceptance)


def from_counters(rises: Mapping[str, float]) -> Speculation | None:
    """Return the figures of counters that rose during the load (/metrics); None if nothing was drafted."""
    drafts = total(rises, "spec_decode_num_drafts")
    if not drafts:
        return None
    accepted: dict[int, float] = {}
    for key, value in rises.items():
        name, _, labels = key.partition("{")
        if name == ACCEPTED_BY_POSITION:
            position = int(dict(label.split("=") for label in labels.rstrip("}").split(","))["position"])
            accepted[position] = accepted.get(position, 0.0) + value
    most = max(accepted, default=-1) + 1
    acceptance = tuple(accepted.get(position, 0.0) / drafts for position in range(most))
    return Speculation("/metrics", tokens_per_step(rises), acceptance)


def from_server_info(info: Mapping[str, Any]) -> Speculation | None:
    """Return SGLang's mean of all steps since the server started (/server_info); None if it has none."""
    states: Sequence[Mapping[str, Any]] = info.get("internal_states") or [{}]
    length = states[0].get("avg_spec_accept_length")
    if not isinstance(length, int | float) or not math.isfinite(length) or length <= 0:
        return None
    return Speculation("/server_info, since its start", float(length))


class Watched:
    """Reads a server's figures before and after a load."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._before = self._counters()

    def speculation(self, answers: Sequence[Answer]) -> Speculation | None:
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
