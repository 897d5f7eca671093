"""A drafter as the verifier sees it: attached, on its way back, or refused. The engine thread never waits here.

Each client has one thread that attaches, proves the transport, watches for the drafter's end and attaches again, for
ever. It sleeps in between. Whether drafts are any good is the engine's to judge: it reports, this decides.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from foretoken import rpc
from foretoken.drafting import DrafterNeeds, TargetInfo
from foretoken.errors import ForetokenError, PreconditionError, UnavailableError
from foretoken.lost_context import exit_if_context_lost
from foretoken.transports.arena import ArenaListener, ArenaTransport
from foretoken.transports.arena_layout import CHALLENGE_BYTES, LAYOUT_VERSION, ArenaLayout
from foretoken.transports.doorbell import Doorbell, Waiter
from foretoken.transports.draft_wire import needs_from_proto, target_to_proto
from foretoken.transports.shared_weights import SharedWeights
from foretoken.transports.transport import (
    DEFAULT_TOKEN_CAPACITY,
    DraftTransport,
    TransportClosedError,
    TransportCounters,
    probe_request,
)
from protos import drafter_pb2, drafter_pb2_grpc
from verifier_svc.config import DrafterEndpoint
from verifier_svc.drafters.device_offer import ResidentOffer
from verifier_svc.drafters.source import (
    GAUGES_EVERY_S,
    MAX_CONSECUTIVE_FAILURES,
    CircuitBreaker,
    State,
    TransportName,
    checked_gauges,
)
from verifier_svc.drafters.stream import StreamTransport

logger = logging.getLogger(__name__)

# A drafter may load a model at attach.
ATTACH_TIMEOUT_S = 60.0
PROBE_TIMEOUT_S = 5.0
GAUGES_TIMEOUT_S = 2.0
# A drafter that is started with the verifier compiles and loads for so long at most: until then, that it is not there
# is no warning.
STARTS_WITHIN_S = 60.0


class DrafterClient:
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
        resident: ResidentOffer | None = None,
    ) -> None:
        """``epoch``: the verifier's. ``token_capacity``: of one request. ``spin_us``: as ArenaTransport's.

        ``weights``: of the target, for a drafter of this host that uses them where they are. ``resident``: for one on
        the target's device.
        """
        self._endpoint = endpoint
        self._target = target
        self._epoch = epoch
        self._socket_path = rpc.unix_path(endpoint.address)
        self._token_capacity = token_capacity
        self._spin_us = spin_us
        self._weights = weights
        self._offer = resident
        self._needs = DrafterNeeds()
        self._counters = TransportCounters()
        self._breaker = CircuitBreaker()
        self._lock = threading.Lock()
        self._wake = Doorbell()
        self._closing = False
        # Set by the engine thread when the circuit opens.
        self._break_reason = ""
        self._state: State = "connecting"
        self._reason = ""
        self._algorithm = ""
        self._num_attaches = 0
        self._gauges: dict[str, float] = {}
        self._transport: DraftTransport | None = None
        self._thread: threading.Thread | None = None
        # Whether the drafter is ready for the attempt of the moment.
        self._is_ready = False
        # What was logged of the present outage, and why, since the last sound draft.
        self._is_outage_known = False
        self._known_reason = ""
        self._started_at = time.monotonic()

    @property
    def name(self) -> str:
        return self._endpoint.name

    @property
    def address(self) -> str:
        return self._endpoint.address

    @property
    def algorithm(self) -> str:
        return self._algorithm

    @property
    def needs(self) -> DrafterNeeds:
        return self._needs

    @property
    def transport(self) -> DraftTransport | None:
        return self._transport

    @property
    def transport_name(self) -> TransportName:
        """On one host the arena, unless the endpoint says otherwise. There is no falling back."""
        if self._endpoint.transport == "auto":
            return "grpc" if self._socket_path is None else "shared-memory"
        return self._endpoint.transport

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
        return self._gauges

    def start(self) -> None:
        """Begin to attach, in the background."""
        self._thread = threading.Thread(target=self._run, name=f"drafter-{self.name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._wake.ring()
        if self._thread is not None:
            self._thread.join()
        self._wake.close()

    def report_failure(self, reason: str) -> None:
        with self._lock:
            if self._transport is not None and self._breaker.failure():
                self._state = "broken"
                self._transport = None
                self._reason = f"{MAX_CONSECUTIVE_FAILURES} failures in a row, the last: {reason}"
                self._break_reason = self._reason
                self._wake.ring()

    def report_success(self) -> None:
        with self._lock:
            self._breaker.success()
            self._known_reason = ""

    def _run(self) -> None:
        """Attach, watch, attach again, until closed."""
        while not self._closing:
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
            if not self._closing:
                with self._lock:
                    backoff_s = self._breaker.next_backoff_s(is_absent=is_absent)
                self._sleep(backoff_s)

    def _watch(self, transport: ArenaTransport | StreamTransport, stub: Any) -> None:
        """Block until the drafter is gone, the circuit opens, or the client is closed; look at its gauges meanwhile."""
        waiter = Waiter((self._wake.fileno(), transport.fileno()))
        look_at = time.monotonic()
        while not self._closing:
            ready = waiter.wait(max(look_at - time.monotonic(), 0.0))
            if transport.fileno() in ready:
                self._lost("connecting", "the drafter is gone")
                return
            if not ready:
                self._look_at_gauges(stub)
                look_at = time.monotonic() + GAUGES_EVERY_S
            self._wake.take()
            # A call waits on the same doorbell: what was rung meanwhile is not lost.
            if self._break_reason:
                reason, self._break_reason = self._break_reason, ""
                self._lost("broken", reason)
                return

    def _look_at_gauges(self, stub: Any) -> None:
        """Ask for the drafter's gauges. Old ones stay if it does not answer: its drafts decide whether it is of use."""
        try:
            info = self._result(stub.GetInfo.future(drafter_pb2.GetInfoRequest(), timeout=GAUGES_TIMEOUT_S))
        except ForetokenError as error:
            logger.debug("drafter %s does not answer for its gauges: %s", self.name, error)
        else:
            self._gauges = checked_gauges(info.gauges)

    def _lost(self, state: State, reason: str, outlook: str = "until it is") -> None:
        self._gauges = {}
        with self._lock:
            # Readers do not lock: whoever finds no transport finds the state that says why.
            self._state, self._reason = state, reason
            self._transport = None
        if not self._closing:
            self._log_loss(state, reason, outlook)

    def _log_loss(self, state: State, reason: str, outlook: str) -> None:
        """One warning an outage, and one for a fault that comes again and again without a sound draft between."""
        is_starting = not self._num_attaches and time.monotonic() - self._started_at < STARTS_WITHIN_S
        level = logging.INFO if is_starting and state == "connecting" else logging.WARNING
        if state == "broken" or level == logging.INFO:
            is_news, self._known_reason = reason != self._known_reason, reason
        else:
            is_news = not self._is_outage_known
        self._is_outage_known |= level == logging.WARNING
        logger.log(
            level if is_news else logging.DEBUG,
            "drafter %s is not attached over %s (%s): %s; no drafts from it %s",
            self.name,
            self.transport_name,
            self._endpoint.address,
            reason,
            outlook,
        )

    def _sleep(self, seconds: float) -> None:
        """A wake-up that is not a close belongs to the attachment that has just ended."""
        deadline = time.monotonic() + seconds
        waiter = Waiter((self._wake.fileno(),))
        while not self._closing and (left_s := deadline - time.monotonic()) > 0:
            if waiter.wait(left_s):
                self._wake.take()
        self._break_reason = ""

    def _attach(self, attachment: contextlib.ExitStack) -> tuple[ArenaTransport | StreamTransport, Any]:
        """A new attachment, proved by its self-test, and the stub that it was made with.

        What they hold is given back by ``attachment``.
        """
        channel = rpc.sync_channel(self._endpoint.address)
        attachment.callback(channel.close)
        stub = drafter_pb2_grpc.DrafterServiceStub(channel)
        challenge = os.urandom(CHALLENGE_BYTES)
        needs = self._prepare(stub)
        self._is_ready = True
        transport: ArenaTransport | StreamTransport
        if self.transport_name == "shared-memory":
            transport, response = self._attach_arena(stub, challenge, needs, attachment)
            transport.check_self_test()
        else:
            response = self._call_attach(stub, challenge, "", None)
            # What it could do on one device with the target is of no use over a stream.
            needs = replace(needs, device="", resident=False)
            layout = ArenaLayout.of_target(self._target, needs, self._token_capacity)
            transport = StreamTransport(stub, self._epoch, layout, self._counters)
            attachment.callback(transport.close)
        if response.transport != transport.name:
            raise PreconditionError(f"self-test: the drafter uses {response.transport!r}, not {transport.name!r}")
        if not hmac.compare_digest(response.challenge_digest, hashlib.sha256(challenge).digest()):
            raise PreconditionError(f"self-test: the drafter did not get the challenge over {transport.name}")
        self._probe(transport)
        with self._lock:
            self._algorithm = response.algorithm
            self._needs = needs
            self._num_attaches += 1
            self._break_reason = ""
            self._state, self._reason = "attached", ""
            self._transport = transport
        self._is_outage_known = False
        logger.info("drafter %s (%s) attached over %s", self.name, response.algorithm, transport.name)
        return transport, stub

    def _probe(self, transport: DraftTransport) -> None:
        """One empty round trip, both ways through what every step will use."""
        transport.post(probe_request(self._epoch, 0))
        if transport.receive(PROBE_TIMEOUT_S) is None:
            raise PreconditionError(f"self-test: no answer over {transport.name}")

    def _prepare(self, stub: Any) -> DrafterNeeds:
        """What the drafter's requests must carry; it loads its model for that."""
        request = drafter_pb2.PrepareRequest(target=target_to_proto(self._target))
        response = self._result(stub.Prepare.future(request, timeout=ATTACH_TIMEOUT_S))
        return needs_from_proto(response, self._target)

    def _attach_arena(
        self,
        stub: Any,
        challenge: bytes,
        needs: DrafterNeeds,
        attachment: contextlib.ExitStack,
    ) -> tuple[ArenaTransport, drafter_pb2.AttachResponse]:
        weights_fds: tuple[int, ...] = ()
        if self._weights is not None and needs.weights and needs.device == self._weights.device:
            weights_fds = self._weights.filenos()
        resident = None if self._offer is None else self._offer.layout(self._target, needs)
        layout = ArenaLayout.of_target(
            self._target, needs, self._token_capacity, weights=bool(weights_fds), resident=resident
        )
        transport = ArenaTransport(
            layout,
            self._epoch,
            challenge,
            self._counters,
            spin_us=self._spin_us,
            weights_fds=weights_fds,
            device=None if self._offer is None else self._offer.device,
        )
        attachment.callback(transport.close)
        # Beside the drafter's own socket: a folder that both sides see.
        folder: Path | None = self._socket_path.parent if self._socket_path is not None else None
        with contextlib.closing(ArenaListener(folder)) as listener:
            response = self._call_attach(
                stub, challenge, listener.path, lambda: transport.hand_over(listener.accept()), listener.fileno()
            )
        return transport, response

    def _call_attach(
        self,
        stub: Any,
        challenge: bytes,
        arena_socket: str,
        on_connect: Callable[[], None] | None,
        listener_fd: int | None = None,
    ) -> drafter_pb2.AttachResponse:
        """Call Attach, handing over the arena meanwhile."""
        call = stub.Attach.future(
            drafter_pb2.AttachRequest(
                epoch=self._epoch,
                target=target_to_proto(self._target),
                arena_socket=arena_socket,
                layout_version=LAYOUT_VERSION,
                challenge=challenge,
            ),
            timeout=ATTACH_TIMEOUT_S,
        )
        response: drafter_pb2.AttachResponse = self._result(call, on_connect, listener_fd)
        return response

    def _result(self, call: Any, on_connect: Callable[[], None] | None = None, listener_fd: int | None = None) -> Any:
        """A call's result; ``on_connect`` runs when the listener gets a connection. A close ends the wait at once."""
        try:
            call.add_done_callback(lambda _: self._wake.ring())
            fds = [self._wake.fileno()]
            waiter = Waiter(fds if listener_fd is None else [*fds, listener_fd])
            while not call.done():
                ready = waiter.wait(None)
                self._wake.take()
                if self._closing or self._break_reason:
                    raise UnavailableError(self._break_reason or "the verifier stops")
                if on_connect is not None and listener_fd in ready:
                    on_connect()
                    # Accepted and closed: its number may soon be another descriptor's.
                    waiter = Waiter(fds)
            return call.result()
        except grpc.RpcError as error:
            raise rpc.error_from_rpc(error) from error
        finally:
            call.cancel()
