"""Steps on the device one by one: which sequences they have, and what they leave in memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from foretoken.models.backend import Backend
from foretoken.models.batch import blank_batch
from foretoken.models.device_batch import NARROW_BLOCKS
from foretoken.models.device_graph import DeviceGraphs
from foretoken.models.device_sizes import PassSizes
from foretoken.overlap_memory import OverlapLayout, OverlapMemory, StreamOrder
from foretoken.sampling import SamplingParams, SpeculationOptions
from foretoken.tree import DraftTree
from tests.support.tiny_checkpoint import save_llama
from verifier_svc.messages import SequenceKey, Submit
from verifier_svc.model.device_runner import DeviceRunner
from verifier_svc.overlap import joined_prompts
from verifier_svc.overlap import parts as overlap_parts
from verifier_svc.overlap.sizes import ShapeRows
from verifier_svc.overlap.stage import StepSize
from verifier_svc.overlap.step import OverlappedStep
from verifier_svc.sampling.allowed_tokens import TreeMasks
from verifier_svc.sampling.device_walker import DeviceWalker
from verifier_svc.scheduling.batch import Scheduled, build_batch
from verifier_svc.scheduling.batch_row import BatchRow
from verifier_svc.scheduling.block_manager import BlockTable
from verifier_svc.scheduling.draft import Draft
from verifier_svc.scheduling.sequence import Sequence

VOCAB, HIDDEN, BLOCK, NUM_BLOCKS, BATCH_SLOTS, NODES = 40, 32, 4, 8, 2, 4
# Hidden state 0 is the token's embedding.
EMBEDDING = (0,)
ROOT_ALONE = np.zeros(1, np.int32)
# A size without a graph gets one after 8 steps.
STEPS_BEFORE_A_CAPTURE = 9
LARGEST = StepSize(16, BATCH_SLOTS, NODES, NUM_BLOCKS, EMBEDDING)


class Steps:
    """A OverlappedStep with a small target.

    Attributes:
        joined: sequences by batch row.
        num_joined: steps whose pass had prompts in it.
    """

    def __init__(
        self,
        folder: Path,
        device: str,
        rows: int = 16,
        *,
        blocks: int = NUM_BLOCKS,
        is_padded: bool = False,
        is_joined: bool = False,
        shapes: Items[ShapeRows] = (),
    ) -> None:
        """
        Args:
            blocks: most of a sequence; the cache has fewer.
            is_padded: run each step in a size that holds all.
            is_joined: compute prompts in the next step's pass.
            shapes: for which its graphs are captured.
        """
        backend = Backend("gpu", torch.device(device))
        sizes = PassSizes(rows, 16, BATCH_SLOTS, blocks)
        self.runner = DeviceRunner(folder, backend=backend, sizes=sizes, block_size=BLOCK, num_blocks=NUM_BLOCKS)
        walker = DeviceWalker(
            vocab_size=VOCAB,
            token_limit=VOCAB,
            max_batch_slots=BATCH_SLOTS,
            max_rows=16,
            max_nodes=NODES,
            device=backend.device,
            graphs=True,
        )
        layout = OverlapLayout(BATCH_SLOTS, 3, NODES, HIDDEN, self.runner.dtype, prompt_rows=8)
        self.memory = OverlapMemory.over(torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device), layout)
        self.step = OverlappedStep(
            self.runner,
            walker,
            self.memory,
            StreamOrder(),
            max_batch_rows=BATCH_SLOTS,
            max_prompt_rows=8,
            simulated=None,
            graphs=True,
        )
        self.is_padded, self.is_joined, self.num_joined = is_padded, is_joined, 0
        if is_joined:
            for is_long in (False, True) if self.step.has_long_sequences else (False,):
                list(self.step.captures(EMBEDDING, shapes, has_found=False, is_long=is_long))
        if is_padded:
            # Buffers that grew later would end the graphs.
            self.runner.forward(blank_batch(16, BATCH_SLOTS), EMBEDDING)
            self.step.warm_up(EMBEDDING)
            self.step.sizes.add(LARGEST)
        self.step.begin(EMBEDDING, 0)
        self.joined: dict[int, Sequence] = {}

    def prefill(self, sequence: Sequence, num_tokens: int) -> torch.Tensor:
        """Compute prompt tokens.

        Return the hidden states that a drafter gets of them, after the next step.
        """
        part = Scheduled(sequence, num_tokens, 1)
        batch = build_batch([part], BLOCK, NUM_BLOCKS * BLOCK)
        first = self.step.prefill(batch.forward, [(0, num_tokens)])
        if not self.is_joined:
            self.step.launch_prompts()
        sequence.num_computed += num_tokens
        return self.memory.prompt_hidden[first : first + num_tokens]

    def join(self, sequence: Sequence, width: int = 1) -> int:
        index = self.step.batch_rows.free_row()
        self.step.batch_rows.join(index, BatchRow(sequence, width, 1, is_new=True))
        self.joined[index] = sequence
        return index

    def join_all(self, prompts: list[list[int]], width: int) -> None:
        """Join a sequence for each prompt, with all but its last token computed."""
        for batch_slot, prompt in enumerate(prompts):
            sequence = sequence_of(prompt, batch_slot, [4 * batch_slot + block for block in range(4)])
            self.prefill(sequence, len(prompt) - 1)
            self.join(sequence, width)

    def leave(self, index: int) -> None:
        self.step.batch_rows.leave(index)
        del self.joined[index]

    def draft(self, index: int, tokens: list[int], parents: list[int], score: float = 0.0) -> None:
        """Draft a tree after the last step, as a drafter does. ``score``: of its nodes."""
        memory, count = self.memory, len(tokens)
        memory.draft_scores[index] = score
        memory.num_nodes[index] = count
        memory.draft_tokens[index, :count] = torch.tensor(tokens, dtype=torch.int32)
        memory.draft_parents[index, :count] = torch.tensor(parents, dtype=torch.int32)
        memory.draft_stamp.fill_(self.step.number)

    def run(self, *, is_drafted: bool = False, found: Mapping[int, Draft] | None = None) -> dict[int, list[int]]:
        """Run one step; return the tokens of each sequence that took part."""
        self.num_joined += self.step.launch(is_drafted=is_drafted, found=found or {})
        self.step.in_flight.wait()
        tokens: dict[int, list[int]] = {}
        for batch_row, walk, num_nodes, _ in self.step.in_flight.receive():
            (index,) = (index for index, sequence in self.joined.items() if sequence is batch_row.sequence)
            assert num_nodes > 0
            batch_row.sequence.tokens.extend(walk.tokens)
            batch_row.sequence.num_computed += len(walk.tokens)
            tokens[index] = walk.tokens
            assert int(self.memory.counts[index]) == len(walk.tokens)
            assert self.memory.new_tokens[index, : len(walk.tokens)].tolist() == walk.tokens
        assert self.memory.stamp.tolist() == [self.step.number]
        if self.is_padded:
            assert self.step.sizes.choose(LARGEST._replace(rows=1)) == LARGEST
        return tokens

    def text(self, prompt: list[int], count: int) -> list[int]:
        """Return a prompt's next tokens, each made by a step of its own with one sequence."""
        sequence = sequence_of(prompt, 0, list(range(4)))
        self.prefill(sequence, len(prompt) - 1)
        index = self.join(sequence)
        found = [self.run()[index][0] for _ in range(count)]
        self.leave(index)
        return found


