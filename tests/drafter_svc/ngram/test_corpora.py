"""Corpora: exact matches, ranks, bounds, and removal without a trace."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_svc.ngram.corpora import EXTERNAL_SCAN, CorpusStore, find_external, sort_places
from drafter_svc.ngram.sequences import GAP
from foretoken.corpora import CorpusInfo, HoldsCorpora
from foretoken.drafting import TargetInfo
from foretoken.errors import NotFoundError, PreconditionError
from foretoken.limits import MAX_CORPORA
from tests.drafter_svc.ngram.feed import ROOT, VOCAB_SIZE, Feed, make_drafter


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def drafted(feed: Feed, *probes: list[int]) -> list[list[int]]:
    """Return the draft after each probe, for a tenant without history."""
    trees = []
    for probe in probes:
        new = 100 + len(feed.lengths)
        trees.append(feed(0, probe, generation=new, salt=new)[0][1:])
    return trees


def test_a_corpus_is_drafted_from_for_every_tenant() -> None:
    feed = Feed(make_drafter())
    assert isinstance(feed.drafter, HoldsCorpora)
    feed.drafter.corpora.add("a", ids(1, 2, 3, 4, 5))
    for salt in (1, 2):
        assert feed(0, [1, 2, 3], salt=salt, generation=salt) == ([3, 4, 5], [-1, 0, 1])


def test_no_match_in_a_corpus_costs_one_node() -> None:
    feed = Feed(make_drafter())
    feed.drafter.corpora.add("a", ids(1, 2, 3, 4, 5))
    assert feed(0, [7, 3]) == ([3], ROOT)


def test_nothing_is_matched_across_texts_and_corpora() -> None:
    feed = Feed(make_drafter())
    store = feed.drafter.corpora
    store.add("a", ids(1, 2, 3))
    store.add("a", ids(4, 5), append=True)
    store.add("b", ids(6, 7))
    assert feed(0, [2, 3]) == ([3], ROOT)
    assert feed(1, [3, 4]) == ([4], ROOT)
    assert feed(2, [4, 5]) == ([5], ROOT)


@pytest.mark.parametrize(("order", "expected"), [("recency", [3, 5, 4]), ("frequency", [3, 4, 5])])
def test_branches_and_their_order(order: str, expected: list[int]) -> None:
    feed = Feed(make_drafter(order=order))
    feed.drafter.corpora.add("a", ids(1, 2, 3, 4, 9, 1, 2, 3, 4, 9, 1, 2, 3, 5))
    tokens, parents = feed(0, [1, 2, 3])
    assert [tokens[0], *(token for token, parent in zip(tokens, parents, strict=True) if parent == 0)] == expected


def test_own_text_and_history_rank_before_a_corpus() -> None:
    feed = Feed(make_drafter())
    feed.drafter.corpora.add("a", ids(1, 2, 3, 50, 51))
    assert feed(0, [1, 2, 3, 40, 9, 1, 2, 3])[0][1] == 40
    feed.history([1, 2, 3, 60])
    tokens, parents = feed(1, [1, 2, 3])
    assert tokens[1] == 60 and 50 in tokens and parents[tokens.index(50)] == 0


def test_later_corpora_come_after_the_history_of_another_tenant() -> None:
    feed = Feed(make_drafter())
    feed.history([1, 2, 3, 60], salt=5)
    feed.drafter.corpora.add("a", ids(1, 2, 3, 50))
    assert feed(0, [1, 2, 3], salt=6) == ([3, 50], [-1, 0])


def test_add_replaces_and_append_adds() -> None:
    feed = Feed(make_drafter())
    store = feed.drafter.corpora
    assert store.add("a", ids(1, 2, 3)) == CorpusInfo("a", 3)
    assert store.add("b", ids(4, 5, 6)) == CorpusInfo("b", 3)
    assert store.add("a", ids(7, 8, 9, 10), append=True) == CorpusInfo("a", 7)
    assert store.list() == (CorpusInfo("b", 3), CorpusInfo("a", 7))
    assert drafted(feed, [1, 2], [4, 5], [7, 8]) == [[3], [6], [9, 10]]
    assert store.add("a", ids(11, 12, 13)) == CorpusInfo("a", 3)
    assert drafted(feed, [1, 2], [4, 5], [7, 8], [11, 12]) == [[], [6], [], [13]]
    assert feed.drafter.gauges()["ngram_external_tokens"] == 6


def test_what_is_removed_is_gone_at_once() -> None:
    feed = Feed(make_drafter())
    store = feed.drafter.corpora
    for name, first in (("a", 1), ("b", 11), ("c", 21)):
        store.add(name, ids(*range(first, first + 5)))
    store.remove("b")
    assert drafted(feed, [1, 2, 3], [11, 12, 13], [21, 22, 23]) == [[4, 5], [], [24, 25]]
    assert store.list() == (CorpusInfo("a", 5), CorpusInfo("c", 5))
    with pytest.raises(NotFoundError):
        store.remove("b")
    store.remove("a")
    store.remove("c")
    assert sum(array.nbytes for array in store.index) == 0


def test_bounds() -> None:
    store = make_drafter(external_corpus_max_tokens=10).corpora
    store.add("a", ids(*range(6)))
    with pytest.raises(PreconditionError, match="it has 5 tokens and the others 6, of 10 that this drafter may hold"):
        store.add("b", ids(*range(5)))
    with pytest.raises(PreconditionError):
        store.add("a", ids(*range(5)), append=True)
    assert store.list() == (CorpusInfo("a", 6),)
    # A replacement makes room for itself.
    store.add("a", ids(*range(10)))
    store.add("a", ids())
    for number in range(MAX_CORPORA - 1):
        store.add(f"c{number}", ids())
    with pytest.raises(PreconditionError, match=f"{MAX_CORPORA} corpora"):
        store.add("more", ids())


def test_corpora_outlive_an_attachment_to_the_same_target_only() -> None:
    drafter = make_drafter()
    drafter.corpora.add("a", ids(1, 2, 3))
    drafter.attach(TargetInfo("m", VOCAB_SIZE, 200, 4, 32), None)
    assert Feed(drafter)(0, [1, 2])[0] == [2, 3]
    drafter.attach(TargetInfo("other", VOCAB_SIZE, 200, 4, 32), None)
    assert drafter.corpora.list() == () and Feed(drafter)(0, [1, 2])[0] == [2]


def test_drafts_while_corpora_change() -> None:
    feed = Feed(make_drafter())
    store = feed.drafter.corpora
    store.add("kept", ids(1, 2, 3, 4, 5))
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            store.add("other", ids(*range(30, 90)))
            store.remove("other")

    changer = threading.Thread(target=change)
    changer.start()
    try:
        trees = [feed(0, [1, 2, 3], generation=generation, salt=generation) for generation in range(1, 300)]
    finally:
        stop.set()
        changer.join()
    assert trees == [([3, 4, 5], [-1, 0, 1])] * 299


TEXTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=4)


@given(TEXTS, st.integers(0, 3), st.lists(st.integers(0, 3), min_size=1, max_size=20), st.integers(1, 16))
def test_the_longest_matches_are_found(texts: list[list[int]], removed: int, own: list[int], window: int) -> None:
    store = CorpusStore(1000, window)
    for number, text in enumerate(texts):
        store.add(str(number), ids(*text))
    if removed < len(texts):
        store.remove(str(removed))
        del texts[removed]
    index = store.index
    assert sorted(index.order.tolist()) == list(range(len(index.tokens)))
    tokens = index.tokens.tolist()
    padded = [GAP, *own]

    def matched(place: int) -> int:
        size = 0
        while size < min(window, place + 1) and tokens[place - size] == padded[-1 - size] != GAP:
            size += 1
        return size

    lengths = {place: matched(place) for place in range(len(tokens))}
    longest = max(lengths.values(), default=0)
    scanned = np.zeros(EXTERNAL_SCAN, np.int32)
    options = np.array([4, 1, window, 1, 4, 0], np.int64)
    count, found = find_external(index, ids(*padded), options, scanned)
    best = {p for p, size in lengths.items() if size == longest}
    going_on = {p for p in best if tokens and tokens[min(p + 1, len(tokens) - 1)] != GAP}
    if longest < min(window, 2):
        assert count == 0
        return
    assert found == longest
    assert set(scanned[:count].tolist()) <= going_on
    if len(best) <= EXTERNAL_SCAN // 2:
        assert set(scanned[:count].tolist()) == going_on


def test_sorting_compares_the_whole_window() -> None:
    tokens = ids(GAP, *([1] * 40), GAP, 2, *([1] * 39), GAP)
    order = sort_places(tokens, 64)
    contexts = [tokens[max(0, place - 63) : place + 1][::-1].tolist() for place in order]
    assert contexts == sorted(contexts)
