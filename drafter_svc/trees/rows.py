"""What a drafter with a KV cache knows of each sequence: tokens, blocks, valid KV entries.

Knows no model. The cache uses the verifier's block ids, so nothing is allocated here. A block may
hold KV entries that this drafter wrote for other tokens, or none. Two facts are kept:

- For each sequence the *valid range* [valid_start, valid_end): KV slots that were written for its
  tokens, without a hole. A sequence is drafted for only if the range ends at its last token.
- For each block that was written whole, a *key*: a digest of the salt and of all tokens from
  position 0 to the block's end. A sequence with the same prefix gets the same block from the
  verifier and goes on from there. The key is cleared before a KV slot of the block is written
  again.

If something was missed (tokens, a generation, a block's change of owner), the valid range only gets
shorter.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np

from foretoken.drafting import DraftRequest, TargetInfo
from foretoken.tree import Int32

_KEY_BYTES = 16
_NO_KEY = b""


class DraftSequence:
    """One sequence in its batch slot.

    Attributes:
        sent_start, length: the tokens at positions [sent_start, length) are known.
        tokens: int32 [max_model_len].
        table: int32 [blocks of max_model_len]; block ids, known from ``sent_start`` on.
        valid_start, valid_end: the valid range; empty if they are equal.
        keys: the keys of its whole blocks, in order, if it is known from position 0.
        number: unique among all sequences of the attachment.
    """

    __slots__ = (
        "generation",
        "keys",
        "length",
        "number",
        "salt",
        "sent_start",
        "table",
        "tokens",
        "valid_end",
        "valid_start",
    )

    def __init__(
        self, number: int, generation: int, salt: int, start: int, first_position: int, capacity: tuple[int, int]
    ) -> None:
        self.number = number
        self.generation = generation
        self.salt = salt
        self.sent_start = start
        self.length = start
        # Memory is touched as the sequence grows.
        self.tokens: Int32 = np.empty(capacity[0], np.int32)
        self.table: Int32 = np.zeros(capacity[1], np.int32)
        self.valid_start = self.valid_end = max(start, first_position)
        self.keys: list[bytes] = []


class SentRow(NamedTuple):
    """A row of a request as plain numbers; reading columns one by one is slow.

    ``first_hidden``: index of its first hidden states in ``DraftRequest.hidden``; it has
    ``num_hidden``.
    """

    row: int
    batch_slot: int
    generation: int
    salt: int
    length: int
    max_nodes: int
    tokens: list[int]
    block_ids: list[int]
    first_hidden: int
    num_hidden: int


def sent_rows(request: DraftRequest, first: int = 0) -> list[SentRow]:
    """Return the rows of a request from ``first`` on, in order."""
    tokens, blocks = request.new_tokens.tolist(), request.block_ids.tolist()
    token_starts, hidden_starts, block_starts = (
        starts.tolist() for starts in (request.new_token_starts, request.hidden_starts, request.block_starts)
    )
    columns = (request.batch_slots, request.generations, request.salts, request.lengths, request.max_nodes)
    values = zip(*(column[first:].tolist() for column in columns), strict=True)
    return [
        SentRow(
            row,
            batch_slot,
            generation,
            salt,
            length,
            max_nodes,
            tokens[token_starts[row] : token_starts[row + 1]],
            blocks[block_starts[row] : block_starts[row + 1]],
            hidden_starts[row],
            hidden_starts[row + 1] - hidden_starts[row],
        )
        for row, (batch_slot, generation, salt, length, max_nodes) in enumerate(values, first)
    ]


class Extension(NamedTuple):
    """KV entries to write: KV slots [start, stop) of a sequence, for row ``row`` of the request.

    ``first_hidden``: index of the hidden states for token ``start`` in ``DraftRequest.hidden``.
    """

    row: int
    sequence: DraftSequence
    start: int
    stop: int
    first_hidden: int


class DraftRows:
    """The sequences of one attachment.

    Args:
        first_position: the first KV slot that has an entry; 1 for a head.
        num_depths: number of modules, each fed by the one before; module j has no entry in the
            first j KV slots of a valid range.
        needs_hidden: whether an entry can be written only from the target's hidden states.
    """

    def __init__(
        self, target: TargetInfo, *, first_position: int, num_depths: int = 1, needs_hidden: bool = True
    ) -> None:
        self._target = target
        self.first_position = first_position
        self._lag = num_depths - 1
        self.needs_hidden = needs_hidden
        num_blocks = -(-target.max_model_len // target.block_size)
        self._capacity = (target.max_model_len, num_blocks)
        # For each batch slot the newest sequence and the one before, whose last tokens may arrive
        # in parts between the parts of its successor.
        self._sequences: dict[int, list[DraftSequence]] = {}
        self._num_sequences = 0
        self._block_keys: list[bytes] = [_NO_KEY] * target.num_blocks
        # The last sequence that wrote into each block.
        self._writers: list[int] = [-1] * target.num_blocks

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest sequence."""
        return self._capacity[1]

    def release(self, batch_slot: int) -> None:
        """Forget a batch slot's sequences; whole blocks stay for sequences with the same prefix."""
        self._sequences.pop(batch_slot, None)

    def drop(self, sequence: DraftSequence) -> None:
        """Forget one sequence, and keep its batch slot's other one."""
        for batch_slot, known in self._sequences.items():
            if sequence in known:
                known.remove(sequence)
                if not known:
                    del self._sequences[batch_slot]
                return

    def revoke(self, extension: Extension) -> None:
        """Forget a sequence whose KV entries were not written as ``extend`` said.

        No other sequence goes on from their blocks.
        """
        sequence, size = extension.sequence, self._target.block_size
        for block in sequence.table[extension.start // size : self.num_blocks(extension.stop)].tolist():
            if self._writers[block] == sequence.number:
                self._block_keys[block] = _NO_KEY
        self.drop(sequence)

    def num_blocks(self, length: int) -> int:
        """Return how many blocks so many tokens take."""
        return -(-length // self._target.block_size)

    def is_window(self, sequence: DraftSequence) -> bool:
        """Return whether KV entries before the valid range are missing."""
        return sequence.valid_start > self.first_position

    def learn(self, sent: SentRow) -> DraftSequence | None:
        """Take a row's new tokens and blocks, and accept blocks that the cache holds already.

        Returns None for a row that is not sound, or without tokens: it carries only a prediction.
        If the length is not the known length plus the new tokens, the sequence starts anew at the
        gap.
        """
        length = sent.length
        start = length - len(sent.tokens)
        if length == 0:
            return None
        if not self._is_sound(sent, start):
            self.release(sent.batch_slot)
            return None
        sequence = self._find(sent, start)
        if sequence is None:
            return None
        sequence.tokens[start:length] = sent.tokens
        first_block = start // self._target.block_size
        sequence.table[first_block : first_block + len(sent.block_ids)] = sent.block_ids
        sequence.length = length
        self._accept_blocks(sequence, length - sent.num_hidden)
        return sequence

    def find(self, batch_slot: int, generation: int, salt: int) -> DraftSequence | None:
        """Return a batch slot's sequence if it is known."""
        for sequence in self._sequences.get(batch_slot, ()):
            if sequence.generation == generation and sequence.salt == salt:
                return sequence
        return None

    def can_go_on(self, sequence: DraftSequence) -> bool:
        """Return whether the entry of its next token would extend its valid range."""
        return sequence.valid_end == sequence.length and not self._lost_block(sequence, sequence.valid_end)

    def append_blocks(self, sequence: DraftSequence, first: int, block_ids: list[int]) -> bool:
        """Append blocks of later positions, from logical block ``first`` on.

        Return False if they are invalid.
        """
        target, stop = self._target, first + len(block_ids)
        if stop > self.max_blocks or (block_ids and not 0 <= min(block_ids) <= max(block_ids) < target.num_blocks):
            return False
        sequence.table[first:stop] = block_ids
        return True

    def claim_blocks(self, sequence: DraftSequence, first: int, stop: int) -> None:
        """Mark logical blocks [first, stop) as written by this sequence, ahead of ``advance``."""
        for block in sequence.table[first:stop].tolist():
            self._writers[block] = sequence.number
            self._block_keys[block] = _NO_KEY

    def advance(self, sequence: DraftSequence, tokens: list[int], *, is_written: bool) -> bool:
        """Append tokens whose blocks are known.

        Return False, and append nothing, if they are invalid.

        ``is_written``: their KV entries were written too, into claimed blocks, at the end of the
        valid range. A block that another sequence has claimed meanwhile stays with it: this
        sequence has ended, and its tokens are read late.
        """
        start, target = sequence.length, self._target
        length = start + len(tokens)
        if not tokens or length > target.max_model_len or not 0 <= min(tokens) <= max(tokens) < target.vocab_size:
            return False
        sequence.tokens[start:length] = tokens
        sequence.length = length
        self._accept_blocks(sequence, start if is_written else length)
        if is_written:
            self._mark_written(sequence, start, length, is_claimed=True)
            sequence.valid_end = length
        return True

    def _find(self, sent: SentRow, start: int) -> DraftSequence | None:
        """Return the sequence that is known up to ``start``, or a new one.

        Returns None if a successor has replaced it, or if it has no tokens.
        """
        known, generation = self._sequences.setdefault(sent.batch_slot, []), sent.generation
        for sequence in known:
            if (sequence.generation, sequence.salt, sequence.length) == (generation, sent.salt, start):
                return sequence
        if start == sent.length or (known and generation < known[0].generation):
            return None
        self._num_sequences += 1
        sequence = DraftSequence(self._num_sequences, generation, sent.salt, start, self.first_position, self._capacity)
        # The same generation means the same sequence, after a gap.
        before = known[:1] if known and known[0].generation != generation else known[1:]
        self._sequences[sent.batch_slot] = [sequence, *before]
        return sequence

    def _is_sound(self, sent: SentRow, start: int) -> bool:
        """Return whether batch slot, length, tokens and blocks are in range and fit together."""
        target, length, tokens, blocks = self._target, sent.length, sent.tokens, sent.block_ids
        if not 0 <= sent.batch_slot < target.max_batch_slots or not 0 <= start <= length <= target.max_model_len:
            return False
        expected = self.num_blocks(length) - start // target.block_size if tokens else 0
        if len(blocks) != expected:
            return False
        in_vocabulary = not tokens or (min(tokens) >= 0 and max(tokens) < target.vocab_size)
        return in_vocabulary and (not blocks or (min(blocks) >= 0 and max(blocks) < target.num_blocks))

    def _accept_blocks(self, sequence: DraftSequence, first_with_hidden: int) -> None:
        """Key the blocks that are now whole; add those that the cache holds to the valid range.

        A head writes the KV entries from ``first_with_hidden`` on itself, so only blocks with
        earlier entries are looked up.
        """
        if sequence.sent_start > 0:
            return
        size = self._target.block_size
        for block in range(len(sequence.keys), sequence.length // size):
            low, high = block * size, (block + 1) * size
            before = sequence.keys[-1] if sequence.keys else sequence.salt.to_bytes(8, "little")
            content = before + sequence.tokens[low:high].tobytes()
            sequence.keys.append(hashlib.blake2b(content, digest_size=_KEY_BYTES).digest())
            first_entry = max(low, self.first_position)
            can_write = self.needs_hidden and first_entry >= first_with_hidden
            if can_write or self._block_keys[sequence.table[block]] != sequence.keys[block]:
                continue
            if sequence.valid_end == first_entry:
                sequence.valid_end = high
            elif sequence.valid_end < low and self.needs_hidden:
                sequence.valid_start, sequence.valid_end = low, high

    def extend(self, sent: SentRow, sequence: DraftSequence, budget: int) -> Extension | None:
        """Return at most ``budget`` KV entries that a row can write now; count them as written.

        Returns None if there are none. A draft model writes the last token's entry again if that is
        the only way to its logits.
        """
        num_hidden, first = 0, 0
        if self.needs_hidden:
            first, num_hidden = sent.first_hidden, sent.num_hidden
            start = max(sequence.length - num_hidden, sequence.sent_start, self.first_position)
            if sequence.valid_end < start < sequence.length:
                sequence.valid_start = sequence.valid_end = start
            elif sequence.valid_end < start:
                return None
        start = sequence.valid_end
        if self._lost_block(sequence, start):
            return None
        if start == sequence.length > sequence.valid_start and not self.needs_hidden and sent.max_nodes > 1:
            start -= 1
        stop = min(sequence.length, start + budget)
        if start >= stop:
            return None
        self._mark_written(sequence, start, stop)
        sequence.valid_end = max(stop, sequence.valid_end)
        return Extension(sent.row, sequence, start, stop, first + num_hidden - (sequence.length - start))

    def _lost_block(self, sequence: DraftSequence, start: int) -> bool:
        """Return whether another sequence wrote to this one's last block: this one had ended."""
        size = self._target.block_size
        begun = sequence.valid_start < start and start % size != 0
        return begun and self._writers[sequence.table[start // size]] != sequence.number

    def _mark_written(self, sequence: DraftSequence, start: int, stop: int, *, is_claimed: bool = False) -> None:
        size = self._target.block_size
        for block in range(start // size, -(-stop // size)):
            if is_claimed and self._writers[sequence.table[block]] != sequence.number:
                continue
            low, high = block * size, (block + 1) * size
            is_whole = high <= stop and block < len(sequence.keys)
            covered = not self.is_window(sequence) or sequence.valid_start + self._lag <= low
            self._writers[sequence.table[block]] = sequence.number
            self._block_keys[sequence.table[block]] = sequence.keys[block] if is_whole and covered else _NO_KEY