def sequence_of(prompt: list[int], batch_slot: int, blocks: list[int], max_tokens: int = 8) -> Sequence:
    """Return a running sequence with these blocks, of which nothing is computed."""
    submit = Submit(
        SequenceKey(1, f"r{batch_slot}", 0),
        0,
        tuple(prompt),
        (),
        SamplingParams(temperature=0.0, max_tokens=max_tokens),
        SpeculationOptions(),
        None,
        None,
    )
    sequence = Sequence(submit, max_model_len=16, eos_ids=frozenset(), token_limit=VOCAB, now=0.0)
    sequence.table = BlockTable(b"", block_ids=blocks)
    sequence.batch_slot, sequence.generation = batch_slot, 0
    return sequence


def draft_of(tokens: list[int], parents: list[int]) -> Draft:
    """Return a tree of the third drafter."""
    count = len(tokens)
    tree = DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32))
    return Draft(tree, [0] + [3] * (count - 1), [0.0] * count, [1.0] * count)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("target"), vocab_size=VOCAB, hidden_size=HIDDEN)


@pytest.mark.slow
@pytest.mark.parametrize("is_padded", [False, True])
def test_a_tree_from_the_host_takes_the_place_of_the_drafters(folder: Path, device: str, *, is_padded: bool) -> None:
    """It may have more rows than the drafter's, in the first step
    of a sequence too, and only in that step.
    """
    steps = Steps(folder, device, is_padded=is_padded)
    prompts = [[5, 6, 7, 8, 9], [11, 12, 13]]
    texts = [steps.text(prompt, 7) for prompt in prompts]
    steps.join_all(prompts, width=2)
    found = {1: draft_of([13, texts[1][0], texts[1][1]], [-1, 0, 1])}
    assert steps.run(found=found) == {0: texts[0][:1], 1: texts[1][:3]}
    # The drafter has a tree for both. The second one's root has a wrong child before the right one.
    wrong = (texts[1][3] + 1) % VOCAB
    steps.draft(0, [texts[0][0], texts[0][1]], [-1, 0])
    steps.draft(1, [texts[1][2], wrong], [-1, 0])
    found = {1: draft_of([texts[1][2], wrong, texts[1][3], texts[1][4]], [-1, 0, 0, 2])}
    assert steps.run(is_drafted=True, found=found) == {0: texts[0][1:3], 1: texts[1][3:6]}
    assert steps.run() == {0: texts[0][3:4], 1: texts[1][6:7]}
    steps.draft(0, [texts[0][3], texts[0][4]], [-1, 0])
    assert steps.run(is_drafted=True)[0] == texts[0][4:6]


