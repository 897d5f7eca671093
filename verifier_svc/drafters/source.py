"""Define what the speculator needs of a drafter wherever it runs.

This also tells how long a failing drafter is left alone.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Literal

from foretoken.drafting import DrafterNeeds
from foretoken.tracing import TraceContext
from foretoken.transports.transport import DraftTransport, TransportCounters

State = Literal["connecting", "attached", "broken", "detached"]
TransportName = Literal["shared-memory", "grpc", "in-process"]

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
# It costs next to nothing to find that nobody is there, and while a drafter
# restarts there are no drafts.
MAX_ABSENT_BACKOFF_S = 0.5
# Failures in a row that open the circuit: the drafter is detached, and
# attached again after the backoff.
MAX_CONSECUTIVE_FAILURES = 3
# Drafts after which an attachment counts as a success and the backoff starts over: one that breaks
# at each first draft is not tried ten times a second.
MIN_DRAFTS_OF_SUCCESS = 10
# Between two looks at a drafter's own gauges.
GAUGES_EVERY_S = 3.0
# Taken of one drafter at most: they become names of metrics.
MAX_GAUGES = 64
_GAUGE_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


class DraftSource(ABC):
    """A drafter for the speculator, wherever it runs.

    Used by the engine thread; figures may be read by any.

    Attributes:
        address: where the drafter listens; empty: in this process.
        transport_name: of the transport in use, or to be used.
        algorithm: NGRAM, EAGLE3, ...; empty before the first attachment.
        needs: what its requests must carry; of the last attachment.
        state: ``broken``: refused by the drafter or by the self-test, or given up for its failures.
        reason: why there is no attachment, as far as is known; empty while there is one.
        num_attaches: grows with each attachment; a new one knows nothing of any sequence.
        is_attaching: whether the drafter has answered and is being attached. It may compile its
            kernels for that.
        is_preparing: whether the drafter still prepares for usual requests while it is idle.
        gauges: the drafter's own, at most MAX_GAUGES, as of a few seconds ago;
            none while there is no attachment.
    """

    def __init__(self, name: str, address: str, transport_name: TransportName) -> None:
        self.name = name
        self.address = address
        self.transport_name = transport_name
        self.algorithm = ""
        self.needs = DrafterNeeds()
        self.state: State = "connecting"
        self.reason = ""
        self.num_attaches = 0
        self.is_attaching = False
        self.is_preparing = False
        self.gauges: Mapping[str, float] = {}
        self._transport: DraftTransport | None = None
        self._counters = TransportCounters()
        self._breaker = CircuitBreaker()

    @property
    def transport(self) -> DraftTransport | None:
        """What to draft through now; None while there is no attachment."""
        return self._transport

    @property
    def num_rejected(self) -> int:
        """Return how many drafts were late or malformed, or never asked for.

        A draft is not asked for if the drafter was too late with others.
        """
        return self._counters.num_rejected

    @abstractmethod
    def report_failure(self, reason: str) -> None:
        """Record that a draft was late or of no use; several in a row detach the drafter."""

    @abstractmethod
    def report_success(self) -> None:
        """Record that a draft was sound."""

    @abstractmethod
    def trace_sequence(self, batch_slot: int, generation: int, parent: TraceContext) -> None:
        """Let the drafter record a span of its work for a sequence that has ended.

        Any thread may call it.
        """

    @abstractmethod
    def start(self) -> None:
        """Attach, or begin to in the background."""

    @abstractmethod
    def close(self) -> None:
        """Detach for good. Idempotent."""


def checked_gauges(gauges: Mapping[str, float]) -> dict[str, float]:
    """Return the gauges that can be metrics, at most MAX_GAUGES."""
    named = [(name, float(value)) for name, value in gauges.items() if _GAUGE_NAME.fullmatch(name)]
    return dict(named[:MAX_GAUGES])


class CircuitBreaker:
    """Counts failures in a row and says how long to stay away.

    Used under its owner's lock or thread.
    """

    def __init__(self) -> None:
        self._num_consecutive = 0
        self._num_good = 0
        self._backoff_s = FIRST_BACKOFF_S

    def failure(self) -> bool:
        """Count a failure; return whether the circuit opens."""
        self._num_consecutive += 1
        return self._num_consecutive >= MAX_CONSECUTIVE_FAILURES

    def success(self) -> None:
        self._num_consecutive = 0
        self._num_good += 1

    def next_backoff_s(self, *, is_absent: bool = False) -> float:
        """Return the seconds before the next attempt.

        They double with each attempt until one succeeds.

        ``is_absent``: the drafter could not be reached or is not ready yet, which
        is no fault of its attachments.
        """
        if self._num_good >= MIN_DRAFTS_OF_SUCCESS:
            self._backoff_s = FIRST_BACKOFF_S
        self._num_consecutive = self._num_good = 0
        most_s = MAX_ABSENT_BACKOFF_S if is_absent else MAX_BACKOFF_S
        backoff_s = min(self._backoff_s, most_s)
        self._backoff_s = max(self._backoff_s, min(2 * backoff_s, most_s))
        return backoff_s
