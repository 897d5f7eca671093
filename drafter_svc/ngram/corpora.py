"""Texts from outside that every tenant's sequences may draft from: added, listed and removed while it drafts.

All corpora together are one array of tokens and one array of its places, sorted by the tokens that end at each place,
read backwards. So all places with the longest match of a sequence's end lie beside each other, and one binary search
finds them, however many corpora there are: 8 bytes a token and some 20 comparisons a draft.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np

from drafter_svc.ngram.sequences import GAP, MAX_WINDOW, MIN_WINDOW, matched_tokens
from drafter_svc.ngram.trie import Int64, compiled
from foretoken.corpora import CorpusInfo
from foretoken.errors import NotFoundError, PreconditionError
from foretoken.limits import MAX_CORPORA
from foretoken.tree import Int32

# Places with the longest match whose continuations are looked at.
EXTERNAL_SCAN = 32


class Corpora(NamedTuple):
    """Attributes:
    tokens: int32 [n]; each corpus' texts with a GAP before and after each.
    order: int32 [n]; places of ``tokens``, sorted by what ends there, the last token first.
    """

    tokens: Int32
    order: Int32


def sort_places(tokens: Int32, window: int) -> Int32:
    """``Corpora.order``, exact for contexts of ``window`` tokens.

    Prefix doubling (Manber and Myers, 1990) over the reversed text: each round doubles the tokens compared.
    """
    # GAP gives 0, which also stands before the beginning.
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


@compiled
def is_before(tokens: Int32, place: int, own: Int32, most: int) -> bool:
    """Whether what ends at ``place`` sorts before the end of ``own``, read backwards up to ``most`` tokens."""
    last = len(own) - 1
    for back in range(min(most, len(own))):
        wanted = own[last - back]
        if wanted == GAP:
            return False
        token = tokens[place - back] if back <= place else GAP
        if token != wanted:
            return bool(token < wanted)
    return False


@compiled
def find_external(corpora: Corpora, own: Int32, options: Int64, scanned: Int32) -> tuple[int, int]:
    """Fill ``scanned`` with places that match the end of ``own`` longest: (how many, matched tokens)."""
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


@compiled
def rank_continuations(corpora: Corpora, scanned: Int32, count: int, by_frequency: bool, tallies: Int64) -> int:
    """Keep one place for each continuation in ``scanned``, the first to draft first: how many.

    Sorted by ``tallies``, which counts each, or by place: what was added later stands behind.
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
    """``foretoken.corpora.Corpora`` of one n-gram drafter, which goes on with the old ones until new are sorted."""

    def __init__(self, max_tokens: int, window: int) -> None:
        """``max_tokens``: of all corpora together. ``window``: matched tokens at most."""
        self._max_tokens = max_tokens
        self._window = window
        self._lock = threading.Lock()
        # In the order of ``_index.tokens``: its entries and, without the gaps among them, tokens of each.
        self._sizes: dict[str, tuple[int, int]] = {}
        self._index = _EMPTY

    @property
    def index(self) -> Corpora:
        """What to draft from now; never changed in place."""
        return self._index

    @property
    def num_tokens(self) -> int:
        return sum(tokens for _, tokens in self._sizes.values())

    def add(self, name: str, token_ids: Int32, *, append: bool = False) -> CorpusInfo:
        with self._lock:
            entries, held = self._sizes.get(name, (0, 0)) if append else (0, 0)
            others = self.num_tokens - self._sizes.get(name, (0, 0))[1]
            if others + held + len(token_ids) > self._max_tokens:
                raise PreconditionError(
                    f"corpus {name!r} does not fit: {held + len(token_ids)} tokens beside {others} of others, and this "
                    f"drafter holds {self._max_tokens} (--speculative-ngram-external-corpus-max-tokens)",
                    field="token_ids",
                )
            if name not in self._sizes and len(self._sizes) >= MAX_CORPORA:
                raise PreconditionError(f"there are {MAX_CORPORA} corpora, and no more may be", field="name")
            own = self._slice(name)
            kept = self._index.tokens[own] if append and name in self._sizes else _GAPS
            rest = np.delete(self._index.tokens, own) if name in self._sizes else self._index.tokens
            tokens = np.concatenate([rest, kept, token_ids.astype(np.int32), _GAPS])
            index = Corpora(tokens, sort_places(tokens, self._window))
            self._sizes.pop(name, None)
            # The gap before it belongs to a corpus too.
            self._sizes[name] = (max(entries, 1) + len(token_ids) + 1, held + len(token_ids))
            self._index = index
            return CorpusInfo(name, held + len(token_ids))

    def remove(self, name: str) -> None:
        with self._lock:
            if name not in self._sizes:
                raise NotFoundError(f"there is no corpus {name!r}", field="name")
            kept = np.ones(len(self._index.tokens), np.bool_)
            kept[self._slice(name)] = False
            moved = np.cumsum(kept, dtype=np.int32) - 1
            order = self._index.order[kept[self._index.order]]
            self._index = Corpora(self._index.tokens[kept], moved[order])
            del self._sizes[name]

    def list(self) -> tuple[CorpusInfo, ...]:
        with self._lock:
            return tuple(CorpusInfo(name, tokens) for name, (_, tokens) in self._sizes.items())

    def clear(self) -> None:
        """Of another target they are other tokens."""
        with self._lock:
            self._sizes, self._index = {}, _EMPTY

    def _slice(self, name: str) -> slice:
        """Where a corpus lies in the tokens of all."""
        start = 0
        for other, (entries, _) in self._sizes.items():
            if other == name:
                return slice(start, start + entries)
            start += entries
        return slice(start, start)


_GAPS = np.array([GAP], np.int32)
_EMPTY = Corpora(np.zeros(0, np.int32), np.zeros(0, np.int32))
