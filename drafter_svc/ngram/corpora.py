"""Corpora: the operator's texts, from which all tenants draft; changed while the drafter runs.

All corpora are one array of tokens and one array of places in it, sorted by the tokens that end at
each place, read backwards. All places with the longest match of a sequence's end are therefore
neighbours, and one binary search finds them for any number of corpora: 8 bytes a token and some 20
comparisons a draft.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np
from foretoken_kernels.cpu.compile import inlined_uncounted

from drafter_svc.ngram.sequences import MAX_WINDOW, MIN_WINDOW, matched_tokens
from drafter_svc.ngram.trie import GAP, Int64
from foretoken.corpora import CorpusInfo
from foretoken.errors import NotFoundError, PreconditionError
from foretoken.limits import MAX_CORPORA
from foretoken.tree import Int32

# Places with the longest match whose continuations are compared.
EXTERNAL_SCAN = 32


class SortedCorpora(NamedTuple):
    """Attributes:
    tokens: int32 [n]; each corpus' texts with a GAP before and after each.
    order: int32 [n]; places in ``tokens``, sorted by the tokens that end there, the last token
    first.
    """

    tokens: Int32
    order: Int32


def sort_places(tokens: Int32, window: int) -> Int32:
    """Return ``SortedCorpora.order``, exact for contexts of ``window`` tokens.

    Prefix doubling (Manber and Myers, 1990) on the reversed text: each round doubles the tokens
    compared.
    """
    # A GAP ranks 0, and so does everything before the beginning.
    ranks = tokens.astype(np.int64) + 1
    order = np.argsort(ranks, kind="stable")
    compared = 1
    while compared < window and len(tokens):
        keys = ranks * (int(ranks.max()) + 1)
        keys[compared:] += ranks[:-compared]
        order = np.argsort(keys, kind="stable")
        ordered = keys[order]
        ranks[order] = np.concatenate(([0], np.cumsum(ordered[1:] != ordered[:-1])))
        compared *= 2
    return order.astype(np.int32)


@inlined_uncounted
def is_before(tokens: Int32, place: int, own: Int32, most: int) -> bool:
    """Return whether the text up to ``place`` sorts before ``own``, both read backwards.

    ``most``: tokens that are compared at most.
    """
    last = len(own) - 1
    for back in range(min(most, len(own))):
        wanted = own[last - back]
        if wanted == GAP:
            return False
        token = tokens[place - back] if back <= place else GAP
        if token != wanted:
            return bool(token < wanted)
    return False


@inlined_uncounted
def find_external(corpora: SortedCorpora, own: Int32, options: Int64, scanned: Int32) -> tuple[int, int]:
    """Fill ``scanned`` with the longest matches of the end of ``own``.

    Return (places, matched tokens).
    """
    tokens, order, most = corpora.tokens, corpora.order, options[MAX_WINDOW]
    low, high = 0, len(order)
    while low < high:
        middle = (low + high) // 2
        if is_before(tokens, order[middle], own, most):
            low = middle + 1
        else:
            high = middle
    last, longest = len(own) - 1, 0
    for near in (low - 1, low):
        if 0 <= near < len(order):
            longest = max(longest, matched_tokens(tokens, order[near], own, last, most))
    count = 0
    if longest < max(options[MIN_WINDOW], min(most, 2)):
        return 0, 0
    for step in (-1, 1):
        near = low - 1 if step < 0 else low
        room = count + EXTERNAL_SCAN // 2
        while 0 <= near < len(order) and count < room:
            place = order[near]
            if matched_tokens(tokens, place, own, last, most) < longest:
                break
            if tokens[place + 1] != GAP:
                scanned[count] = place
                count += 1
            near += step
    return count, longest


@inlined_uncounted
def rank_continuations(corpora: SortedCorpora, scanned: Int32, count: int, by_frequency: bool, tallies: Int64) -> int:
    """Keep one place for each continuation in ``scanned``, in the order of drafting.

    Return how many.

    They are sorted by ``tallies``, which counts each continuation, or by place, the latest first.
    """
    kept = 0
    for i in range(count):
        place, same = scanned[i], 0
        while same < kept and corpora.tokens[scanned[same] + 1] != corpora.tokens[place + 1]:
            same += 1
        if same == kept:
            scanned[kept], tallies[kept] = place, 0
            kept += 1
        tallies[same] += 1
        scanned[same] = max(scanned[same], place)
    for i in range(1, kept):
        place, tally, at = scanned[i], tallies[i], i
        while at > 0 and (
            (by_frequency and tallies[at - 1] < tally)
            or ((not by_frequency or tallies[at - 1] == tally) and scanned[at - 1] < place)
        ):
            scanned[at], tallies[at] = scanned[at - 1], tallies[at - 1]
            at -= 1
        scanned[at], tallies[at] = place, tally
    return kept


class CorpusStore:
    """The ``foretoken.corpora.Corpora`` of one n-gram drafter.

    It drafts from the old index until the new one is sorted.
    """

    def __init__(self, max_tokens: int, window: int) -> None:
        """``max_tokens``: bound of all corpora together; ``window``: bound of matched tokens."""
        self._max_tokens = max_tokens
        self._window = window
        self._lock = threading.Lock()
        # For each corpus, in the order of ``index.tokens``: its entries there, and its tokens
        # without gaps.
        self._sizes: dict[str, tuple[int, int]] = {}
        # Replaced, never changed in place.
        self.index = _EMPTY

    @property
    def num_tokens(self) -> int:
        return sum(tokens for _, tokens in self._sizes.values())

    def add(self, name: str, token_ids: Int32, *, append: bool = False) -> CorpusInfo:
        """Add or replace a corpus, or append to it. Raises PreconditionError if it does not fit."""
        with self._lock:
            entries, held = self._sizes.get(name, (0, 0)) if append else (0, 0)
            others = self.num_tokens - self._sizes.get(name, (0, 0))[1]
            if others + held + len(token_ids) > self._max_tokens:
                raise PreconditionError(
                    f"corpus {name!r} does not fit: it has {held + len(token_ids)} tokens and the others {others}, of "
                    f"{self._max_tokens} that this drafter may hold (--speculative-ngram-external-corpus-max-tokens)",
                    field="token_ids",
                )
            if name not in self._sizes and len(self._sizes) >= MAX_CORPORA:
                raise PreconditionError(
                    f"there are {MAX_CORPORA} corpora already, the most that are allowed", field="name"
                )
            own = self._slice(name)
            kept = self.index.tokens[own] if append and name in self._sizes else _GAPS
            rest = np.delete(self.index.tokens, own) if name in self._sizes else self.index.tokens
            tokens = np.concatenate([rest, kept, token_ids.astype(np.int32), _GAPS])
            index = SortedCorpora(tokens, sort_places(tokens, self._window))
            self._sizes.pop(name, None)
            # The gap before a corpus counts as its own.
            self._sizes[name] = (max(entries, 1) + len(token_ids) + 1, held + len(token_ids))
            self.index = index
            return CorpusInfo(name, held + len(token_ids))

    def remove(self, name: str) -> None:
        """Remove a corpus. Raises NotFoundError if there is none."""
        with self._lock:
            if name not in self._sizes:
                raise NotFoundError(f"there is no corpus {name!r}", field="name")
            kept = np.ones(len(self.index.tokens), np.bool_)
            kept[self._slice(name)] = False
            moved = np.cumsum(kept, dtype=np.int32) - 1
            order = self.index.order[kept[self.index.order]]
            self.index = SortedCorpora(self.index.tokens[kept], moved[order])
            del self._sizes[name]

    def list(self) -> tuple[CorpusInfo, ...]:
        with self._lock:
            return tuple(CorpusInfo(name, tokens) for name, (_, tokens) in self._sizes.items())

    def clear(self) -> None:
        """Remove all corpora: the ids mean other tokens to another target."""
        with self._lock:
            self._sizes, self.index = {}, _EMPTY

    def _slice(self, name: str) -> slice:
        """Return where a corpus is in the tokens of all."""
        start = 0
        for other, (entries, _) in self._sizes.items():
            if other == name:
                return slice(start, start + entries)
            start += entries
        return slice(start, start)


_GAPS = np.array([GAP], np.int32)
_EMPTY = SortedCorpora(np.zeros(0, np.int32), np.zeros(0, np.int32))
