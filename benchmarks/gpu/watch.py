"""Ask a verifier again and again about its one drafter, even while no verifier answers."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc

from foretoken import rpc
from protos import verifier_pb2, verifier_pb2_grpc

ANSWER_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Sighting:
    """The verifier's view of the drafter at one time.

    Attributes:
        at: perf_counter seconds.
        attachment: the verifier's epoch, and the number of attachments so far; None without one.
        num_drafts, num_accepted: verified trees and accepted tokens since the verifier's start.
    """

    at: float
    attachment: tuple[int, int] | None = None
    num_drafts: int = 0
    num_accepted: int = 0


@dataclass(frozen=True, slots=True)
class Return:
    """When the drafter was attached again, and its drafts verified and accepted. None: not yet."""

    attached_at: float | None = None
    drafted_at: float | None = None
    accepted_at: float | None = None


def drafters_return(sightings: Iterable[Sighting], lost: tuple[int, int] | None) -> Return:
    """Return when the drafter came back, from the sightings after a fault in order of time.

    Args:
        lost: the attachment that the fault ends; early sightings may still show it. None: it ends
            none.
    """
    first: Sighting | None = None
    drafted_at = accepted_at = None
    for sighting in sightings:
        if sighting.attachment is None or sighting.attachment == lost:
            continue
        if first is None or sighting.attachment != first.attachment:
            first, drafted_at, accepted_at = sighting, None, None
        if drafted_at is None and sighting.num_drafts > first.num_drafts:
            drafted_at = sighting.at
        if accepted_at is None and sighting.num_accepted > first.num_accepted:
            accepted_at = sighting.at
    return Return(first.at if first else None, drafted_at, accepted_at)


class Watch:
    """Asks the verifier at ``address``. It must not be shared between threads."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel = rpc.sync_channel(address)

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def info(self) -> verifier_pb2.GetInfoResponse:
        """Return the verifier's information. Raises grpc.RpcError if nobody answers."""
        stub: Any = verifier_pb2_grpc.VerifierServiceStub(self._channel)
        answer: verifier_pb2.GetInfoResponse = stub.GetInfo(verifier_pb2.GetInfoRequest(), timeout=ANSWER_TIMEOUT_S)
        return answer

    def look(self) -> Sighting:
        """Return the drafter's state now. A verifier that does not answer has no drafter."""
        try:
            info = self.info()
        except grpc.RpcError:
            # A new channel connects at once; this one would wait before its next attempt.
            self._channel.close()
            self._channel = rpc.sync_channel(self._address)
            return Sighting(time.perf_counter())
        (drafter,) = info.drafters
        attachment = (info.epoch, drafter.num_attaches) if drafter.state == "attached" else None
        return Sighting(time.perf_counter(), attachment, drafter.num_drafts, drafter.num_accepted_tokens)
