"""What a drafter with a cache of its own knows of each sequence: tokens, blocks, and the part of its cache that holds.

Knows no model. The cache uses the verifier's block ids, so nothing is allocated here: a block's entries are this
drafter's if it wrote them, and it may have written them for other tokens. Two facts are kept:

- of each sequence the *valid range* [valid_start, valid_end): slots whose entries were written for its tokens, without
  a hole. It ends at the last token told, or the sequence cannot be drafted for.
- of each block that was written whole, a *key*: a digest of salt and all tokens from position 0 to its end, so that
  a sequence of the same prefix, which the verifier gives the same block, goes on from there. It is cleared before a
  slot of the block is written again.

Whatever was missed (tokens, a generation, a block's change of owner) only makes the valid range shorter.
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
    """One sequence in its slot.

    Attributes:
        told_start, length: tokens at positions [told_start, length) are known.
        tokens: int32 [max_model_len].
        table: int32 [blocks of max_model_len]; block ids, known from ``told_start`` on.
        valid_start, valid_end: the valid range; empty where they are equal.
        keys: of its whole blocks, in order, if it is known from position 0.
        number: tells it from all others.
    """

    __slots__ = (
        "generation",
        "keys",
        "length",
        "number",
        "salt",
        "table",
        "tokens",
        "told_start",
        "valid_end",
        "valid_start",
    )

    def __init__(
        self, number: int, generation: int, salt: int, start: int, first_position: int, capacity: tuple[int, int]
    ) -> None:
        self.number = number
        self.generation = generation
        self.salt = salt
        self.told_start = start
        self.length = start
        # Memory is touched as the sequence grows.
        self.tokens: Int32 = np.empty(capacity[0], np.int32)
        self.table: Int32 = np.zeros(capacity[1], np.int32)
        self.valid_start = self.valid_end = max(start, first_position)
        self.keys: list[bytes] = []


class ToldRow(NamedTuple):
    """What a row of a request tells of its sequence, as plain numbers: columns are slow to read one by one.

    ``first_feature``: index of its first features in the request's ``hidden``; there are ``num_features``.
    """

    row: int
    slot: int
    generation: int
    salt: int
    length: int
    max_nodes: int
    tokens: list[int]
    block_ids: list[int]
    first_feature: int
    num_features: int


def told_rows(request: DraftRequest) -> list[ToldRow]:
    """Of all rows, in their order."""
    tokens, blocks = request.new_tokens.tolist(), request.block_ids.tolist()
    token_starts, hidden_starts, block_starts = (
        starts.tolist() for starts in (request.new_token_starts, request.hidden_starts, request.block_starts)
    )
    columns = (request.slots, request.generations, request.salts, request.lengths, request.max_nodes)
    values = zip(*(column.tolist() for column in columns), strict=True)
    return [
        ToldRow(
            row,
            slot,
            generation,
            salt,
            length,
            max_nodes,
            tokens[token_starts[row] : token_starts[row + 1]],
            blocks[block_starts[row] : block_starts[row + 1]],
            hidden_starts[row],
            hidden_starts[row + 1] - hidden_starts[row],
        )
        for row, (slot, generation, salt, length, max_nodes) in enumerate(values)
    ]


class Extension(NamedTuple):
    """Entries to be written: slots [start, stop) of a sequence, for row ``row`` of the request.

    ``first_feature``: index of the features of token ``start`` in the request's ``hidden``.
    """

    row: int
    sequence: DraftSequence
    start: int
    stop: int
    first_feature: int


class DraftRows:
    """The sequences of one attachment.

    Args:
        first_position: slots before it have no entry: 1 for a head, whose first entry is that of token 1.
        num_depths: modules that are extended one behind the other; module j has no entry in the first j slots of a
            valid range.
        needs_features: whether an entry can be written only from the target's features.
    """

    def __init__(
        self, target: TargetInfo, *, first_position: int, num_depths: int = 1, needs_features: bool = True
    ) -> None:
        self._target = target
        self.first_position = first_position
        self._lag = num_depths - 1
        self._needs_features = needs_features
        num_blocks = -(-target.max_model_len // target.block_size)
        self._capacity = (target.max_model_len, num_blocks)
        # Of each slot the newest sequence, and the one before: its last tokens may come in parts, between the parts of
        # its successor.
        self._sequences: dict[int, list[DraftSequence]] = {}
        self._num_sequences = 0
        self._block_keys: list[bytes] = [_NO_KEY] * target.num_blocks
        # The sequence that wrote into each block last.
        self._writers: list[int] = [-1] * target.num_blocks

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest sequence."""
        return self._capacity[1]

    def release(self, slot: int) -> None:
        """Forget a slot's sequences; their whole blocks stay for others of the same prefix."""
        self._sequences.pop(slot, None)

    def num_blocks(self, length: int) -> int:
        return -(-length // self._target.block_size)

    def is_window(self, sequence: DraftSequence) -> bool:
        """Whether entries before the valid range are missing."""
        return sequence.valid_start > self.first_position

    def learn(self, told: ToldRow) -> DraftSequence | None:
        """Take a row's new tokens and blocks, and accept what the cache holds of them; None for a row that is none.

        A length that is not what was told before plus the new tokens starts the sequence anew at the gap. A row
        without any token is that of a prediction.
        """
        length = told.length
        start = length - len(told.tokens)
        if length == 0:
            return None
        if not self._is_sound(told, start):
            self.release(told.slot)
            return None
        sequence = self._find(told, start)
        if sequence is None:
            return None
        sequence.tokens[start:length] = told.tokens
        first_block = start // self._target.block_size
        sequence.table[first_block : first_block + len(told.block_ids)] = told.block_ids
        sequence.length = length
        self._accept_blocks(sequence, length - told.num_features)
        return sequence

    def known(self, told: ToldRow) -> DraftSequence | None:
        """The row's sequence, if it was told up to just its length: where a run in device memory goes on."""
        for sequence in self._sequences.get(told.slot, ()):
            if (sequence.generation, sequence.salt, sequence.length) == (told.generation, told.salt, told.length):
                return sequence
        return None

    def can_go_on(self, sequence: DraftSequence) -> bool:
        """Whether the entry of its next token would lengthen its valid range."""
        return sequence.valid_end == sequence.length and not self._lost_block(sequence, sequence.valid_end)

    def append_blocks(self, sequence: DraftSequence, first: int, block_ids: list[int]) -> bool:
        """Blocks of positions that are not told yet, from logical block ``first`` on. False: they cannot be."""
        target, stop = self._target, first + len(block_ids)
        if stop > self.max_blocks or (block_ids and not 0 <= min(block_ids) <= max(block_ids) < target.num_blocks):
            return False
        sequence.table[first:stop] = block_ids
        return True

    def claim_blocks(self, sequence: DraftSequence, first: int, stop: int) -> None:
        """Logical blocks [first, stop) may be written to from now on, before ``advance`` says what was."""
        for block in sequence.table[first:stop].tolist():
            self._writers[block] = sequence.number
            self._block_keys[block] = _NO_KEY

    def advance(self, sequence: DraftSequence, tokens: list[int], *, is_written: bool) -> bool:
        """Take the tokens behind those that were told, their blocks known. False, and nothing is taken: they cannot be.

        ``is_written``: their entries were written too, into claimed blocks; the valid range ended before them. A block
        that another sequence has claimed meanwhile stays that one's: this one has ended, and its tokens are read late.
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

    def _find(self, told: ToldRow, start: int) -> DraftSequence | None:
        """The sequence that was told up to ``start``, or a new one.

        None for one that its successor has replaced, and for one of which no token is known.
        """
        known, generation = self._sequences.setdefault(told.slot, []), told.generation
        for sequence in known:
            if (sequence.generation, sequence.salt, sequence.length) == (generation, told.salt, start):
                return sequence
        if start == told.length or (known and generation < known[0].generation):
            return None
        self._num_sequences += 1
        sequence = DraftSequence(self._num_sequences, generation, told.salt, start, self.first_position, self._capacity)
        # One of the same generation is the same sequence after a gap.
        before = known[:1] if known and known[0].generation != generation else known[1:]
        self._sequences[told.slot] = [sequence, *before]
        return sequence

    def _is_sound(self, told: ToldRow, start: int) -> bool:
        target, length, tokens, blocks = self._target, told.length, told.tokens, told.block_ids
        if not 0 <= told.slot < target.max_slots or not 0 <= start <= length <= target.max_model_len:
            return False
        expected = self.num_blocks(length) - start // target.block_size if tokens else 0
        if len(blocks) != expected:
            return False
        in_vocabulary = not tokens or (min(tokens) >= 0 and max(tokens) < target.vocab_size)
        return in_vocabulary and (not blocks or (min(blocks) >= 0 and max(blocks) < target.num_blocks))

    def _accept_blocks(self, sequence: DraftSequence, first_featured: int) -> None:
        """Key the blocks that are now told whole; those that the cache holds become part of the valid range.

        A head writes its own entries from ``first_featured`` on, so only blocks with a token before it are looked up.
        """
        if sequence.told_start > 0:
            return
        size = self._target.block_size
        for block in range(len(sequence.keys), sequence.length // size):
            low, high = block * size, (block + 1) * size
            before = sequence.keys[-1] if sequence.keys else sequence.salt.to_bytes(8, "little")
            content = before + sequence.tokens[low:high].tobytes()
            sequence.keys.append(hashlib.blake2b(content, digest_size=_KEY_BYTES).digest())
            can_write = self._needs_features and low >= first_featured
            if can_write or self._block_keys[sequence.table[block]] != sequence.keys[block]:
                continue
            if sequence.valid_end == max(low, self.first_position):
                sequence.valid_end = high
            elif sequence.valid_end < low and self._needs_features:
                sequence.valid_start, sequence.valid_end = low, high

    def extend(self, told: ToldRow, sequence: DraftSequence, budget: int) -> Extension | None:
        """The entries that a row can write now, at most ``budget``; None if there are none. They count as written.

        A draft model writes the last token's again where that is the only way to its logits.
        """
        num_features, first = 0, 0
        if self._needs_features:
            first, num_features = told.first_feature, told.num_features
            start = max(sequence.length - num_features, sequence.told_start, self.first_position)
            if sequence.valid_end < start < sequence.length:
                sequence.valid_start = sequence.valid_end = start
            elif sequence.valid_end < start:
                return None
        start = sequence.valid_end
        if self._lost_block(sequence, start):
            return None
        if start == sequence.length > sequence.valid_start and not self._needs_features and told.max_nodes > 1:
            start -= 1
        stop = min(sequence.length, start + budget)
        if start >= stop:
            return None
        self._mark_written(sequence, start, stop)
        sequence.valid_end = max(stop, sequence.valid_end)
        return Extension(told.row, sequence, start, stop, first + num_features - (sequence.length - start))

    def _lost_block(self, sequence: DraftSequence, start: int) -> bool:
        """Whether another sequence has written into the block that this one has begun: it ended, and is told late."""
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
