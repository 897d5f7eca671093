"""A drafter captures the graphs of usual drafts between two runs, and nobody notices."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafter_svc.device import draft_stages, usual_captures
from drafter_svc.device.levels import TreeShape
from foretoken.drafting import TreeLimits
from tests.drafter_svc.device.test_overlapped_draft import check_run
from tests.support.overlap_play import SIZES, Play, Text
from tests.support.overlapped_drafters import make, on

TREES = TreeLimits(1, 1), TreeLimits(2, 2)
# Numbers of batch rows; with and without a filter; table widths.
NUM_GRAPHS = len(TREES) * 3 * 2 * 2
TWO = {"max_depth": 2, "max_branches": 2}


class Graphs:
    """Stands in for DeviceGraphs: notes what would be captured, and launches it."""

    enabled = True

    def __init__(self, _enabled: bool) -> None:
        self.captured: list[TreeShape] = []

    def captures(self, key: Hashable) -> bool:
        return key not in self.captured

    def run(self, key: TreeShape, launch: Callable[[], None]) -> None:
        if self.captures(key):
            self.captured.append(key)
        launch()


@pytest.fixture
def play(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> Play:
    monkeypatch.setattr(draft_stages, "DeviceGraphs", Graphs)
    drafter, target, width = make("EAGLE3", tmp_path, on(device))
    # Room for two widths of block tables.
    drafter.attach(replace(target, usual_trees=TREES, max_model_len=800), None)
    return Play(drafter, device, vocab=target.vocab_size, width=width)


def captured(play: Play) -> list[TreeShape]:
    graphs = play.overlapped._stages.graphs
    assert isinstance(graphs, Graphs)
    return graphs.captured


@pytest.mark.slow
def test_all_is_captured_one_by_one_and_only_once(play: Play) -> None:
    texts = [Text(5, (1, 3, 2), 11, options=TWO), Text(12, (2, 1, 3), 12, options=TWO)]
    check_run(play, texts)
    known = captured(play)[:]
    assert len(known) == 1
    play.order.calls.clear()
    cache = play.overlapped._stages.levels.model._passes._cache.data  # type: ignore[attr-defined]
    memory = play.memory
    written = memory.stamp, memory.results, memory.hidden, memory.prompt_hidden, cache[:, :, : SIZES.num_blocks]
    before = [part.view(torch.uint8).clone() for part in written]
    turns = 0
    while play.drafter.prepare():
        turns += 1
        assert len(captured(play)) == len(known) + turns
    assert play.drafter.is_prepared and not play.drafter.prepare()
    shapes = captured(play)
    assert len(set(shapes)) == len(shapes) == NUM_GRAPHS
    assert {(shape.depth, shape.branches) for shape in shapes} == set(TREES)
    assert {shape.trees for shape in shapes} == {1, 2, SIZES.batch_rows}
    assert {shape.filtered for shape in shapes} == {False, True}
    assert len({shape.blocks for shape in shapes}) == 2
    # Only scratch, and trees of no step, were written; no stream waited.
    assert all(torch.equal(part.view(torch.uint8), old) for part, old in zip(written, before, strict=True))
    assert int(memory.draft_stamp) == -1 and not play.order.calls
    # The drafts are what they were, from the graphs that are there.
    check_run(play, texts)
    filtered = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "max_depth": 1, "max_branches": 1}
    check_run(play, [Text(4, (2, 1), 13, options=filtered)])
    assert len(captured(play)) == NUM_GRAPHS


def test_nothing_is_captured_while_a_run_is_begun(play: Play) -> None:
    texts = [Text(5, (1, 3, 2), 11, options=TWO)]
    play.begin(texts, 1)
    play.prompts()
    assert play.drafter.prepare()
    for step in range(3):
        play.post(step, begins=step == 0, is_last=step == 2)
        known = len(captured(play))
        assert play.drafter.prepare() == (step == 2)
        assert len(captured(play)) == known + (step == 2)
        assert not play.drafter.is_prepared


def test_sequences_that_end_leave_a_drafter_idle(play: Play) -> None:
    play.begin([Text(5, (1, 3), 11, options=TWO)], 1)
    play.prompts()
    play.post(0, begins=True)
    assert not play.drafter.prepare()
    play.drafter.release([0])
    assert play.drafter.prepare()


def test_the_last_memory_of_a_device_is_left_alone(
    play: Play, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert play.drafter.prepare()
    monkeypatch.setattr(usual_captures, "_has_room", lambda _device: False)
    with caplog.at_level(logging.WARNING):
        assert not play.drafter.prepare()
    assert play.drafter.is_prepared and len(captured(play)) == 1
    assert caplog.messages == ["little memory is left on the GPU: other graphs are captured once requests need them"]


def test_without_graphs_there_is_nothing_to_prepare(tmp_path: Path, device: str) -> None:
    drafter, target, width = make("EAGLE3", tmp_path, on(device)._replace(graphs=False))
    drafter.attach(replace(target, usual_trees=TREES), None)
    assert drafter.is_prepared and not drafter.prepare()
    play = Play(drafter, device, vocab=target.vocab_size, width=width)
    assert drafter.is_prepared and not drafter.prepare()
    assert not play.order.calls
