"""What the speculator sees of a configured drafter: a name, perhaps a transport, and a place to complain."""

from __future__ import annotations

from typing import Protocol

from foretoken.transport import DraftTransport


class DraftSource(Protocol):
    """A drafter that this verifier was configured with; it may be down at any time. ``start`` begins to attach it."""

    @property
    def name(self) -> str: ...

    @property
    def algorithm(self) -> str:
        """NGRAM, EAGLE3, ...; empty until it has attached once."""
        ...

    @property
    def state(self) -> str:
        """connecting, attached or broken."""
        ...

    @property
    def transport_name(self) -> str:
        """shared-memory, grpc or in-process."""
        ...

    @property
    def transport(self) -> DraftTransport | None:
        """None while it is not attached. Never blocks."""
        ...

    @property
    def num_attaches(self) -> int:
        """Attachments so far: when it grows, the drafter knows no sequence."""
        ...

    def report_failure(self, reason: str) -> None:
        """A draft was late, stale or malformed, or the drafter is gone. Enough of them in a row break the circuit."""
        ...

    def report_success(self) -> None:
        """A draft was sound."""
        ...

    def start(self) -> None: ...

    def close(self) -> None: ...
