"""A drafter inside the verifier's own process, as the verifier sees it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from foretoken.drafter import Drafter
from foretoken.drafting import DrafterNeeds, TargetInfo
from foretoken.models.target_weights import TargetWeights
from foretoken.transports.transport import DraftTransport, InProcessTransport, TransportCounters, probe_request
from verifier_svc.drafters.device_offer import ResidentOffer
from verifier_svc.drafters.source import GAUGES_EVERY_S, CircuitBreaker, State, TransportName, checked_gauges

logger = logging.getLogger(__name__)


class InProcessClient:
    """A ``DraftSource`` around a drafter in this process. Once the engine runs, its thread makes all calls to it."""

    # No one else reaches it.
    address = ""

    def __init__(
        self,
        name: str,
        drafter: Drafter,
        target: TargetInfo,
        epoch: int,
        *,
        weights: TargetWeights | None = None,
        resident: ResidentOffer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``drafter``: built by the composition root. ``clock``: seconds, for the backoff after its failures.

        ``weights``: of the target, for a drafter that can read them as they are. ``resident``: for one on its device.
        """
        self._name = name
        self._drafter = drafter
        self._target = target
        self._epoch = epoch
        self._weights = weights
        self._offer = resident
        self._needs = DrafterNeeds()
        self._clock = clock
        self._counters = TransportCounters()
        self._breaker = CircuitBreaker()
        self._transport: InProcessTransport | None = None
        self._state: State = "connecting"
        self._reason = ""
        self._num_attaches = 0
        self._gauges: dict[str, float] = {}
        self._gauges_at = 0.0
        self._retry_at: float | None = 0.0

    @property
    def name(self) -> str:
        return self._name

    @property
    def algorithm(self) -> str:
        return self._drafter.algorithm

    @property
    def needs(self) -> DrafterNeeds:
        return self._needs

    @property
    def transport(self) -> DraftTransport | None:
        """Attaches where it is time to."""
        if self._transport is None and self._retry_at is not None and self._clock() >= self._retry_at:
            self._attach()
        return self._transport

    @property
    def transport_name(self) -> TransportName:
        return "in-process"

    @property
    def state(self) -> State:
        return self._state

    @property
    def reason(self) -> str:
        return self._reason

    @property
    def num_attaches(self) -> int:
        return self._num_attaches

    @property
    def num_rejected(self) -> int:
        return self._counters.num_rejected

    @property
    def gauges(self) -> Mapping[str, float]:
        """As the engine thread saw them after a draft; without drafts they stay as they are."""
        return self._gauges

    def start(self) -> None:
        """Attach, once and before the engine runs: no request waits for what it loads."""
        if self._state == "connecting":
            self._attach()

    def close(self) -> None:
        self._retry_at = None
        self._transport = None

    def report_failure(self, reason: str) -> None:
        if self._transport is None:
            return
        if self._breaker.failure() or not self._transport.is_open():
            self._break(reason)

    def report_success(self) -> None:
        self._breaker.success()
        if self._clock() >= self._gauges_at:
            self._look_at_gauges()

    def _look_at_gauges(self) -> None:
        self._gauges_at = self._clock() + GAUGES_EVERY_S
        try:
            self._gauges = checked_gauges(self._drafter.gauges())
        except Exception as error:
            self._break(f"no gauges: {error!r}")

    def _attach(self) -> None:
        try:
            self._needs = self._drafter.needs(self._target)
            self._drafter.attach(self._target, self._weights if self._needs.weights else None)
            resident = None
            if self._offer is not None:
                resident = self._offer.in_process(self._drafter, self._target, self._needs)
            transport = InProcessTransport(self._drafter, self._counters, resident)
            transport.post(probe_request(self._epoch, 0))
            transport.receive(0)
        except Exception as error:
            self._break(f"attach failed: {error!r}")
            return
        self._transport = transport
        self._num_attaches += 1
        self._state, self._reason = "attached", ""
        logger.info("drafter %s (%s) attached in-process", self._name, self.algorithm)
        self._look_at_gauges()

    def _break(self, reason: str) -> None:
        self._transport = None
        self._gauges = {}
        self._state, self._reason = "broken", reason
        self._retry_at = self._clock() + self._breaker.next_backoff_s()
        logger.warning("drafter %s is not attached in-process: %s; tried again by later steps", self._name, reason)
