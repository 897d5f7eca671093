"""Texts join and leave while steps overlap: their trees equal those of ordinary requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest

from tests.drafter_svc.device.test_resident_draft import KINDS, make, on
from tests.support.resident_play import Play, Text, Tree, assert_same

# The tree of an empty seat.
EMPTY: Tree = ([0], [-1], [0.0])


@pytest.fixture(scope="module")
def plays(tmp_path_factory: pytest.TempPathFactory, device: str) -> Callable[[str], Play]:
    """Return a function that gives the play of a kind; each drafter is attached once."""

    @cache
    def attached(kind: str) -> Play:
        drafter, target, width = make(kind, tmp_path_factory.mktemp("drafter"), on(device))
        drafter.attach(target, None)
        return Play(drafter, device, vocab=target.vocab_size, width=width)

    return attached


@pytest.fixture(params=["EAGLE3", pytest.param("STANDALONE", marks=pytest.mark.slow)])
def play(request: pytest.FixtureRequest, plays: Callable[[str], Play]) -> Play:
    """Run a test with a head and with a draft model, which needs no hidden states."""
    return plays(request.param)


def expected(play: Play, text: Text) -> list[Tree]:
    """Return the trees of a text after each step, and after two more tokens, by ordinary requests."""
    play.begin([text], 1)
    play.prompts()
    trees = [play.send(step)[0] for step in range(len(text.counts))]
    play.lengths[0] += 2
    return [*trees, *play.ask([play.row(0, 2)])]


def go_on(play: Play, index: int) -> Tree:
    """Return the tree of a text after two more tokens, which an ordinary request sends."""
    play.lengths[index] += 2
    return play.ask([play.row(index, 2)])[0]


def start(play: Play, texts: Sequence[Text], slots: Sequence[int] | None = None) -> list[list[Tree]]:
    """Return the trees to expect; the texts are new to the drafter then."""
    trees = []
    for index, text in enumerate(texts):
        options = {"seed": 7 + index, "choice": index} | text.options
        trees.append(expected(play, replace(text, options=options)))
    play.begin(texts, 2, slots)
    return trees


@pytest.mark.parametrize("kind", [k if k == "EAGLE3" else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def test_a_text_joins_in_a_run(kind: str, plays: Callable[[str], Play]) -> None:
    """Its prompt is learnt before its seat is looked at; the host does not know all of the other."""
    play = plays(kind)
    first, second = Text(5, (1, 3, 2, 1), 11), Text(11, (1, 2, 3), 12)
    of_first, of_second = start(play, [first, second])
    assert_same(play.loop([0], prompts=[(0, 0, 5)]), of_first[:1])
    assert_same(play.loop([0], begins=False), of_first[1:2])
    found = play.loop([0, 1], prompts=[(1, 0, 11)], lag={0: 3})
    assert_same(found, [of_first[2], of_second[0]])
    assert_same(play.loop([0, 1], begins=False), [of_first[3], of_second[1]])
    assert_same(play.loop([None, 1], lag={1: 2}), [EMPTY, of_second[2]])
