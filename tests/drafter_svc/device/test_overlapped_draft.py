"""Drafts from device memory: the trees of a run, and after it, equal those of ordinary requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drafter_svc.device import device_wait, draft_stages
from drafter_svc.device.draft_run import DraftRun
from drafter_svc.model.placement import ON_CPU
from drafter_svc.trees import passes as draft_passes
from foretoken.drafter import DraftsOverlapped
from foretoken.errors import PreconditionError
from foretoken.kv_cache import KVCache
from foretoken.models.device_journal import DeviceJournal
from foretoken.overlap_memory import OverlapLayout, OverlapMemory, StreamOrder
from tests.references.head_files import (
    VOCAB,
)
from tests.support.overlap_play import SIZES, Play, Text, Tree, assert_same, trees_of
from tests.support.overlapped_drafters import KINDS, make, on
from tests.support.paged_draft import Row, request_of

TEMPERATURE = {"temperature": 0.8, "top_k": 40, "top_p": 0.95}


@pytest.fixture(params=[pytest.param(kind, marks=pytest.mark.slow) for kind in ("EAGLE3", "STANDALONE")])
def play(request: pytest.FixtureRequest, plays: Callable[[str], Play]) -> Play:
    """Run a test with a head and with a draft model, which may differ in it."""
    return plays(request.param)


@pytest.fixture
def head(plays: Callable[[str], Play]) -> Play:
    return plays("EAGLE3")


def sent(play: Play, texts: Sequence[Text], seed: int, lost: Sequence[int] = ()) -> tuple[list[list[Tree]], list[Tree]]:
    """Return the trees of all steps, and of the finale, by ordinary requests.

    The requests of the steps ``lost`` never arrive.
    """
    play.begin(texts, seed)
    play.prompts()
    steps: list[list[Tree]] = []
    for step in range(len(texts[0].counts)):
        if step in lost:
            play.lengths = [n + text.counts[step] for n, text in zip(play.lengths, texts, strict=True)]
            steps.append([])
        else:
            steps.append(play.send(step))
    return steps, play.finale()


def is_root(tree: Tree) -> bool:
    return tree[1:] == ([-1], [0.0])


def check_run(play: Play, texts: Sequence[Text]) -> list[list[Tree]]:
    """Compare one run of all steps with ordinary requests."""
    expected, expected_finale = sent(play, texts, 1)
    play.begin(texts, 2)
    play.prompts()
    last = len(texts[0].counts) - 1
    run = []
    for step in range(last + 1):
        found = play.post(step, begins=step == 0, is_last=step == last)
        kept = [i for i, text in enumerate(texts) if text.counts[step]]
        assert_same([found[i] for i in kept], [expected[step][i] for i in kept])
        assert all(is_root(found[i]) for i in set(range(len(texts))) - set(kept))
        run.append(found)
    assert_same(play.finale(), expected_finale)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_texts(kind: str, plays: Callable[[str], Play]) -> None:
    """The texts have different lengths and cross block boundaries."""
    deep = {"max_depth": 3}
    texts = [Text(5, (1, 3, 2), 11, options=deep), Text(12, (2, 1, 3), 12, options=deep)]
    run = check_run(plays(kind), texts)
    assert all(len(tree[0]) == SIZES.nodes for trees in run for tree in trees)


def test_three_texts_at_a_temperature(play: Play) -> None:
    texts = [
        Text(9, (3, 2), 21, options=TEMPERATURE),
        Text(4, (1, 1), 22, options={"max_depth": 1, "max_nodes": 3}),
        Text(6, (2, 3), 23, options={"temperature": 0.6}),
    ]
    check_run(play, texts)


@pytest.mark.slow
def test_trees_of_more_levels_than_beams(device: str, tmp_path: Path) -> None:
    """A tree runs 64 beams, eight levels of eight; it has no deeper levels on any device."""
    shape = {"max_nodes": 64, "max_depth": 12, "max_branches": 8}
    found = []
    for name, placement in (("cpu", ON_CPU), ("device", on(device))):
        drafter, target, width = make("EAGLE3", tmp_path / name, placement)
        drafter.attach(replace(target, max_nodes=64), None)
        row = Row(Text(9, (), 3).tokens(VOCAB)[:9], 9, list(range(20)), generation=1, width=width, **shape)
        found.append(trees_of(drafter.draft(request_of([row]))))
    assert len(found[0][0][0]) == 64
    assert_same(found[1], found[0])


def test_three_texts_and_four_have_one_graph(play: Play) -> None:
    """This holds for requests and runs: a text that comes or ends does not wait for a capture."""
    texts = [Text(5 + n, (1, 2), 24 + n) for n in range(4)]
    for count in (3, 4):
        check_run(play, texts[:count])
    passes = play.drafter._passes
    assert passes is not None
    growth, overlapped = passes._growth, passes._overlapped
    for stages in (growth._stages, overlapped._stages._stages):  # type: ignore[attr-defined, union-attr]
        assert 4 in {shape.trees for shape in stages} and 3 not in {shape.trees for shape in stages}


def test_a_text_ends_within_a_run(play: Play) -> None:
    """The drafter learns its last tokens and drafts nothing; near its end trees are small."""
    texts = [Text(5, (3, 2, 0, 0), 31, left=(3, 0, 0, 0)), Text(7, (1, 2, 3, 1), 32, left=(99, 9, 2, 1))]
    run = check_run(play, texts)
    assert [len(trees[0][0]) for trees in run] == [3, 1, 1, 1]
    assert run[3][0][0] == [texts[0].tokens(play.vocab)[9]]
    assert [len(trees[1][0]) for trees in run] == [6, 6, 2, 1]


def test_blocks_of_a_text_that_ended_are_given_to_another(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ended text's last tokens are read after the new owner has filled its blocks."""
    texts = [Text(5, (3, 2, 0, 0, 0), 36, left=(3, 0, 0, 0, 0)), Text(7, (1, 2, 3, 1, 3), 37)]
    expected, finale = sent(play, texts, 1)
    play.begin(texts, 2)
    # The other text needs the first one's blocks from its third step on.
    play.blocks[1][3:6] = reversed(play.blocks[0][:3])
    monkeypatch.setattr(DraftRun, "read_ready", lambda self: None)
    play.prompts()
    for step in range(5):
        found = play.post(step, begins=step == 0, is_last=step == 4)
        assert_same(found[1:], [expected[step][1]])
    play.lengths[1] += 2
    assert_same(play.ask([play.row(1, 2)]), finale[1:2])


