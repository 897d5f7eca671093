"""One drafter under its name.

It holds what outlives an attachment: number, counters and source.
"""

from __future__ import annotations

from collections.abc import Mapping

from verifier_svc.drafters.attachment import Attachment, AttachmentSettings
from verifier_svc.drafters.counters import DrafterCounters
from verifier_svc.drafters.source import DraftSource, State
from verifier_svc.drafters.source_record import SourceRecord


class DrafterHandle:
    """What outlives a drafter's attachments. Only the engine thread uses it; any may read figures."""

    def __init__(self, source: DraftSource, number: int, settings: AttachmentSettings) -> None:
        """``number``: the drafter's index + 1, which its nodes name as their source."""
        self.name = source.name
        self.number = number
        self.counters = DrafterCounters()
        # The figures by which the shape of its trees was chosen last, for metrics.
        self.decision: Mapping[str, float] = {}
        # Whether the operator has taken the drafter away.
        self.is_detached = False
        self.record = SourceRecord(source, settings.timeout_s)
        self._settings = settings
        self._attachment: Attachment | None = None

    @property
    def attachment(self) -> Attachment | None:
        """The attachment of the moment, or None.

        A source that has attached again gets a new one.
        """
        transport = None if self.is_detached else self.source.transport
        if transport is None:
            self._attachment = None
        elif self._attachment is None or self._attachment.transport is not transport:
            self._attachment = Attachment(transport, self.number, self.record, self.counters, self._settings)
        return self._attachment

    def detach(self) -> None:
        """Drop what the source was asked. The caller closes it."""
        self.is_detached = True
        self._attachment = None

    def replace_source(self, source: DraftSource) -> None:
        """Go on with another source.

        Number and counters stay; what was learned of the old source does not.
        """
        # One assignment, so that other threads never see figures of both.
        self.record = self.record.replaced_by(source)
        self.is_detached = False

    @property
    def source(self) -> DraftSource:
        return self.record.source

    @property
    def is_attached(self) -> bool:
        return self.attachment is not None

    @property
    def has_model(self) -> bool:
        """Return whether the drafter computes drafts with a model.

        A model has a KV cache and takes milliseconds.
        """
        return self.source.needs.blocks

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers whose hidden states requests carry now."""
        attachment = self.attachment
        return () if attachment is None else attachment.needs.captured_layers

    @property
    def state(self) -> State:
        return "detached" if self.is_detached else self.source.state

    @property
    def reason(self) -> str:
        """Why it is not attached; empty while it is, and after the operator took it away."""
        return "" if self.is_detached else self.source.reason

    @property
    def num_attaches(self) -> int:
        """Attachments of all sources that the drafter had."""
        return self.record.num_attaches

    @property
    def is_attaching(self) -> bool:
        """Return whether the drafter has answered and is being attached."""
        return not self.is_detached and self.source.is_attaching

    @property
    def is_preparing(self) -> bool:
        """Return whether the drafter still prepares for usual requests while it is idle."""
        return not self.is_detached and self.source.is_preparing

    @property
    def num_rejected(self) -> int:
        """Drafts that were of no use, as the verifier and all sources of the drafter count them."""
        return self.counters.num_rejected_drafts + self.record.num_rejected

    @property
    def gauges(self) -> Mapping[str, float]:
        """The drafter's own gauges, and the gauges of the decision for its trees."""
        return {} if self.is_detached else {**self.source.gauges, **self.decision}
