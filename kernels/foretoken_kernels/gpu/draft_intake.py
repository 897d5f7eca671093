# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Take in a step's results on the drafter's device: rows of the next pass, and tree sizes.

The host does not know the tokens yet. foretoken_kernels.reference_draft_intake defines the
functions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from foretoken_kernels.gpu import draft_tree_state as state
from foretoken_kernels.gpu.draft_intake_state import DraftBatchState, IntakeRows, TakenStep
from foretoken_kernels.overlap_state import NO_KV_SLOT, StepResults

_LENGTH = tl.constexpr(state.LENGTH)
_MAX_NODES = tl.constexpr(state.MAX_NODES)
_ROOT_TOKEN = tl.constexpr(state.ROOT_TOKEN)
_NUM_COLUMNS = tl.constexpr(state.NUM_COLUMNS)
_NO_KV_SLOT = tl.constexpr(NO_KV_SLOT)


@triton.jit(do_not_specialize=["num_blocks", "num_kv_slots"])
def _take_step(
    stamp,
    counts,
    lengths,
    num_left,
    new_tokens,
    number,
    max_nodes,
    requests,
    block_tables,
    table_stride,
    out_token_ids,
    out_positions,
    out_kv_slots,
    out_context_lens,
    out_logit_rows,
    taken_counts,
    taken_lengths,
    taken_written,
    taken_tokens,
    num_blocks,
    block_size,
    num_kv_slots,
    TOKENS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Process one batch row."""
    batch_row = tl.program_id(0)
    request = requests + batch_row * _NUM_COLUMNS
    count = tl.load(counts + batch_row)
    length = tl.load(lengths + batch_row)
    before = tl.load(request + _LENGTH)
    wanted = tl.load(max_nodes + batch_row)
    is_expected = (tl.load(stamp) == tl.load(number)) & (count > 0) & (count <= TOKENS)
    # If the length is not the known one plus the new tokens, some are missing: KV entries would
    # be written to wrong KV slots.
    is_next = is_expected & (length > 0) & (length <= num_blocks * block_size) & (length - count == before)

    lane = tl.arange(0, LANES)
    inside = lane < TOKENS
    row = batch_row * TOKENS + lane
    tokens = tl.load(new_tokens + row, mask=lane < tl.where(is_expected, count, 0), other=0)
    num_rows = tl.where(is_next & (wanted > 0), count, 0)
    position = tl.where(lane < num_rows, length - count + lane, 0)
    table = block_tables + batch_row.to(tl.int64) * table_stride
    block = tl.load(table + position // block_size, mask=lane < num_rows, other=0).to(tl.int64)
    kv_slot = block * block_size + position % block_size
    is_missing = (lane < num_rows) & ((block < 0) | (kv_slot >= num_kv_slots))
    has_kv_slots = tl.sum(is_missing.to(tl.int32), axis=0) == 0
    is_known = is_next & has_kv_slots
    is_written = is_known & (wanted > 0)
    is_row = lane < tl.where(has_kv_slots, num_rows, 0)

    tl.store(out_token_ids + row, tl.where(is_row, tokens, 0), mask=inside)
    tl.store(out_positions + row, tl.where(is_row, position, 0), mask=inside)
    tl.store(out_kv_slots + row, tl.where(is_row, kv_slot, _NO_KV_SLOT).to(tl.int32), mask=inside)
    tl.store(out_context_lens + row, tl.where(is_row, position + 1, 0), mask=inside)
    tl.store(out_logit_rows + batch_row, batch_row * TOKENS + tl.where(is_written, count - 1, 0))
    tl.store(taken_tokens + row, tokens, mask=inside)
    tl.store(taken_counts + batch_row, tl.where(is_expected, count, 0))
    tl.store(taken_lengths + batch_row, length)
    tl.store(taken_written + batch_row, is_written.to(tl.int32))

    left = tl.maximum(tl.load(num_left + batch_row), 0)
    last = tl.load(new_tokens + batch_row * TOKENS + tl.minimum(tl.maximum(count, 1), TOKENS) - 1)
    root = tl.load(request + _ROOT_TOKEN)
    # All threads have read the request before one writes to it.
    tl.debug_barrier()
    tl.store(request + _LENGTH, tl.where(is_known, length, before))
    tl.store(request + _ROOT_TOKEN, tl.where(is_expected, last, root))
    tl.store(request + _MAX_NODES, tl.where(is_written, tl.minimum(wanted, left), 0))


@triton.jit
def _stamp_draft(number, draft_stamp):
    step = tl.load(number)
    tl.debug_barrier()
    tl.store(draft_stamp, step)
    tl.store(number, step + 1)


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
    """Fill ``rows`` and ``taken``, and set LENGTH, ROOT_TOKEN and MAX_NODES of ``batch.requests``.

    A sequence gets drafts if the step is the expected one, it continues from its last length,
    and there is a KV slot for every new token. Its tree then has ``max_nodes`` nodes, or as many as
    the tokens that may still be emitted if these are fewer. Otherwise its tree is only the root:
    the last token of the last expected step.

    Args:
        results: results of at least as many batch rows as ``batch`` has.
        num_blocks: how many blocks of a row of ``batch.block_tables`` belong to the sequence.
        block_size: KV slots in a block.
        num_kv_slots: KV slots in the cache.

    Raises:
        ValueError: the shapes do not fit, or the tokens are not contiguous.
    """
    num_batch_rows, tokens = len(batch.max_nodes), results.new_tokens.shape[1]
    if min(len(results.counts), len(results.lengths), len(results.num_left), len(results.new_tokens)) < num_batch_rows:
        raise ValueError(f"results have {len(results.counts)} batch rows, {num_batch_rows} are asked for")
    if len(rows.token_ids) != num_batch_rows * tokens or taken.tokens.shape != (num_batch_rows, tokens):
        raise ValueError(f"{len(rows.token_ids)} rows for {num_batch_rows} batch rows of {tokens} tokens")
    if num_blocks > batch.block_tables.shape[1] or not results.new_tokens.is_contiguous():
        raise ValueError(f"{num_blocks} blocks exceed {tuple(batch.block_tables.shape)}, or tokens are not contiguous")
    _take_step[(num_batch_rows,)](
        results.stamp,
        results.counts,
        results.lengths,
        results.num_left,
        results.new_tokens,
        batch.number,
        batch.max_nodes,
        batch.requests,
        batch.block_tables,
        batch.block_tables.stride(0),
        rows.token_ids,
        rows.positions,
        rows.kv_slots,
        rows.context_lens,
        rows.logit_rows,
        taken.counts,
        taken.lengths,
        taken.is_written,
        taken.tokens,
        num_blocks,
        block_size,
        num_kv_slots,
        TOKENS=tokens,
        LANES=triton.next_power_of_2(tokens),
        num_warps=1,
    )


def stamp_draft(number: torch.Tensor, draft_stamp: torch.Tensor) -> None:
    """Stamp the trees as complete with ``number`` (int32 [1]), then advance it to the next step."""
    _stamp_draft[(1,)](number, draft_stamp, num_warps=1)
