"""Define gpu/draft_intake in plain Python, one batch row at a time.

The functions have the same names and tensors (gpu/draft_intake_state, which does not import
Triton). They run on any device, slowly.
"""

from __future__ import annotations

import torch

from foretoken_kernels.gpu import draft_tree_state as state
from foretoken_kernels.gpu.draft_intake_state import DraftBatchState, IntakeRows, TakenStep
from foretoken_kernels.overlap_state import NO_KV_SLOT, StepResults


def take_step(
    results: StepResults,
    batch: DraftBatchState,
    rows: IntakeRows,
    taken: TakenStep,
    *,
    num_blocks: int,
    block_size: int,
    num_kv_slots: int,
) -> None:
    """Define gpu.draft_intake.take_step."""
    most = results.new_tokens.shape[1]
    for tensor in (rows.token_ids, rows.positions, rows.context_lens, *taken):
        tensor.zero_()
    rows.kv_slots.fill_(NO_KV_SLOT)
    is_expected = int(results.stamp) == int(batch.number)
    for batch_row, wanted in enumerate(batch.max_nodes.tolist()):
        request, table = batch.requests[batch_row], batch.block_tables[batch_row].tolist()
        count, length = int(results.counts[batch_row]), int(results.lengths[batch_row])
        first = batch_row * most
        rows.logit_rows[batch_row], taken.lengths[batch_row], request[state.MAX_NODES] = first, length, 0
        if not is_expected or not 0 < count <= most:
            continue
        tokens = results.new_tokens[batch_row, :count].tolist()
        taken.counts[batch_row], request[state.ROOT_TOKEN] = count, tokens[-1]
        taken.tokens[batch_row, :count] = results.new_tokens[batch_row, :count]
        if not 0 < length <= num_blocks * block_size or length - count != int(request[state.LENGTH]):
            continue
        positions = range(length - count, length)
        kv_slots = [table[p // block_size] * block_size + p % block_size for p in positions]
        if wanted > 0 and any(not 0 <= kv_slot < num_kv_slots for kv_slot in kv_slots):
            continue
        request[state.LENGTH] = length
        if wanted <= 0:
            continue
        for j, (token, position, kv_slot) in enumerate(zip(tokens, positions, kv_slots, strict=True)):
            rows.token_ids[first + j], rows.positions[first + j] = token, position
            rows.kv_slots[first + j], rows.context_lens[first + j] = kv_slot, position + 1
        rows.logit_rows[batch_row], taken.is_written[batch_row] = first + count - 1, 1
        request[state.MAX_NODES] = min(wanted, max(int(results.num_left[batch_row]), 0))


def stamp_draft(number: torch.Tensor, draft_stamp: torch.Tensor) -> None:
    """Define gpu.draft_intake.stamp_draft."""
    draft_stamp.copy_(number)
    number += 1
