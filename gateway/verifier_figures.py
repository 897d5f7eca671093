"""Keep what a verifier reports in each message about its queue and its load."""

from __future__ import annotations

from gateway import verifier_wire
from gateway.messages import VerifierLoad
from protos import verifier_pb2


class VerifierFigures:
    """One session's latest figures.

    Attributes:
        load: None: it reported nothing.
        room: new sequences that the queue takes, by the last message and the submissions since;
            None: unknown.
        num_others: sequences of other gateways.
    """

    def __init__(self) -> None:
        self.load: VerifierLoad | None = None
        self.room: int | None = None
        self.num_others = 0

    def take(self, response: verifier_pb2.SessionResponse, num_ours: int) -> None:
        """Read a message; ``num_ours``: this gateway's sequences at the verifier."""
        self.room = response.queue_room if response.HasField("queue_room") else None
        if response.HasField("load"):
            self.load = load = verifier_wire.load_from_proto(response.load)
            # It counts ours as of a moment ago; we know them better.
            self.num_others = max(load.num_running + load.num_waiting - num_ours, 0)

    def submitted(self) -> None:
        """Count a new sequence until the verifier does."""
        if self.room is not None:
            self.room -= 1