@pytest.mark.slow
def test_a_text_that_ended_is_not_counted_as_drafted_for(head: Play) -> None:
    """It stops counting once its step without tokens is read."""
    assert head.drafter._passes is not None
    figures = head.drafter._passes.figures
    head.begin([Text(5, (3, 2, 0, 0, 0), 38, left=(3, 0, 0, 0, 0)), Text(7, (1, 2, 3, 1, 3), 39)], 1)
    head.prompts()
    before = figures.drafted_rows
    for step in range(5):
        head.post(step, begins=step == 0, is_last=step == 4)
    assert figures.drafted_rows == before + 5 + 3


def test_the_order_of_the_streams(head: Play) -> None:
    head.begin([Text(5, (1, 2, 1), 41)], 1)
    head.prompts()
    head.order.calls.clear()
    for step in range(3):
        head.post(step, begins=step == 0, is_last=step == 2)
    first = head.memory.draft_stamp.item() - 2
    expected = [(name, first + step) for step in range(3) for name in ("await", "signal")]
    assert head.order.calls == expected


def test_a_text_that_the_drafter_has_missed_tokens_of(play: Play) -> None:
    """The drafter missed tokens, so it does not draft in the run; a gap remains after it."""
    texts = [Text(9, (1, 3), 51, sent=8), Text(6, (2, 1), 52)]
    play.begin(texts, 1)
    play.prompts()
    expected = []
    for step in range(2):
        play.lengths[0] += texts[0].counts[step]
        play.lengths[1] += texts[1].counts[step]
        expected.append(play.ask([play.row(1, texts[1].counts[step])])[0])
    expected_finale = play.finale()
    play.begin(texts, 2)
    play.prompts()
    for step in range(2):
        found = play.post(step, begins=step == 0, is_last=step == 1)
        assert is_root(found[0]) and found[0][0] == [play.all_tokens[0][play.lengths[0] - 1]]
        assert_same(found[1:], [expected[step]])
    assert_same(play.finale(), expected_finale)