@pytest.mark.slow
def test_sequences_share_the_rows_of_a_step(folder: Path, device: str) -> None:
    """The tree that promises more gets the rows.

    Whoever gets them, each text is that of the sequence alone.
    """
    steps = Steps(folder, device)
    prompts = [[5, 6, 7, 8, 9], [11, 12, 13]]
    texts = [steps.text(prompt, 8) for prompt in prompts]
    steps.join_all(prompts, width=3)
    steps.step.batch_rows.share_rows(2)
    done = [1, 1]
    assert steps.run() == {0: texts[0][:1], 1: texts[1][:1]}
    for better in (0, 1):
        for index, text in enumerate(texts):
            steps.draft(index, text[done[index] - 1 :][:3], [-1, 0, 1], -0.5 if index == better else -0.6)
        got = steps.run(is_drafted=True)
        assert {index: len(tokens) for index, tokens in got.items()} == {better: 3, 1 - better: 1}
        for index, tokens in got.items():
            assert tokens == texts[index][done[index] :][: len(tokens)]
            done[index] += len(tokens)
    # Without a draft each has a root alone, whatever rows there are.
    assert steps.run() == {index: text[5:6] for index, text in enumerate(texts)}


@pytest.mark.slow
def test_sequences_that_share_the_rows_of_a_larger_graph_may_use_all(folder: Path, device: str) -> None:
    steps = Steps(folder, device, is_padded=True)
    prompts = [[5, 6, 7, 8, 9], [11, 12, 13]]
    texts = [steps.text(prompt, 4) for prompt in prompts]
    steps.join_all(prompts, width=3)
    steps.step.batch_rows.share_rows(2)
    assert steps.run() == {0: texts[0][:1], 1: texts[1][:1]}
    for index, text in enumerate(texts):
        steps.draft(index, text[:3], [-1, 0, 1])
    assert steps.run(is_drafted=True) == {index: text[1:4] for index, text in enumerate(texts)}


def test_the_host_learns_whose_tree_was_verified(folder: Path, device: str) -> None:
    steps = Steps(folder, device)
    text = steps.text([5, 6, 7], 3)
    sequence = sequence_of([5, 6, 7], 0, [0, 1, 2, 3])
    steps.prefill(sequence, 2)
    steps.join(sequence)
    draft = draft_of([7, text[0]], [-1, 0])
    steps.step.launch(is_drafted=False, found={0: draft})
    steps.step.in_flight.wait()
    ((_, walk, num_nodes, found),) = steps.step.in_flight.receive()
    assert (walk.tokens, walk.sources, num_nodes) == (text[:2], [3, 0], 2) and found is draft


def test_hidden_states_are_those_of_the_pass_also_when_its_buffer_has_grown(folder: Path, device: str) -> None:
    """A drafter that wants more states comes and goes; the first one's buffer has changed."""
    steps = Steps(folder, device)
    embedding = steps.runner.weights.embedding
    for token in (7, 9):
        steps.step.begin(EMBEDDING, steps.step.number)
        steps.joined.clear()
        steps.join(sequence_of([token], 0, [0]))
        steps.run()
        assert torch.equal(steps.memory.hidden[0], embedding[token]), token
        steps.runner.overlap_pass((0, 1, 2), 1, 1, 1, 1)


