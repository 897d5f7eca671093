"""Texts join and leave while steps overlap: their trees equal those of ordinary requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from drafter_svc.device import prompt_writer
from tests.support.overlap_play import Play, Text, Tree, assert_same
from tests.support.overlapped_drafters import KINDS

# The tree of an empty batch row.
EMPTY: Tree = ([0], [-1], [0.0])


@pytest.fixture(params=["EAGLE3", pytest.param("STANDALONE", marks=pytest.mark.slow)])
def play(request: pytest.FixtureRequest, plays: Callable[[str], Play]) -> Play:
    """Run a test with a head and with a draft model, which needs no hidden states."""
    return plays(request.param)


def expected(play: Play, text: Text) -> list[Tree]:
    """Return the trees of a text after each step, and
    after two more tokens, by ordinary requests.
    """
    play.begin([text], 1)
    play.prompts()
    trees = [play.send(step)[0] for step in range(len(text.counts))]
    play.lengths[0] += 2
    return [*trees, *play.ask([play.row(0, 2)])]


def go_on(play: Play, index: int) -> Tree:
    """Return the tree of a text after two more tokens, which an ordinary request sends."""
    play.lengths[index] += 2
    return play.ask([play.row(index, 2)])[0]


def start(
    play: Play, texts: Sequence[Text], batch_slots: Sequence[int] | None = None, only: int | None = None
) -> list[list[Tree]]:
    """Return the trees to expect of each text, or of ``only`` one; the texts are then new to the
    drafter."""
    trees = []
    for index, text in enumerate(texts):
        if only is None or only == index:
            options = {"seed": 7 + index, "choice": index} | text.options
            trees.append(expected(play, replace(text, options=options)))
    play.begin(texts, 2, batch_slots)
    return trees


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_joins_in_a_run(kind: str, plays: Callable[[str], Play]) -> None:
    """The drafter learns its prompt before its batch row.

    The host does not know all of the other.
    """
    play = plays(kind)
    first, second = Text(5, (1, 3, 2, 1), 11), Text(11, (1, 2, 3), 12)
    of_first, of_second = start(play, [first, second])
    assert_same(play.loop([0], prompts=[(0, 0, 5)]), of_first[:1])
    assert_same(play.loop([0], begins=False), of_first[1:2])
    found = play.loop([0, 1], prompts=[(1, 0, 11)], lag={0: 3})
    assert_same(found, [of_first[2], of_second[0]])
    assert_same(play.loop([0, 1], begins=False), [of_first[3], of_second[1]])
    assert_same(play.loop([None, 1], lag={1: 2}), [EMPTY, of_second[2]])


@pytest.mark.slow
def test_batch_rows_are_left_and_taken(play: Play) -> None:
    """A text ends, and its batch row and batch slot go to another, whose prompt comes in two chunks."""
    texts = [Text(5, (1, 2), 21, left=(9, 0)), Text(7, (1, 2, 1, 3, 1), 22), Text(13, (1, 2, 3), 23)]
    of_ended, of_other, of_heir = start(play, texts, batch_slots=[0, 1, 0])
    assert_same(play.loop([0, 1], prompts=[(0, 0, 5), (1, 0, 7)]), [of_ended[0], of_other[0]])
    # Nothing follows the text that ends, so its tree is only a root.
    assert_same(play.loop([0, 1], begins=False)[1:], of_other[1:2])
    assert_same(play.loop([0, 1], prompts=[(2, 0, 6)])[1:], of_other[2:3])
    found = play.loop([2, None, 1], prompts=[(2, 6, 13)], lag={1: 1})
    assert_same(found, [of_heir[0], EMPTY, of_other[3]])
    assert_same(play.loop([2, None, 1], begins=False), [of_heir[1], EMPTY, of_other[4]])
    assert_same(play.loop([2], lag={2: 3}, is_last=True), of_heir[2:3])
    assert_same([go_on(play, 2), go_on(play, 1)], [of_heir[3], of_other[5]])


@pytest.mark.slow
def test_prompts_without_a_step(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is drafted, and prompts take more passes than may wait for the device."""
    overlapped = play.overlapped
    first, second = Text(13, (1, 3), 31), Text(9, (1, 2), 32)
    of_first, of_second = start(play, [first, second])
    monkeypatch.setattr(overlapped._prompts._prompt_rows, "_pass_rows", 3)
    monkeypatch.setattr(prompt_writer, "_QUEUED_PASSES", 1)
    play.order.calls.clear()
    assert play.loop([], prompts=[(0, 0, 6)]) == []
    assert play.loop([], begins=False) == []
    assert play.loop([], prompts=[(0, 6, 13), (1, 0, 5)]) == []
    assert [name for name, _ in play.order.calls] == ["await", "signal"] * 3
    assert_same(play.loop([0, 1], prompts=[(1, 5, 9)]), [of_first[0], of_second[0]])
    assert_same(play.loop([0, 1], begins=False, is_last=True), [of_first[1], of_second[1]])
    assert_same([go_on(play, 0), go_on(play, 1)], [of_first[2], of_second[2]])


