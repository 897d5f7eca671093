"""The last tokens of ended sequences, which the drafter's next request carries."""

from __future__ import annotations

from collections.abc import Container

from verifier_svc.drafters.request import DraftRow


class FinalUpdates:
    """Final rows of one attachment, and the batch slots that it may forget after them."""

    def __init__(self) -> None:
        self._rows: list[DraftRow] = []
        self._to_release: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, row: DraftRow) -> None:
        """Queue the final row of a sequence."""
        self._rows.append(row)

    def fetch(self) -> None:
        """Copy the hidden states of queued rows to the host.

        The next pass overwrites them on the device.
        """
        for row in self._rows:
            for part in row.hidden:
                part.values()

    def forget_known(self) -> None:
        """Drop the rows of sequences that the drafter knows to their ends."""
        self._rows = [row for row in self._rows if row.new_tokens]

    def forget_batch_slots(self, batch_slots: Container[int]) -> None:
        """Drop what is queued for batch slots whose new owners the drafter is sent.

        By that it forgets the old ones.
        """
        self._rows = [row for row in self._rows if row.batch_slot not in batch_slots]
        self._to_release = [batch_slot for batch_slot in self._to_release if batch_slot not in batch_slots]

    def merge(self, rows: list[DraftRow]) -> tuple[list[DraftRow], list[int]]:
        """Put the queued rows before the ones of the next request.

        Return them, and the batch slots to release first.

        A batch slot is released one request after its final row and before its new owner's first
        row. If the new owner is in the same request, its generation makes the drafter forget the
        old one.
        """
        ended, self._rows = self._rows, []
        owned = {row.batch_slot for row in rows}
        batch_slots = [row.batch_slot for row in ended if row.batch_slot not in owned]
        # If a sequence ended within a run in device memory, the drafter knows all of it. A row
        # without tokens would let it write KV entries that it still owes into blocks that the run
        # may have given to others.
        rows = [row for row in ended if row.new_tokens] + rows
        if not rows:
            self._to_release += batch_slots
            return [], []
        released, self._to_release = self._to_release, batch_slots
        return rows, released