def test_captures_stay_within_the_largest_pass_and_write_no_kv_entries(folder: Path, device: str) -> None:
    """A server with small settings has fewer sizes to capture."""
    steps = Steps(folder, device, rows=40)
    cache = steps.runner.planes.fill_(1).clone()
    shapes = [ShapeRows(1, 1), ShapeRows(NODES, NODES)]
    assert len(list(steps.step.captures(EMBEDDING, shapes, has_found=True, is_long=False))) >= 2
    assert torch.equal(steps.runner.planes, cache)
    assert len(steps.step.in_flight) == 0 and not any(steps.step.batch_rows.rows)


class RecordedGraphs(DeviceGraphs):
    """Graphs without a GPU: a replay launches again."""

    captured: ClassVar[list[Hashable]] = []

    def __init__(self, enabled: bool, *, eager_uses: int = 0) -> None:
        super().__init__(True, eager_uses=eager_uses)
        self.captured.clear()

    def _capture(self, key: Hashable, launch: Callable[[], None]) -> Any:
        self.captured.append(key)
        return SimpleNamespace(replay=launch)


def test_no_step_with_masks_is_captured_while_streams_wait(
    folder: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlap_parts, "DeviceGraphs", RecordedGraphs)
    steps = Steps(folder, device, rows=40)
    assert list(steps.step.captures(EMBEDDING, [ShapeRows(1, 1)], has_found=False, is_long=False))
    captured = list(RecordedGraphs.captured)
    steps.step.begin(EMBEDDING, 0)
    sequence = sequence_of([3, 4, 5], 0, [0, 1, 2, 3], max_tokens=12)
    steps.prefill(sequence, 2)
    sequence.sampling = replace(sequence.sampling, allowed_token_ids=(7,))
    index = steps.join(sequence)
    for length in range(4, 4 + STEPS_BEFORE_A_CAPTURE):
        steps.step.launch(is_drafted=False, found={})
        assert not steps.step.in_flight.is_bound and list(steps.step.in_flight.trees()) == [index]
        steps.step.bind({index: TreeMasks(np.packbits(np.arange(VOCAB) == 7, bitorder="little")[None], ROOT_ALONE)})
        steps.step.in_flight.wait()
        ((_, walk, _, _),) = steps.step.in_flight.receive()
        sequence.tokens.extend(walk.tokens)
        assert sequence.tokens[3:] == [7] * (length - 3)
    assert captured and RecordedGraphs.captured == captured


def test_a_step_without_sequences_only_gets_its_number(folder: Path, device: str) -> None:
    """Its results are those of the step before, and it has none for the host."""
    steps = Steps(folder, device)
    assert steps.run() == {} and steps.step.number == 1
    prompt = sequence_of([3, 4, 5], 0, [0])
    hidden = steps.prefill(prompt, 2)
    assert steps.run() == {} and steps.memory.stamp.tolist() == [2]
    assert torch.equal(hidden, steps.runner.weights.embedding[[3, 4]])
    steps.join(prompt)
    assert list(steps.run()) == [0]


@pytest.mark.slow
@pytest.mark.parametrize(("is_padded", "is_joined"), [(False, False), (True, False), (False, True)])
def test_a_sequence_joins_beside_a_tree_and_the_first_one_leaves(
    folder: Path, device: str, *, is_padded: bool, is_joined: bool
) -> None:
    """Widths change from step to step; each text is that of the sequence alone."""
    prompts = [[5, 6, 7, 8, 9], [11, 12, 13]]
    alone = Steps(folder, device)
    texts = [alone.text(prompt, 6) for prompt in prompts]
    steps = Steps(folder, device, is_padded=is_padded, is_joined=is_joined)
    first = sequence_of(prompts[0], 0, [0, 1, 2, 3])
    steps.prefill(first, 4)
    assert steps.join(first) == 0
    assert steps.run() == {0: texts[0][:1]}

    # A wrong and a right child. The second prompt comes in two chunks meanwhile.
    steps.step.batch_rows.resize(0, 4)
    wrong = (texts[0][1] + 1) % VOCAB
    steps.draft(0, [texts[0][0], wrong, texts[0][1], texts[0][2]], [-1, 0, 0, 2])
    second = sequence_of(prompts[1], 1, [4, 5, 6, 7])
    halves = [steps.prefill(second, 1)]
    assert steps.run(is_drafted=True) == {0: texts[0][1:4]}
    embedding = steps.runner.weights.embedding
    assert torch.equal(steps.memory.hidden[:3], embedding[texts[0][:3]])

    # The second one's first tree is its root, whatever is left in memory for its batch row.
    steps.draft(1, [1, 2], [-1, 0])
    steps.draft(0, [texts[0][3], texts[0][4]], [-1, 0])
    halves.append(steps.prefill(second, 1))
    assert steps.join(second, width=2) == 1
    steps.step.batch_rows.resize(0, 2)
    assert steps.run(is_drafted=True) == {0: texts[0][4:6], 1: texts[1][:1]}
    assert torch.equal(torch.cat(halves), embedding[prompts[1][:2]])
    assert steps.num_joined == (3 if is_joined else 0)
    assert halves[0].data_ptr() != halves[1].data_ptr()

    # The first batch row stays empty, and the second one has its rows.
    steps.leave(0)
    steps.draft(1, [texts[1][0], texts[1][1]], [-1, 0])
    assert steps.run(is_drafted=True) == {1: texts[1][1:3]}
    assert steps.memory.counts.tolist() == [0, 2] and int(steps.memory.num_left[0]) == 0

    # Somebody else takes it: the lowest free batch row, with the first one's batch slot.
    third = sequence_of(prompts[0], 0, [0, 1, 2, 3])
    steps.prefill(third, 4)
    assert steps.join(third) == 0
    assert steps.run() == {0: texts[0][:1], 1: texts[1][3:4]}


