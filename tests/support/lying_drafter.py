"""A drafter over any transport whose replies are changed after the drafter's own checks."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from foretoken.drafter import Drafter
from foretoken.drafting import DraftBatch, DrafterNeeds, DraftRequest, TargetInfo
from foretoken.models.target_weights import TargetWeights
from foretoken.transports.arena_layout import HEADER_BYTES
from foretoken.transports.arena_peer import ArenaPeer
from foretoken.transports.doorbell import Waiter
from foretoken.transports.draft_wire import request_from_proto, target_from_proto
from foretoken.transports.transport import ROWS_PER_BATCH_SLOT, TransportClosedError, answer
from protos import drafter_pb2, drafter_pb2_grpc

# The reply in place of the honest one; None: no reply; bytes: the arena buffer's content.
Lie = Callable[[DraftRequest, DraftBatch], DraftBatch | bytes | None]


class Bent:
    """A drafter whose first ``num_lies`` drafts are lies; also used directly, in process."""

    def __init__(self, drafter: Drafter, lie: Lie, num_lies: int) -> None:
        self._drafter = drafter
        self._lie = lie
        self.lies_left = num_lies
        # Set by each reply, and each refusal to reply.
        self.handled = threading.Event()
        self.algorithm = "LIAR"

    def needs(self, target: TargetInfo) -> DrafterNeeds:
        return self._drafter.needs(target)

    def attach(self, target: TargetInfo, weights: TargetWeights | None) -> None:
        self._drafter.attach(target, weights)

    def release(self, batch_slots: Sequence[int]) -> None:
        self._drafter.release(batch_slots)

    def gauges(self) -> dict[str, float]:
        return {}

    def draft(self, request: DraftRequest) -> DraftBatch:
        reply = self.reply(request)
        assert isinstance(reply, DraftBatch), "this lie needs a wire"
        return reply

    def reply(self, request: DraftRequest) -> DraftBatch | bytes | None:
        honest = answer(self._drafter, request)
        # Only a row that may draft can be lied about.
        if self.lies_left and request.num_rows and request.max_nodes.max() > 1:
            self.lies_left -= 1
            return self._lie(request, honest)
        return honest


class LyingServer(drafter_pb2_grpc.DrafterServiceServicer):
    """Serves a ``Bent`` drafter at ``unix:folder/liar.sock`` over stream and arena."""

    def __init__(self, bent: Bent, folder: Path) -> None:
        self._bent = bent
        self._lock = threading.Lock()
        self._target: TargetInfo | None = None
        self._peers: list[threading.Thread] = []
        self.address = f"unix:{folder}/liar.sock"
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        drafter_pb2_grpc.add_DrafterServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.address)
        self._server.start()

    def close(self) -> None:
        """Call when the verifier's end is closed."""
        self._server.stop(0).wait()
        for peer in self._peers:
            peer.join()

    def Prepare(self, request: drafter_pb2.PrepareRequest, context: Any) -> drafter_pb2.PrepareResponse:
        return drafter_pb2.PrepareResponse(algorithm="LIAR")

    def Attach(self, request: drafter_pb2.AttachRequest, context: Any) -> drafter_pb2.AttachResponse:
        self._target = target_from_proto(request.target)
        with self._lock:
            self._bent.attach(self._target, None)
        digest, transport = hashlib.sha256(request.challenge).digest(), "grpc"
        if request.arena_socket:
            peer = ArenaPeer(request.arena_socket, request.epoch, self._target)
            digest, transport = peer.digest, "shared-memory"
            self._peers.append(threading.Thread(target=self._serve_arena, args=(peer,), daemon=True))
            self._peers[-1].start()
        return drafter_pb2.AttachResponse(name="liar", algorithm="LIAR", challenge_digest=digest, transport=transport)

    def Release(self, request: drafter_pb2.ReleaseRequest, context: Any) -> drafter_pb2.ReleaseResponse:
        with self._lock:
            self._bent.release(list(request.slots))
        return drafter_pb2.ReleaseResponse()

    def Draft(self, requests: Iterator[drafter_pb2.DraftRequest], context: Any) -> Iterator[drafter_pb2.DraftResponse]:
        assert self._target is not None
        for message in requests:
            reply = self._reply(request_from_proto(message, ROWS_PER_BATCH_SLOT * self._target.max_batch_slots, 0))
            if isinstance(reply, DraftBatch):
                yield _to_wire(reply)
            self._bent.handled.set()

    def _serve_arena(self, peer: ArenaPeer) -> None:
        with contextlib.closing(peer), contextlib.suppress(TransportClosedError):
            waiter = Waiter(peer.filenos())
            while True:
                waiter.wait(None)
                for request in peer.requests():
                    if isinstance(request, tuple):
                        with self._lock:
                            self._bent.release(request)
                        peer.reply(None)
                        continue
                    reply = self._reply(request)
                    if isinstance(reply, bytes):
                        # All buffers at once: the one that is read next is among them.
                        memory = peer._reply_memory
                        garbage = reply * (-(-len(memory) // len(reply)))
                        memory[HEADER_BYTES:] = garbage[: len(memory) - HEADER_BYTES]
                        peer.reply(None)
                    elif reply is not None:
                        peer.reply(reply)
                    self._bent.handled.set()

    def _reply(self, request: DraftRequest) -> DraftBatch | bytes | None:
        with self._lock:
            return self._bent.reply(request)


def _to_wire(batch: DraftBatch) -> drafter_pb2.DraftResponse:
    """Encode a batch as a C client would: negative numbers become large without a complaint."""
    return drafter_pb2.DraftResponse(
        epoch=batch.epoch,
        step_id=batch.step_id,
        node_starts=batch.node_starts.astype(np.uint32).tolist(),
        tokens=batch.tokens.astype(np.uint32).tolist(),
        scores=batch.scores.tolist(),
        parents=batch.parents.tolist(),
    )