def test_a_text_that_waits_for_its_entries_is_learned(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head lacks hidden states, or a draft model is behind: both catch up after the run."""
    texts = [Text(11, (1, 3, 1), 61, hidden=0), Text(5, (2, 1, 3), 62)]
    passes = play.drafter._passes
    assert passes is not None
    monkeypatch.setattr(draft_passes, "SMALL_EXTENSION", 5)
    trees = []
    for seed in (1, 2):
        play.begin(texts, seed)
        with monkeypatch.context() as short:
            short.setattr(passes, "_budget", None if play.width else 5)
            play.prompts()
            steps = []
            for step in range(3):
                if seed == 1 and not play.width:
                    # The drafter learns only these tokens within the run.
                    play.lengths[0] += texts[0].counts[step]
                    play.lengths[1] += texts[1].counts[step]
                    waiting = play.row(0, texts[0].counts[step], max_nodes=1)
                    steps.append(play.ask([waiting, play.row(1, texts[1].counts[step])])[1])
                elif seed == 1:
                    steps.append(play.send(step)[1])
                else:
                    found = play.post(step, begins=step == 0, is_last=step == 2)
                    assert is_root(found[0]) and found[0][0] == [play.all_tokens[0][play.lengths[0] - 1]]
                    steps.append(found[1])
        with monkeypatch.context() as wide:
            wide.setattr(draft_passes, "SMALL_EXTENSION", 64)
            trees.append(steps + play.finale())
    assert_same(trees[1], trees[0])
    assert all(len(tree[0]) == SIZES.nodes for tree in trees[1])


def test_a_step_of_another_number_leaves_a_gap(play: Play) -> None:
    texts = [Text(5, (1, 3, 2), 71), Text(6, (2, 2, 1), 72)]
    expected, _ = sent(play, texts, 1)
    play.begin(texts, 2)
    play.prompts()
    assert_same(play.post(0, begins=True), expected[0])
    roots = [play.all_tokens[i][play.lengths[i] - 1] for i in range(2)]
    found = play.post(1, stamp=3)
    assert all(map(is_root, found)) and [tree[0][0] for tree in found] == roots
    found = play.post(2, is_last=True)
    assert all(map(is_root, found))
    assert [tree[0][0] for tree in found] == [play.all_tokens[i][play.lengths[i] - 1] for i in range(2)]
    finale = play.finale()
    # As if the steps had been lost on their way.
    assert_same(finale, sent(play, texts, 3, lost=(1, 2))[1])


@pytest.mark.slow
def test_a_length_that_does_not_follow_releases_the_text(head: Play) -> None:
    texts = [Text(5, (1, 3, 2), 81), Text(6, (2, 2, 1), 82)]
    expected, _ = sent(head, texts, 1)
    head.begin(texts, 2)
    head.prompts()
    head.post(0, begins=True)
    found = head.post(1, lengths=[20])
    assert is_root(found[0])
    assert_same(found[1:], expected[1][1:])
    found = head.post(2, is_last=True)
    assert is_root(found[0])
    assert_same(found[1:], expected[2][1:])
    rows = head.drafter._passes._rows  # type: ignore[union-attr]
    assert 0 not in rows._sequences and rows._sequences[1][0].length == head.lengths[1]


def test_runs_follow_each_other(play: Play) -> None:
    """The second run names blocks again that the first one had in reserve."""
    texts = [Text(5, (1, 1, 3, 1, 2), 91), Text(7, (2, 2, 1, 3, 1), 92)]
    expected, expected_finale = sent(play, texts, 1)
    play.begin(texts, 2)
    play.prompts()
    assert_same(play.post(0, begins=True, is_last=True), expected[0])
    assert_same(play.post(1, begins=True), expected[1])
    # This one was left open.
    assert_same(play.send(2), expected[2])
    assert_same(play.post(3, begins=True), expected[3])
    assert_same(play.post(4, begins=True, is_last=True), expected[4])
    assert_same(play.finale(), expected_finale)


def test_runs_of_one_step_each(play: Play) -> None:
    """Runs of one step are the verifier's ordinary steps; the host sends one now and then.

    A text that ends is learned to its end.
    """
    texts = [Text(5, (1, 3, 3, 2, 1), 93), Text(7, (2, 2, 1, 3, 1), 94, left=(99, 99, 99, 0))]
    expected, expected_finale = sent(play, texts, 1)
    play.begin(texts, 2)
    play.prompts()
    for step in range(5):
        found = play.send(step) if step == 2 else play.post(step, begins=True, is_last=True)
        if step == 3:
            assert is_root(found[1]) and found[1][0] == [play.all_tokens[1][play.lengths[1] - 1]]
            found[1] = expected[3][1]
        assert_same(found, expected[step])
    assert_same(play.finale(), expected_finale)


@pytest.mark.slow
def test_a_run_goes_on_with_wider_tables(head: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_stages, "_ROOM_BLOCKS", 1)
    monkeypatch.setattr(draft_stages, "_TABLE_STEP", 1)
    monkeypatch.setattr(draft_stages, "table_bucket", lambda blocks: blocks)
    check_run(head, [Text(5, (1, 3, 2), 101), Text(10, (2, 1, 3), 102)])


@pytest.mark.slow
def test_a_release_within_a_run(head: Play) -> None:
    texts = [Text(5, (1, 3, 2), 111), Text(6, (2, 2, 1), 112)]
    expected, _ = sent(head, texts, 1)
    head.begin(texts, 2)
    head.prompts()
    head.post(0, begins=True)
    head.drafter.release([0])
    assert_same(head.post(1)[1:], expected[1][1:])
    head.order.calls.clear()
    head.drafter.release([1])
    assert [name for name, _ in head.order.calls] == ["release"]
    # The run is over: its late requests are answered, and nothing is drafted.
    request = head.request(2, begins=False, is_last=True)
    reply = head.drafter.draft(request)
    assert reply.parents.tolist() == [-1, -1]
    assert request.device_step is not None
    assert head.order.calls[1:] == [("signal", request.device_step.number)]
    assert int(head.memory.draft_stamp) == request.device_step.number - 1


@pytest.mark.slow
def test_steps_that_do_not_come_are_given_up(head: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that waits for the verifier goes on when released, and learns everything sent."""
    texts = [Text(5, (1, 3, 2), 141)]
    expected, expected_finale = sent(head, texts, 1)
    monkeypatch.setattr(device_wait, "_MAX_WAIT_S", 0.0)
    head.begin(texts, 2)
    head.prompts()
    head.order.calls.clear()
    is_ready = DeviceJournal.is_ready
    monkeypatch.setattr(
        DeviceJournal, "is_ready", lambda journal: head.order.calls[-1][0] == "release" and is_ready(journal)
    )
    for step in range(3):
        assert_same(head.post(step, begins=step == 0, is_last=step == 2), expected[step])
    names = [name for name, _ in head.order.calls]
    # Without a wait it is released again until the device has arrived; so is a capture.
    assert [name for name in names if name != "release"] == ["await", "signal"] * 3 and names[-1] == "release"
    assert_same(head.finale(), expected_finale)


@pytest.mark.slow
def test_blocks_that_cannot_be_release_the_text(head: Play) -> None:
    texts = [Text(8, (1, 3), 121), Text(8, (2, 2), 122)]
    expected, _ = sent(head, texts, 1)
    head.begin(texts, 2)
    head.prompts()
    request = head.request(0, begins=True, is_last=True)
    request.block_ids[0] = SIZES.num_blocks
    head.fill(0)
    reply = head.drafter.draft(request)
    assert reply.tree(0).tokens.tolist() == [head.all_tokens[0][8]]
    assert_same(head.in_memory()[1:], expected[0][1:])


@pytest.mark.slow
def test_a_step_with_too_few_blocks_releases_the_text(head: Play) -> None:
    texts = [Text(8, (1, 3), 131), Text(8, (2, 2), 132)]
    expected, _ = sent(head, texts, 1)
    head.begin(texts, 2)
    head.prompts()
    request = head.request(0, begins=True, is_last=True)
    starts = request.starts.copy()
    starts[2] = [0, 0, 1]
    head.fill(0)
    reply = head.drafter.draft(replace(request, starts=starts, block_ids=request.block_ids[1:]))
    assert reply.tree(0).tokens.tolist() == [head.all_tokens[0][8]]
    assert_same(head.in_memory()[1:], expected[0][1:])
    assert 0 not in head.drafter._passes._rows._sequences  # type: ignore[union-attr]


def test_memory_that_does_not_fit_is_refused(head: Play, device: str) -> None:
    def memory(batch_rows: int = 2, tokens: int = 2, width: int = head.width) -> OverlapMemory:
        layout = OverlapLayout(batch_rows, tokens, SIZES.nodes, width, torch.bfloat16)
        return OverlapMemory.over(torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device), layout)

    assert isinstance(head.drafter, DraftsOverlapped)
    for fields in ({"batch_rows": 99}, {"tokens": 9999}):
        with pytest.raises(PreconditionError, match="is more than the drafter's"):
            head.drafter.set_overlap_memory(memory(**fields), head.order)
    with pytest.raises(PreconditionError, match="hidden states of 7 values"):
        head.drafter.set_overlap_memory(memory(width=7), head.order)