def test_prompts_join_a_step_whose_sequences_share_rows(folder: Path, device: str) -> None:
    """They follow the rows that the kernel divides, and their hidden states reach the drafter."""
    prompts = [[5, 6, 7, 8, 9], [11, 12, 13]]
    alone = Steps(folder, device)
    texts = [alone.text(prompt, 3) for prompt in prompts]
    steps = Steps(folder, device, is_joined=True)
    steps.step.batch_rows.share_rows(2)
    first, second = (
        sequence_of(prompt, batch_slot, [4 * batch_slot + i for i in range(4)])
        for batch_slot, prompt in enumerate(prompts)
    )
    steps.prefill(first, 4)
    steps.join(first, width=3)
    assert steps.run() == {0: texts[0][:1]}
    steps.draft(0, texts[0][:2], [-1, 0])
    hidden = steps.prefill(second, 2)
    steps.join(second, width=3)
    assert steps.run(is_drafted=True) == {0: texts[0][1:3], 1: texts[1][:1]}
    assert torch.equal(hidden, steps.runner.weights.embedding[prompts[1][:2]])
    # Without prompts the rows are laid out again.
    assert steps.run()[1] == texts[1][1:2]
    assert steps.num_joined == 2


@pytest.mark.parametrize("is_replayed", [False, True])
def test_several_prompts_join_a_step_behind_any_number_of_rows(
    folder: Path, device: str, monkeypatch: pytest.MonkeyPatch, *, is_replayed: bool
) -> None:
    """The same graph runs them, wherever the rows of sequences end.

    ``is_replayed``: also without a GPU.
    """
    prompts = [[5, 6, 7, 8, 9], [11, 12, 13], [21, 22, 23, 24]]
    alone = Steps(folder, device)
    texts = [alone.text(prompt, 4) for prompt in prompts]
    if is_replayed and device == "cpu":
        monkeypatch.setattr(overlap_parts, "DeviceGraphs", RecordedGraphs)
    steps = Steps(folder, device, is_joined=True)
    num_captured = len(RecordedGraphs.captured)
    first = sequence_of(prompts[0], 0, [0, 1, 2, 3])
    steps.prefill(first, 4)
    steps.join(first)
    assert steps.run()[0] == texts[0][:1]
    others = [sequence_of(prompts[number], 1, [2 * number + 2, 2 * number + 3]) for number in (1, 2)]
    for width in (1, 2, 4):
        steps.step.batch_rows.resize(0, width)
        parts = [Scheduled(each, 2, 1) for each in others]
        batch = build_batch(parts, BLOCK, NUM_BLOCKS * BLOCK)
        for each in others:
            each.num_computed = 0
        row = steps.step.prefill(batch.forward, [(0, 2), (2, 2)])
        assert steps.run()[0] == texts[0][steps.step.number - 1 : steps.step.number]
        rows = [token for number in (1, 2) for token in prompts[number][:2]]
        assert torch.equal(steps.memory.prompt_hidden[row : row + 4], steps.runner.weights.embedding[rows])
    assert steps.num_joined == 4 and len(RecordedGraphs.captured) == num_captured
    # Their KV entries are there: each goes on as it does alone.
    steps.leave(0)
    for number, each in zip((1, 2), others, strict=True):
        each.num_computed = 2
        if len(prompts[number]) > 3:
            steps.prefill(each, 1)
        index = steps.join(each)
        assert steps.run()[index] == texts[number][:1]
        steps.leave(index)


