"""Mask the tokens that a request excludes: all but the allowed, and ends of bad sequences."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from foretoken.sampling import SamplingParams
from verifier_svc.sampling.grammar import Bits, all_bits, bits_of


class TokenMasks:
    """The tokens that ``allowed_token_ids`` and ``bad_token_ids`` let follow one output.

    Attributes:
        bits: uint8 [ceil(vocab_limit / 8)], as in Matcher: the tokens that may come next.
    """

    def __init__(self, params: SamplingParams, output_ids: Sequence[int], vocab_limit: int) -> None:
        allowed = params.allowed_token_ids
        never = frozenset(sequence[0] for sequence in params.bad_token_ids if len(sequence) == 1)
        self._vocab_limit = vocab_limit
        self._always: Bits = bits_of(allowed, vocab_limit) if allowed else all_bits(vocab_limit)
        self._always = self._always & ~bits_of(never, vocab_limit)
        # Longer sequences, by their last token but one: what must come before, and the last token.
        self._endings: dict[int, list[tuple[list[int], int]]] = {}
        for sequence in params.bad_token_ids:
            if len(sequence) > 1:
                *before, last = sequence
                self._endings.setdefault(before[-1], []).append((before, last))
        self._longest = max(map(len, params.bad_token_ids), default=1) - 1
        self._tail = list(output_ids[max(len(output_ids) - self._longest, 0) :])
        self.bits = self._look()

    @classmethod
    def of(cls, params: SamplingParams, output_ids: Sequence[int], vocab_limit: int) -> TokenMasks | None:
        """Return the masks of a request; None if it has none."""
        if not params.allowed_token_ids and not params.bad_token_ids:
            return None
        return cls(params, output_ids, vocab_limit)

    def advance(self, token_id: int) -> None:
        """Note the next token of the output."""
        if self._longest:
            self._tail.append(token_id)
            del self._tail[: len(self._tail) - self._longest]
            self.bits = self._look()

    def after(self, token_id: int) -> TokenMasks:
        """Return the masks after one more token; these stay as they are."""
        following = copy(self)
        following._tail = list(self._tail)
        following.advance(token_id)
        return following

    def _look(self) -> Bits:
        if not self._tail:
            return self._always
        tail = self._tail
        banned = [last for before, last in self._endings.get(tail[-1], ()) if tail[-len(before) :] == before]
        return self._always & ~bits_of(banned, self._vocab_limit) if banned else self._always
