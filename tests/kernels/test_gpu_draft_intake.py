"""Test the intake of a draft against the reference: valid steps, and arbitrary memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from foretoken_kernels import reference_draft_intake as reference
from foretoken_kernels.gpu import draft_intake as gpu
from foretoken_kernels.gpu import draft_tree_state as state
from foretoken_kernels.gpu.draft_intake_state import NO_LENGTH, DraftBatchState, IntakeRows, TakenStep
from foretoken_kernels.overlap_state import StepResults

BLOCK, BLOCKS, KV_SLOTS = 4, 6, 160
BATCH_ROWS, TOKENS = 5, 3
NUMBER = 7


class Intake:
    """A step's and a drafter's tensors: batch row i has
    4 + i tokens, and one block more than needed.
    """

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        counts = torch.tensor([1, 3, 2, 3, 0], dtype=torch.int32)
        before = 4 + torch.arange(BATCH_ROWS, dtype=torch.int32)
        # One batch row more than the drafter has.
        self.results = StepResults(
            stamp=torch.tensor([NUMBER], dtype=torch.int32),
            counts=torch.cat([counts, counts[:1]]),
            lengths=torch.cat([before + counts, before[:1]]),
            num_left=torch.tensor([50, 4, 0, 1, 9, 9], dtype=torch.int32),
            new_tokens=torch.randint(0, 1000, (BATCH_ROWS + 1, TOKENS), generator=generator, dtype=torch.int32),
            hidden=torch.zeros((0, 0)),
        )
        requests = torch.randint(0, 9, (BATCH_ROWS, state.NUM_COLUMNS), generator=generator, dtype=torch.int32)
        requests[:, state.LENGTH] = before
        tables = torch.randperm(KV_SLOTS // BLOCK, generator=generator)[: BATCH_ROWS * (BLOCKS + 1)].int()
        self.batch = DraftBatchState(
            number=torch.tensor([NUMBER], dtype=torch.int32),
            max_nodes=torch.full((BATCH_ROWS,), 8, dtype=torch.int32),
            requests=requests,
            # The last column holds the tree's block.
            block_tables=tables.reshape(BATCH_ROWS, BLOCKS + 1).contiguous(),
        )

    def run(self, functions: Any, device: str) -> tuple[IntakeRows, TakenStep, torch.Tensor]:
        """Run the intake; return the rows, the report, and the requests."""

        def garbage(*shape: int) -> torch.Tensor:
            return torch.full(shape, 77, dtype=torch.int32, device=device)

        rows = IntakeRows(*(garbage(BATCH_ROWS * TOKENS) for _ in range(4)), garbage(BATCH_ROWS))
        taken = TakenStep(garbage(BATCH_ROWS), garbage(BATCH_ROWS), garbage(BATCH_ROWS), garbage(BATCH_ROWS, TOKENS))
        results = StepResults(*(tensor.to(device) for tensor in self.results))
        batch = DraftBatchState(*(tensor.clone().to(device) for tensor in self.batch))
        functions.take_step(results, batch, rows, taken, num_blocks=BLOCKS, block_size=BLOCK, num_kv_slots=KV_SLOTS)
        return (
            IntakeRows(*(tensor.cpu() for tensor in rows)),
            TakenStep(*(tensor.cpu() for tensor in taken)),
            batch.requests.cpu(),
        )

    def check(self, device: str) -> tuple[IntakeRows, TakenStep, torch.Tensor]:
        """Check that kernel and reference give the same result; return it."""
        expected = self.run(reference, "cpu")
        found = self.run(gpu, device)
        for ours, theirs in zip(found[:2], expected[:2], strict=True):
            for name, tensor in ours._asdict().items():
                torch.testing.assert_close(tensor, getattr(theirs, name), rtol=0, atol=0, msg=name)
        torch.testing.assert_close(found[2], expected[2], rtol=0, atol=0)
        return found


def test_a_step_becomes_rows_and_wishes(device: str) -> None:
    intake = Intake()
    rows, taken, requests = intake.check(device)
    # Batch row 1 has 5 tokens, and three new ones at positions 5, 6 and 7.
    table = intake.batch.block_tables[1].tolist()
    assert rows.positions[3:6].tolist() == [5, 6, 7]
    assert rows.kv_slots[3:6].tolist() == [table[1] * BLOCK + i for i in (1, 2, 3)]
    assert rows.context_lens[3:6].tolist() == [6, 7, 8]
    assert rows.token_ids[3:6].tolist() == intake.results.new_tokens[1].tolist()
    # Batch row 0 has one new token.
    assert rows.kv_slots[1:3].tolist() == [-1, -1] and rows.context_lens[:3].tolist() == [5, 0, 0]
    assert rows.logit_rows.tolist() == [0, 5, 7, 11, 12]
    assert requests[:, state.MAX_NODES].tolist() == [8, 4, 0, 1, 0]
    assert requests[:, state.LENGTH].tolist() == [5, 8, 8, 10, 8]
    assert requests[1, state.ROOT_TOKEN] == intake.results.new_tokens[1, 2]
    assert taken.is_written.tolist() == [1, 1, 1, 1, 0]


def test_a_sequence_that_only_reports(device: str) -> None:
    intake = Intake()
    intake.batch.max_nodes[1] = 0
    intake.batch.block_tables[1] = -1
    intake.batch.max_nodes[2], intake.batch.requests[2, state.LENGTH] = 0, NO_LENGTH
    rows, taken, requests = intake.check(device)
    assert rows.kv_slots[3:9].tolist() == [-1] * 6
    assert taken.counts.tolist() == [1, 3, 2, 3, 0] and taken.is_written.tolist() == [1, 0, 0, 1, 0]
    assert requests[1:3, state.LENGTH].tolist() == [8, NO_LENGTH]
    assert requests[2, state.ROOT_TOKEN] == intake.results.new_tokens[2, 1]


def test_another_step_is_not_taken(device: str) -> None:
    intake = Intake()
    intake.results.stamp.fill_(NUMBER + 1)
    rows, taken, requests = intake.check(device)
    assert not taken.counts.any() and (rows.kv_slots == -1).all() and not rows.context_lens.any()
    assert not requests[:, state.MAX_NODES].any()
    kept = [state.LENGTH, state.ROOT_TOKEN]
    assert requests[:, kept].tolist() == intake.batch.requests[:, kept].tolist()


def test_a_missing_block_ends_the_drafts(device: str) -> None:
    intake = Intake()
    intake.batch.block_tables[1, 1] = -1
    intake.batch.block_tables[3, 2] = KV_SLOTS // BLOCK
    _, taken, requests = intake.check(device)
    assert taken.is_written.tolist() == [1, 0, 1, 0, 0]
    assert requests[[1, 3], state.LENGTH].tolist() == [5, 7]


@pytest.mark.parametrize("seed", range(4))
def test_memory_may_hold_anything(device: str, seed: int) -> None:
    """No row has a KV slot outside the cache, and no batch row has more rows than its tokens."""
    generator = torch.Generator().manual_seed(seed)
    extremes = torch.tensor([-(2**31), -1, 0, 1, 3, 4, 7, 24, 2**31 - 1], dtype=torch.int32)
    intake = Intake()
    for tensor in (*intake.results[1:], intake.batch.block_tables, intake.batch.max_nodes):
        is_bad = torch.rand(tensor.shape, generator=generator) < 0.4
        bad = extremes[torch.randint(0, len(extremes), tensor.shape, generator=generator)]
        tensor.copy_(torch.where(is_bad, bad, tensor))
    rows, _, _ = intake.check(device)
    assert ((rows.kv_slots >= -1) & (rows.kv_slots < KV_SLOTS)).all()
    firsts = torch.arange(BATCH_ROWS) * TOKENS
    assert ((rows.logit_rows >= firsts) & (rows.logit_rows < firsts + TOKENS)).all()


def test_the_stamp_goes_on(device: str) -> None:
    for functions in (gpu, reference):
        number = torch.tensor([NUMBER], dtype=torch.int32, device=device)
        stamp = torch.zeros(1, dtype=torch.int32, device=device)
        for step in (NUMBER, NUMBER + 1):
            functions.stamp_draft(number, stamp)
            assert (int(stamp), int(number)) == (step, step + 1)


def test_sizes_that_do_not_fit_are_refused(device: str) -> None:
    intake = Intake()
    intake.results = intake.results._replace(lengths=intake.results.lengths[:2])
    with pytest.raises(ValueError, match="5 are asked for"):
        intake.run(gpu, device)