def test_long_sequences_and_their_prompts_have_graphs(
    folder: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step whose sequences outgrow the narrow block tables goes on
    in another graph, and keeps its prompts.
    """
    prompts = [[5, 6, 7, 8, 9], [11, 12, 13]]
    alone = Steps(folder, device)
    texts = [alone.text(prompt, 5) for prompt in prompts]
    if device == "cpu":
        monkeypatch.setattr(overlap_parts, "DeviceGraphs", RecordedGraphs)
    monkeypatch.setattr(joined_prompts, "_LEAST_LONG_ROWS", 1)
    steps = Steps(folder, device, blocks=200, is_joined=True)
    num_captured = len(RecordedGraphs.captured)
    grown, late = (
        sequence_of(prompt, batch_slot, [4 * batch_slot, 4 * batch_slot + 1])
        for batch_slot, prompt in enumerate(prompts)
    )
    steps.prefill(grown, 4)
    steps.join(grown)
    assert steps.run() == {0: texts[0][:1]}
    # It holds what it would for a longer text.
    grown.table.block_ids.extend([2, 3, *[0] * 125])
    assert steps.run() == {0: texts[0][1:2]}
    steps.prefill(late, 2)
    assert steps.run() == {0: texts[0][2:3]}
    steps.join(late)
    assert steps.run() == {0: texts[0][3:4], 1: texts[1][:1]}
    steps.leave(0)
    assert steps.run() == {1: texts[1][1:2]}
    assert steps.num_joined == 2 and len(RecordedGraphs.captured) == num_captured
    assert device != "cpu" or {size.blocks for size, _ in RecordedGraphs.captured} == {128, 200}


def test_rows_of_small_trees_beside_prompts_have_tiles_of_their_own(
    folder: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here large trees have two rows together at most."""
    text = Steps(folder, device).text([5, 6, 7, 8, 9], 4)
    if device == "cpu":
        monkeypatch.setattr(overlap_parts, "DeviceGraphs", RecordedGraphs)
    monkeypatch.setattr(joined_prompts, "MOST_LARGE_TREE_ROWS", 2)
    monkeypatch.setattr(joined_prompts, "_ROW_COUNTS", {NARROW_BLOCKS: (2, 16)})
    steps = Steps(folder, device, is_joined=True, shapes=[ShapeRows(3, 3), ShapeRows(NODES, NODES, is_for_few=True)])
    num_captured = len(RecordedGraphs.captured)
    if device == "cpu":
        bounds = {(size.rows, size.max_width) for size, _ in RecordedGraphs.captured if size.pass_rows}
        assert bounds == {(2, NODES), (16, 3)}
    joined = sequence_of([5, 6, 7, 8, 9], 0, [0, 1, 2, 3])
    steps.prefill(joined, 4)
    steps.join(joined)
    assert steps.run() == {0: text[:1]}
    for width, num_joined in ((2, 2), (3, 3), (NODES, 3)):
        steps.step.batch_rows.resize(0, width)
        steps.prefill(sequence_of([11, 12, 13], 1, [4, 5]), 2)
        assert steps.run() == {0: text[steps.step.number - 1 : steps.step.number]}
        assert steps.num_joined == num_joined and len(RecordedGraphs.captured) == num_captured


def test_prompts_without_room_in_a_step_have_a_pass_of_their_own(folder: Path, device: str) -> None:
    """A pass of 16 rows holds a tree of 4 and 12 tokens of a prompt, but not 13."""
    text = Steps(folder, device).text([5, 6, 7, 8, 9], 2)
    for count, num_joined in ((12, 1), (13, 0)):
        steps = Steps(folder, device, is_joined=True)
        joined = sequence_of([5, 6, 7, 8, 9], 0, [0, 1, 2, 3])
        steps.is_joined = False
        steps.prefill(joined, 4)
        steps.is_joined = True
        steps.join(joined, width=NODES)
        prompt = sequence_of(list(range(1, 16)), 1, [4, 5, 6, 7])
        steps.prefill(prompt, count)
        assert steps.run() == {0: text[:1]} and steps.num_joined == num_joined
