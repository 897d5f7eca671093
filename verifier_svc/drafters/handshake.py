"""Attach a verifier to a drafter in another process.

This covers what its requests need, the transport, and its self-test.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from foretoken.drafting import DrafterNeeds, TargetInfo
from foretoken.errors import PreconditionError
from foretoken.transports.arena import ArenaListener, ArenaTransport
from foretoken.transports.arena_layout import CHALLENGE_BYTES, LAYOUT_VERSION, ArenaLayout
from foretoken.transports.draft_wire import needs_from_proto, target_to_proto
from foretoken.transports.shared_weights import SharedWeights
from foretoken.transports.transport import (
    DEFAULT_TOKEN_CAPACITY,
    DraftTransport,
    QueuedTransport,
    TransportCounters,
    probe_request,
)
from protos import drafter_pb2
from verifier_svc.drafters.device_offer import DeviceOffer
from verifier_svc.drafters.interrupts import Interrupts
from verifier_svc.drafters.stream import StreamTransport

# A drafter may load a model at attach, and on a GPU compile all kernels for it.
ATTACH_TIMEOUT_S = 300.0
PROBE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Terms:
    """What the verifier brings to every attachment.

    Attributes:
        epoch: the verifier's.
        token_capacity: new tokens of one request at most.
        spin_us: as ArenaTransport's.
        weights: the target's, for a drafter of this host that uses them in place.
        offer: device memory, for a drafter on the target's device.
    """

    target: TargetInfo
    epoch: int
    counters: TransportCounters
    token_capacity: int = DEFAULT_TOKEN_CAPACITY
    spin_us: int | None = None
    weights: SharedWeights | None = None
    offer: DeviceOffer | None = None


@dataclass(frozen=True)
class Connection:
    """A transport that passed its self-test.

    ``needs``: the drafter's needs that this transport can meet.
    """

    transport: QueuedTransport
    needs: DrafterNeeds
    algorithm: str


class Handshake:
    """Attaches to one drafter, again and again."""

    def __init__(self, terms: Terms, interrupts: Interrupts, arena_folder: Path | None) -> None:
        """
        Args:
            arena_folder: both sides see it; the socket that hands over the arena is there. None:
                any folder.
        """
        self._terms = terms
        self._interrupts = interrupts
        self._arena_folder = arena_folder

    def prepare(self, stub: Any) -> DrafterNeeds:
        """Return what the drafter's requests must carry; it loads its model for that."""
        request = drafter_pb2.PrepareRequest(target=target_to_proto(self._terms.target))
        response = self._interrupts.result(stub.Prepare.future(request, timeout=ATTACH_TIMEOUT_S))
        return needs_from_proto(response, self._terms.target)

    def attach(self, stub: Any, needs: DrafterNeeds, undo: contextlib.ExitStack, *, over_arena: bool) -> Connection:
        """Attach and prove the transport, which ``undo`` closes.

        Raises PreconditionError if a check fails.
        """
        terms, challenge = self._terms, os.urandom(CHALLENGE_BYTES)
        transport: QueuedTransport
        if over_arena:
            transport, response = self._attach_arena(stub, challenge, needs, undo)
            transport.check_self_test()
        else:
            response = self._call_attach(stub, challenge, "", None)
            # What it could do on one device with the target is of no use over a stream.
            needs = replace(needs, device="", overlaps=False)
            layout = ArenaLayout.of_target(terms.target, needs, terms.token_capacity)
            transport = StreamTransport(stub, terms.epoch, layout, terms.counters)
            undo.callback(transport.close)
        if response.transport != transport.name:
            raise PreconditionError(f"self-test: the drafter uses {response.transport!r}, not {transport.name!r}")
        if not hmac.compare_digest(response.challenge_digest, hashlib.sha256(challenge).digest()):
            raise PreconditionError(f"self-test: the drafter did not get the challenge over {transport.name}")
        self._probe(transport)
        return Connection(transport, needs, response.algorithm)

    def _probe(self, transport: DraftTransport) -> None:
        """Make one empty round trip, both ways through what every step will use."""
        transport.post(probe_request(self._terms.epoch, 0))
        if transport.receive(PROBE_TIMEOUT_S) is None:
            raise PreconditionError(f"self-test: no answer over {transport.name}")

    def _attach_arena(
        self, stub: Any, challenge: bytes, needs: DrafterNeeds, undo: contextlib.ExitStack
    ) -> tuple[ArenaTransport, drafter_pb2.AttachResponse]:
        terms, offer = self._terms, self._terms.offer
        weights_fds: tuple[int, ...] = ()
        if terms.weights is not None and needs.weights and needs.device == terms.weights.device:
            weights_fds = terms.weights.filenos()
        overlap = None if offer is None else offer.layout(terms.target, needs)
        layout = ArenaLayout.of_target(
            terms.target, needs, terms.token_capacity, weights=bool(weights_fds), overlap=overlap
        )
        transport = ArenaTransport(
            layout,
            terms.epoch,
            challenge,
            terms.counters,
            spin_us=terms.spin_us,
            weights_fds=weights_fds,
            device=None if offer is None else offer.device,
        )
        undo.callback(transport.close)
        with contextlib.closing(ArenaListener(self._arena_folder)) as listener:
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
                epoch=self._terms.epoch,
                target=target_to_proto(self._terms.target),
                arena_socket=arena_socket,
                layout_version=LAYOUT_VERSION,
                challenge=challenge,
            ),
            timeout=ATTACH_TIMEOUT_S,
        )
        response: drafter_pb2.AttachResponse = self._interrupts.result(call, on_connect, listener_fd)
        return response