@pytest.mark.slow
def test_a_sequence_that_the_drafter_does_not_know_gets_roots(play: Play) -> None:
    """It never saw the prompt of one, and has a gap in the other."""
    texts = [Text(5, (1, 3), 41), Text(8, (1, 2), 42), Text(6, (1, 1), 43)]
    (of_known,) = start(play, texts, only=0)
    found = play.loop([0, 1, 2], prompts=[(0, 0, 5), (2, 0, 4)])
    assert_same(found[:1], of_known[:1])
    roots = [play.all_tokens[i][play.lengths[i] - 1] for i in (1, 2)]
    assert found[1:] == [([root], [-1], [0.0]) for root in roots]
    assert_same(play.loop([0, 1, 2], begins=False)[:1], of_known[1:2])


@pytest.mark.slow
def test_a_prompt_is_forgotten_if_its_step_does_not_come(play: Play) -> None:
    """The hidden states in the half are then another prompt's, or garbage."""
    texts = [Text(5, (1, 1, 2), 51), Text(9, (1, 2), 52)]
    (of_first,) = start(play, texts, only=0)
    rows = play.overlapped._rows
    assert_same(play.loop([0], prompts=[(0, 0, 5)]), of_first[:1])
    play.loop([0], prompts=[(1, 0, 9)], stamp=3)
    assert all(tree[1] == [-1] for tree in play.loop([0, 1]))
    assert rows.find(1, play.generations[1], 0) is None
    # Nobody goes on from its blocks.
    assert not any(rows._block_keys[block] for block in play.blocks[1][:3])


@pytest.mark.slow
def test_a_release_spares_a_prompt_that_waits_for_its_step(play: Play) -> None:
    texts = [Text(5, (1, 2), 61), Text(9, (1, 2), 62)]
    (of_second,) = start(play, texts, only=1)
    play.loop([0], prompts=[(0, 0, 5), (1, 0, 4)])
    play.order.calls.clear()
    # The first text was aborted. Its step is not needed any more, but the second prompt needs it.
    play.drafter.release([0])
    assert play.order.calls == []
    assert_same(play.loop([1], prompts=[(1, 4, 9)]), of_second[:1])
    play.order.calls.clear()
    play.drafter.release([1])
    assert [name for name, _ in play.order.calls] == ["release"]


@pytest.mark.slow
def test_a_released_prompt_ends_a_run_without_sequences(play: Play) -> None:
    play.begin([Text(6, (1,), 71)], 1)
    play.loop([], prompts=[(0, 0, 6)])
    play.order.calls.clear()
    play.drafter.release([0])
    assert [name for name, _ in play.order.calls] == ["release"]


def test_requests_that_cannot_be_are_refused(play: Play) -> None:
    play.begin([Text(6, (1,), 81)], 1)
    with pytest.raises(ValueError, match="prompt rows"):
        play.loop([], prompts=[(0, 0, 6)], begins=False)
    states = play.overlapped._memory.layout.prompt_rows
    request = play.loop_request([0], prompts=[(0, 0, 6)])
    for start_row in (-1, 2 * states + 1):
        step = request.device_step._replace(prompt_start=start_row)
        with pytest.raises(ValueError, match="hidden states"):
            play.drafter.draft(replace(request, device_step=step))
    with pytest.raises(ValueError, match="are no step of"):
        play.drafter.draft(replace(request, device_step=request.device_step._replace(num_batch_rows=3)))
