"""A drafter inside the verifier's own process, as the verifier sees it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from foretoken.drafter import Drafter
from foretoken.drafting import DrafterNeeds, TargetInfo
from foretoken.models.target_weights import TargetWeights
from foretoken.tracing import TraceContext
from foretoken.transports.in_process import InProcessTransport
from foretoken.transports.transport import DraftTransport, probe_request
from verifier_svc.drafters.device_offer import DeviceOffer
from verifier_svc.drafters.source import GAUGES_EVERY_S, DraftSource, checked_gauges

logger = logging.getLogger(__name__)


class InProcessClient(DraftSource):
    """A ``DraftSource`` around a drafter in this process.

    Once the engine runs, its thread and the transport's make all calls to it, one at a time.
    """

    def __init__(
        self,
        name: str,
        drafter: Drafter,
        target: TargetInfo,
        epoch: int,
        *,
        weights: TargetWeights | None = None,
        offer: DeviceOffer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``drafter``: built by the composition root.

        ``clock``: seconds, for the backoff after its failures.

        ``weights``: of the target, for a drafter that can read them as they are.
        ``offer``: for one on its device.
        """
        # No one else reaches it: it has no address.
        super().__init__(name, "", "in-process")
        self.algorithm = drafter.algorithm
        self._drafter = drafter
        self._target = target
        self._epoch = epoch
        self._weights = weights
        self._offer = offer
        self._clock = clock
        self._gauges_at = 0.0
        self._retry_at: float | None = 0.0

    @property
    def transport(self) -> DraftTransport | None:
        """Attaches where it is time to."""
        if self._transport is None and self._retry_at is not None and self._clock() >= self._retry_at:
            self._attach()
        return self._transport

    def start(self) -> None:
        """Attach, once and before the engine runs: no request waits for what it loads."""
        if self.state == "connecting":
            self._attach()

    def close(self) -> None:
        self._retry_at = None
        self._drop_transport()

    def report_failure(self, reason: str) -> None:
        if self._transport is None:
            return
        if self._breaker.failure() or not self._transport.is_open():
            self._break(reason)

    def report_success(self) -> None:
        self._breaker.success()
        if self._clock() >= self._gauges_at:
            self._look_at_gauges()

    def trace_sequence(self, batch_slot: int, generation: int, parent: TraceContext) -> None:
        """Do nothing: a drafter in the verifier's process has no spans beside the verifier's."""

    def _look_at_gauges(self) -> None:
        """Read the gauges, on the engine thread after a draft.

        Without drafts they stay as they are.
        """
        self._gauges_at = self._clock() + GAUGES_EVERY_S
        try:
            self.gauges = checked_gauges(self._drafter.gauges())
        except Exception as error:
            self._break(f"no gauges: {error!r}")

    def _attach(self) -> None:
        try:
            self.needs = self._drafter.needs(self._target)
            self._drafter.attach(self._target, self._weights if self.needs.weights else None)
            memory = None
            if self._offer is not None:
                memory = self._offer.in_process(self._drafter, self._target, self.needs)
            # A model computes on the engine's thread, whose device and streams it uses.
            has_thread = self.needs == DrafterNeeds()
            transport = InProcessTransport(self._drafter, self._counters, memory, has_thread=has_thread)
            transport.post(probe_request(self._epoch, 0))
            transport.receive(0)
        except Exception as error:
            self._break(f"attach failed: {error!r}")
            return
        self._transport = transport
        self.num_attaches += 1
        self.state, self.reason = "attached", ""
        logger.info("drafter %s (%s) attached in-process", self.name, self.algorithm)
        self._look_at_gauges()

    def _drop_transport(self) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    def _break(self, reason: str) -> None:
        self._drop_transport()
        self.gauges = {}
        self.state, self.reason = "broken", reason
        self._retry_at = self._clock() + self._breaker.next_backoff_s()
        logger.warning("drafter %s is not attached in-process: %s; tried again by later steps", self.name, reason)
