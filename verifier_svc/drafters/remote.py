"""A drafter as the verifier sees it: attached, on its way back, or refused.

The engine thread never waits here.

Each client has one thread that attaches, proves the transport, watches for the drafter's end and
attaches again, for ever. It sleeps in between. Whether drafts are any good is the engine's to
judge: it reports, this decides.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import Any

import grpc

from foretoken import rpc
from foretoken.drafting import TargetInfo
from foretoken.errors import ForetokenError, PreconditionError, UnavailableError
from foretoken.links import NO_CREDENTIALS, LinkCredentials
from foretoken.lost_context import exit_if_context_lost
from foretoken.tracing import TraceContext
from foretoken.transports.shared_weights import SharedWeights
from foretoken.transports.transport import DEFAULT_TOKEN_CAPACITY, QueuedTransport, TransportClosedError
from protos import drafter_pb2, drafter_pb2_grpc
from verifier_svc.config import DrafterEndpoint
from verifier_svc.drafters.device_offer import DeviceOffer
from verifier_svc.drafters.handshake import Handshake, Terms
from verifier_svc.drafters.interrupts import Interrupts
from verifier_svc.drafters.source import (
    GAUGES_EVERY_S,
    MAX_CONSECUTIVE_FAILURES,
    DraftSource,
    State,
    TransportName,
    checked_gauges,
)

logger = logging.getLogger(__name__)

INFO_TIMEOUT_S = 2.0
# Between two looks at a drafter that prepares: readiness may wait for it.
PREPARING_LOOK_S = 0.25
# A drafter that starts with the verifier compiles and loads for at most so long. Until then its
# absence is no warning.
STARTS_WITHIN_S = 60.0


class DrafterClient(DraftSource):
    """A ``DraftSource`` in another process, by arena or stream as its endpoint says."""

    def __init__(
        self,
        endpoint: DrafterEndpoint,
        target: TargetInfo,
        epoch: int,
        *,
        token_capacity: int = DEFAULT_TOKEN_CAPACITY,
        spin_us: int | None = None,
        weights: SharedWeights | None = None,
        offer: DeviceOffer | None = None,
        credentials: LinkCredentials = NO_CREDENTIALS,
    ) -> None:
        """See Terms. Nothing happens before ``start``."""
        socket_path = rpc.unix_path(endpoint.address)
        # On one host the arena, unless the endpoint says otherwise. There is no falling back.
        by_address: TransportName = "grpc" if socket_path is None else "shared-memory"
        transport_name = by_address if endpoint.transport == "auto" else endpoint.transport
        super().__init__(endpoint.name, endpoint.address, transport_name)
        terms = Terms(target, epoch, self._counters, token_capacity, spin_us, weights, offer)
        self._epoch = epoch
        self._credentials = credentials
        self._interrupts = Interrupts()
        self._handshake = Handshake(terms, self._interrupts, socket_path and socket_path.parent)
        self._outages = OutageLog(endpoint.name, endpoint.address, transport_name)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        # Whether the drafter answered the current attempt.
        self._is_ready = False
        # The calls of the attachment, if there is one.
        self._stub: Any = None

    def start(self) -> None:
        """Begin to attach, in the background."""
        self._thread = threading.Thread(target=self._run, name=f"drafter-{self.name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._interrupts.is_closing:
            return
        self._interrupts.close()
        if self._thread is not None:
            self._thread.join()
        self._interrupts.release()

    def report_failure(self, reason: str) -> None:
        with self._lock:
            if self._transport is not None and self._breaker.failure():
                self.state = "broken"
                self._transport = None
                self.reason = f"{MAX_CONSECUTIVE_FAILURES} failures in a row, the last: {reason}"
                self._interrupts.open_circuit(self.reason)

    def report_success(self) -> None:
        with self._lock:
            self._breaker.success()
            self._outages.forget_fault()

    def trace_sequence(self, batch_slot: int, generation: int, parent: TraceContext) -> None:
        stub = self._stub
        if stub is None:
            return
        request = drafter_pb2.TraceSequenceRequest(
            epoch=self._epoch, slot=batch_slot, generation=generation, traceparent=parent.traceparent
        )
        if parent.tracestate is not None:
            request.tracestate = parent.tracestate
        try:
            call = stub.TraceSequence.future(request, timeout=INFO_TIMEOUT_S)
        except ValueError as error:
            # The channel was closed just now.
            logger.debug("drafter %s makes no span: %s", self.name, error)
        else:
            call.add_done_callback(self._log_no_span)

    def _log_no_span(self, call: Any) -> None:
        if call.code() is not grpc.StatusCode.OK:
            logger.debug("drafter %s makes no span: %s", self.name, call.details())

    def _run(self) -> None:
        """Attach, watch, attach again, until closed."""
        while not self._interrupts.is_closing:
            is_absent = self._is_ready = False
            try:
                with contextlib.ExitStack() as attachment:
                    transport, stub = self._attach(attachment)
                    self._watch(transport, stub)
            except (ForetokenError, TransportClosedError, OSError) as error:
                # Not there yet is the normal life of a drafter; any other refusal is a fault.
                outlook = (
                    "until drafter or target is another" if isinstance(error, PreconditionError) else "until it is"
                )
                is_unavailable = isinstance(error, UnavailableError)
                is_absent = is_unavailable and not self._is_ready
                self._lost("connecting" if is_unavailable else "broken", str(error), outlook)
                # Where no request runs, a drafter's fault that was ours too is found here first.
                exit_if_context_lost()
            if not self._interrupts.is_closing:
                with self._lock:
                    backoff_s = self._breaker.next_backoff_s(is_absent=is_absent)
                self._interrupts.sleep(backoff_s)

    def _watch(self, transport: QueuedTransport, stub: Any) -> None:
        """Block until the drafter is gone, the circuit opens, or the client is closed.

        Look at it meanwhile.
        """
        waiter = self._interrupts.waiter(transport.fileno())
        look_at = time.monotonic()
        while not self._interrupts.is_closing:
            ready = waiter.wait(max(look_at - time.monotonic(), 0.0))
            if transport.fileno() in ready:
                self._lost("connecting", "the drafter is gone")
                return
            if not ready:
                self._look(stub)
                look_at = time.monotonic() + (PREPARING_LOOK_S if self.is_preparing else GAUGES_EVERY_S)
            self._interrupts.take()
            # A call waits on the same doorbell: what was rung meanwhile is not lost.
            if reason := self._interrupts.close_circuit():
                self._lost("broken", reason)
                return

    def _look(self, stub: Any) -> None:
        """Ask the drafter how it is.

        Old answers stay if it gives none: its drafts decide whether it is of use.
        """
        try:
            info = self._interrupts.result(stub.GetInfo.future(drafter_pb2.GetInfoRequest(), timeout=INFO_TIMEOUT_S))
        except ForetokenError as error:
            logger.debug("drafter %s does not say how it is: %s", self.name, error)
        else:
            self.gauges, self.is_preparing = checked_gauges(info.gauges), info.preparing

    def _lost(self, state: State, reason: str, outlook: str = "until it is") -> None:
        self.gauges, self.is_attaching, self.is_preparing = {}, False, False
        with self._lock:
            # Readers do not lock: whoever finds no transport finds the state that says why.
            self.state, self.reason = state, reason
            self._transport = self._stub = None
        if not self._interrupts.is_closing:
            self._outages.lost(state, reason, outlook)

    def _attach(self, undo: contextlib.ExitStack) -> tuple[QueuedTransport, Any]:
        """Attach; return the transport, proved by its self-test, and the stub of the calls.

        ``undo`` closes both.
        """
        channel = rpc.sync_channel(self.address, self._credentials)
        undo.callback(channel.close)
        stub = drafter_pb2_grpc.DrafterServiceStub(channel)
        needs = self._handshake.prepare(stub)
        self._is_ready = self.is_attaching = True
        found = self._handshake.attach(stub, needs, undo, over_arena=self.transport_name == "shared-memory")
        with self._lock:
            self.algorithm = found.algorithm
            self.needs = found.needs
            # Until the first look says more. Readers look at this once there is an attachment.
            self.is_preparing = found.transport.overlap_memory is not None
            self.num_attaches += 1
            self.is_attaching = False
            self._interrupts.close_circuit()
            self.state, self.reason = "attached", ""
            self._transport, self._stub = found.transport, stub
        self._outages.attached()
        logger.info("drafter %s (%s) attached over %s", self.name, found.algorithm, found.transport.name)
        return found.transport, stub


class OutageLog:
    """Logs why a drafter is not attached: once an outage, and once for a fault that repeats."""

    def __init__(self, name: str, address: str, transport_name: TransportName) -> None:
        self._of = (name, transport_name, address)
        self._has_attached = False
        # What was logged of the current outage, and why, since the last sound draft.
        self._is_outage_known = False
        self._known_reason = ""
        self._started_at = time.monotonic()

    def attached(self) -> None:
        """End the outage."""
        self._has_attached, self._is_outage_known = True, False

    def forget_fault(self) -> None:
        """Log the next fault even if it is the last one again: a draft was sound."""
        self._known_reason = ""

    def lost(self, state: State, reason: str, outlook: str) -> None:
        """Log that the drafter is not attached, as a warning unless it may still be starting."""
        is_starting = not self._has_attached and time.monotonic() - self._started_at < STARTS_WITHIN_S
        level = logging.INFO if is_starting and state == "connecting" else logging.WARNING
        if state == "broken" or level == logging.INFO:
            is_news, self._known_reason = reason != self._known_reason, reason
        else:
            is_news = not self._is_outage_known
        self._is_outage_known |= level == logging.WARNING
        logger.log(
            level if is_news else logging.DEBUG,
            "drafter %s is not attached over %s (%s): %s; no drafts from it %s",
            *self._of,
            reason,
            outlook,
        )
