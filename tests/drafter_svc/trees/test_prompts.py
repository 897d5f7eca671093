"""The passes over prompt rows: which rows share one, and where their hidden states are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from drafter_svc.trees.prompts import PromptPasses, PromptRows
from drafter_svc.trees.rows import DraftRows
from foretoken.drafting import DeviceStep
from tests.support.paged_draft import BLOCK, Row, request_of, some_tokens, target_info

START = 20


def learn(rows: DraftRows, sent: Sequence[Row], states: Sequence[int], pass_rows: int = 100) -> PromptPasses:
    """Learn rows that follow one batch row, each with so many hidden states."""
    batch_row = Row([], 0, [], batch_slot=-1, generation=0)
    request = request_of([batch_row, *sent], with_hidden=False)
    request.rows["device_hidden"][1:] = states
    step = DeviceStep(1, begins=True, is_last=False, num_batch_rows=1, prompt_start=START)
    return PromptRows(rows, target_info(), pass_rows).learn(replace(request, device_step=step))


def spans(found: PromptPasses) -> list[tuple[int, list[int]]]:
    """Return each pass's first hidden state and its positions."""
    return [(part.first_hidden, part.batch.positions.tolist()) for part in found.passes]


def prompt(count: int, batch_slot: int, blocks: list[int], seed: int = 1) -> Row:
    return Row(some_tokens(count, seed), count, blocks, batch_slot=batch_slot)


def test_rows_share_a_pass() -> None:
    found = learn(DraftRows(target_info(), first_position=1), [prompt(6, 0, [3, 4]), prompt(3, 1, [5], 2)], [5, 2])
    assert spans(found) == [(START, [1, 2, 3, 4, 5, 1, 2])]
    batch = found.passes[0].batch
    assert batch.kv_slots.tolist() == [
        3 * BLOCK + 1,
        3 * BLOCK + 2,
        3 * BLOCK + 3,
        4 * BLOCK,
        4 * BLOCK + 1,
        21,
        22,
    ]
    assert batch.row_seqs.tolist() == [0] * 5 + [1] * 2
    assert batch.token_ids.tolist() == [*some_tokens(6, 1)[1:], *some_tokens(3, 2)[1:]]
    assert batch.context_starts is not None and batch.context_starts.tolist() == [1, 1]
    assert batch.block_tables.tolist() == [[3, 4], [5, 0]] and batch.context_lens.tolist() == [2, 3, 4, 5, 6, 2, 3]


def test_a_long_prompt_takes_several_passes() -> None:
    found = learn(
        DraftRows(target_info(), first_position=1), [prompt(9, 0, [3, 4, 5]), prompt(3, 1, [6], 2)], [8, 2], 5
    )
    assert spans(found) == [(START, [1, 2, 3, 4, 5]), (START + 5, [6, 7, 8, 1, 2])]


def test_hidden_states_of_a_pass_are_consecutive() -> None:
    """A row that is refused, because there is no such batch slot, leaves a gap."""
    sent = [prompt(BLOCK + 2, 0, [3, 4]), prompt(5, 9, [7, 8], 2), prompt(4, 1, [5], 3)]
    found = learn(DraftRows(target_info(), first_position=1), sent, [BLOCK + 1, 4, 3])
    assert spans(found) == [(START, [1, 2, 3, 4, 5]), (START + BLOCK + 5, [1, 2, 3])]


def test_a_draft_model_reads_no_hidden_states() -> None:
    rows = DraftRows(target_info(), first_position=0, needs_hidden=False)
    found = learn(rows, [prompt(3, 0, [3]), prompt(2, 1, [4], 2)], [0, 0])
    assert [positions for _, positions in spans(found)] == [[0, 1, 2, 0, 1]]


def test_a_block_that_changes_its_owner_is_written_in_a_later_pass() -> None:
    rows = DraftRows(target_info(), first_position=1)
    found = learn(rows, [prompt(6, 0, [3, 4]), prompt(6, 1, [5, 4], 2)], [5, 5])
    assert [positions for _, positions in spans(found)] == [[1, 2, 3, 4, 5]] * 2


def test_a_row_without_hidden_states_is_only_learned() -> None:
    rows = DraftRows(target_info(), first_position=1)
    assert learn(rows, [prompt(6, 0, [3, 4])], [0]).passes == []
    sequence = rows.find(0, 1, 0)
    assert sequence is not None and sequence.length == 6
    assert np.array_equal(sequence.tokens[:6], some_tokens(6, 1))