@pytest.mark.parametrize("kind", [*KINDS, "MTP2"])
def test_needs_say_where(kind: str, tmp_path: Path) -> None:
    drafter, target, _ = make(kind, tmp_path, on("cpu"))
    needs = drafter.needs(target)
    assert (needs.device, needs.overlaps) == ("cpu", kind != "MTP2")


def test_a_drafter_on_the_cpu_refuses(tmp_path: Path) -> None:
    drafter, target, width = make("EAGLE", tmp_path, ON_CPU)
    assert drafter.needs(target).device == ""
    drafter.attach(target, None)
    layout = OverlapLayout(2, SIZES.tokens, SIZES.nodes, width, torch.float32)
    memory = OverlapMemory.over(torch.zeros(layout.num_bytes, dtype=torch.uint8), layout)
    with pytest.raises(PreconditionError, match="on the CPU"):
        drafter.set_overlap_memory(memory, StreamOrder())


@pytest.mark.slow
def test_a_warm_up_reads_no_entry_that_nobody_wrote(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rare failure once: leftovers in memory overflowed in the passes that compile kernels."""
    made = KVCache.__init__

    def garbage(cache: KVCache, *args: Any, **options: Any) -> None:
        made(cache, *args, **options)
        cache.data.fill_(1e38)

    monkeypatch.setattr(KVCache, "__init__", garbage)
    drafter, target, width = make("STANDALONE", tmp_path, on(device)._replace(warm=True))
    drafter.attach(target, None)
    # The warm-up of overlapped steps too.
    Play(drafter, device, vocab=target.vocab_size, width=width)
