"""What one attached drafter was sent of each running sequence, and what to send it next."""

from __future__ import annotations

import sys
from dataclasses import replace

from foretoken.drafting import DrafterNeeds
from verifier_svc.drafters.request import NO_DRAFT, DraftRow, Shape
from verifier_svc.scheduling.hidden_states import HiddenSlice, columns_of
from verifier_svc.scheduling.sequence import Sequence

# A model that gets more new tokens than this must first write their KV entries. Nobody waits for
# that: rows decode plainly until it has.
CATCH_UP_TOKENS = 48
# Most new tokens of a request to a drafter without a model. It may learn them on the engine's
# thread, some microseconds each, and all streams wait for that.
MOST_LEARNT = 2048


class SentTokens:
    """Builds the rows of requests.

    Belongs to one attachment: a drafter that attaches again has been sent nothing.
    """

    def __init__(self, needs: DrafterNeeds, block_size: int) -> None:
        self._needs = needs
        self.block_size = block_size
        # Of one request.
        self.most_new_tokens = sys.maxsize if needs.blocks or needs.captured_layers else MOST_LEARNT
        # By batch slot: the generation of the sequence in it, and how many of its tokens were sent.
        self._lengths: dict[int, tuple[int, int]] = {}

    def length(self, sequence: Sequence) -> int:
        """Return how many tokens of a sequence were sent."""
        generation, length = self._lengths.get(sequence.batch_slot, (sequence.generation, 0))
        return length if generation == sequence.generation else 0

    def mark(self, batch_slot: int, generation: int, length: int) -> None:
        """Record that the first ``length`` tokens of a sequence were sent."""
        self._lengths[batch_slot] = generation, length

    def row(
        self, sequence: Sequence, shape: Shape, *, awaited: bool, captured: tuple[int, ...], most: int = sys.maxsize
    ) -> DraftRow | None:
        """Return the row that sends what is new of a sequence, or None if nothing is.

        Args:
            captured: the layers whose hidden states the target captures.
            most: new tokens to send.
        """
        sent = self.length(sequence)
        length = min(self._sendable(sequence), sent + most)
        if sent > length or (sent == length and shape.nodes == 1):
            return None
        # No draft follows a root that cannot be sent yet.
        if length < len(sequence.tokens) or length == sent or self.takes_long(length - sent):
            shape, awaited = NO_DRAFT, False
        return DraftRow(
            sequence,
            sequence.batch_slot,
            sequence.generation,
            length,
            sequence.tokens[sent:length],
            self._hidden(sequence, sent, length, captured),
            self._blocks(sequence, sent, length),
            sequence.submission.prediction_ids if sent == 0 else (),
            shape,
            awaited,
        )

    def final_row(self, sequence: Sequence, captured: tuple[int, ...]) -> DraftRow | None:
        """Return the last row of a sequence that is about to end.

        Return None if nothing was ever sent of it.
        """
        if self.length(sequence) == 0:
            return None
        row = self.row(sequence, NO_DRAFT, awaited=False, captured=captured, most=self.most_new_tokens)
        if row is None:
            length = len(sequence.tokens)
            row = DraftRow(sequence, sequence.batch_slot, sequence.generation, length, [], [], [], (), NO_DRAFT, False)
        return row

    def takes_long(self, num_tokens: int) -> bool:
        """Return whether so many new tokens take the drafter longer than anybody should wait."""
        return self._needs.blocks and num_tokens > CATCH_UP_TOKENS

    def _sendable(self, sequence: Sequence) -> int:
        """Return how many committed tokens can be sent now.

        The rest waits for blocks or hidden states.
        """
        length = len(sequence.tokens)
        if self._needs.blocks:
            length = min(length, len(sequence.block_ids) * self.block_size)
        if self._needs.captured_layers:
            length = min(length, sequence.num_computed + 1)
        return length

    def _hidden(self, sequence: Sequence, sent: int, length: int, captured: tuple[int, ...]) -> list[HiddenSlice]:
        wanted = self._needs.captured_layers
        # If the drafter attached in the middle of a step, that step may not
        # have captured what it wants.
        if not wanted or not set(wanted).issubset(captured):
            return []
        parts = sequence.hidden_states.rows(max(sent - 1, 0), length - 1)
        if not parts:
            return []
        columns = columns_of(wanted, captured, parts[0].source.width // len(captured))
        return parts if columns is None else [replace(part, columns=columns) for part in parts]

    def _blocks(self, sequence: Sequence, sent: int, length: int) -> list[int]:
        if not self._needs.blocks or sent == length:
            return []
        return sequence.block_ids[sent // self.block_size : (length - 1) // self.block_size + 1]
