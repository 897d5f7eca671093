"""Which hidden states of the target a step captures for its drafters."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from verifier_svc.drafters.handle import DrafterHandle
from verifier_svc.scheduling.sequence import Sequence
from verifier_svc.speculation.routing import DrafterRouting


class Capture:
    """Choose the layers whose hidden states a step captures. Only the engine thread uses it.

    Attributes:
        layers: those of this step.
    """

    def __init__(self, routing: DrafterRouting) -> None:
        self._routing = routing
        self.layers: tuple[int, ...] = ()
        # The drafters that want some.
        self._capturing: list[DrafterHandle] = []

    def begin_step(self, sequences: Seq[Sequence]) -> None:
        """Choose the layers that attached drafters want of this step.

        Hidden states of other layers are of no use any more. A drafter that attaches later takes
        part from the next step on.
        """
        self._capturing = [drafter for drafter in self._routing.attached if drafter.layers]
        wanted = tuple(dict.fromkeys(layer for drafter in self._capturing for layer in drafter.layers))
        if wanted != self.layers:
            self.layers = wanted
            for sequence in sequences:
                sequence.hidden_states.clear()

    def is_wanted(self, sequence: Sequence) -> bool:
        """Return whether a drafter of this sequence wants hidden states."""
        return any(drafter.layers for drafter in self._of(sequence))

    def _of(self, sequence: Sequence) -> list[DrafterHandle]:
        """Return the drafters of a sequence that wanted hidden states as the step began."""
        if not self._capturing:
            return []
        mine = self._routing.of(sequence)
        return [drafter for drafter in self._capturing if drafter in mine]

    def num_rerun(self, sequence: Sequence) -> int:
        """Return how many earlier positions must run again for their hidden states.

        They are those before the first computed one.
        """
        if not self.layers:
            return 0
        wanted = max((drafter.source.needs.num_rerun for drafter in self._routing.of(sequence)), default=0)
        return min(wanted, sequence.num_computed)

    def forget_sent(self, sequence: Sequence) -> None:
        """Drop the hidden states of a sequence that all its drafters were sent."""
        attachments = [drafter.attachment for drafter in self._of(sequence)]
        sent = [attachment.sent.length(sequence) for attachment in attachments if attachment is not None]
        if sent:
            # The hidden state at position sent - 1 belongs to the first token that was not sent.
            sequence.hidden_states.forget_before(min(sent) - 1)

    def fetch(self, sequences: Seq[Sequence]) -> None:
        """Copy to the host what was not sent: the next pass overwrites it on the device."""
        for sequence in sequences:
            sequence.hidden_states.fetch()
        for drafter in self._routing.drafters:
            if drafter.attachment is not None:
                drafter.attachment.final_updates.fetch()
