# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Sample on the device: one token for every node row of every tree at once.

Three kernels: the first finds what each row keeps (its depth, and a cut for top-k, top-p and
min-p), the second the best token of each piece of the vocabulary, the third the best of these.
Logits are never written back: each pass processes them again. A logit of NaN or +inf counts as +inf
in the last two kernels, so that it wins its row and shows there. Divisions round to nearest, and
products are not fused with sums, so that a logit has exactly the bits of the definition.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from foretoken_kernels.gpu.noise import ESTIMATE_ERROR, gumbel_estimate, gumbel_from_words, token_words
from foretoken_kernels.gpu.row_cut import NO_TOKEN, row_cut
from foretoken_kernels.gpu.row_logits import (
    LogitsRow,
    batch_slot_of,
    parent_of,
    processed_logits,
    raw_logits,
    sample_sizes,
)
from foretoken_kernels.sampler_state import NO_SAMPLE, NOT_ALLOWED, SampleBatch, SamplerState

CHUNK_TOKENS = 2048
_NUM_WARPS = 4
# Loading a program's data about its row takes as long as a piece of the vocabulary, so with many
# rows a program processes several pieces.
_PROGRAMS = 2048
# If more tokens of a piece may still win, the noise is computed for the whole piece instead of one
# token at a time.
_MAX_RIVALS: tl.constexpr = tl.constexpr(8)
_NO_SAMPLE: tl.constexpr = tl.constexpr(NO_SAMPLE)
_NOT_ALLOWED: tl.constexpr = tl.constexpr(NOT_ALLOWED)


class SampleWorkspace(NamedTuple):
    """What one kernel of a step writes for the next.

    Attributes:
        depths: int32 [rows]; edges between the root and the row's node.
        cut_values: float32 [rows]; processed logits below it are cut.
        cut_ids: int32 [rows]; of logits equal to the cut value, larger ids are cut.
        chunk_values: float32 [rows, chunks]; the best value, noise included, of a program's pieces.
        chunk_ids: int32 [rows, chunks]; the id with that value.
        gathered_values, gathered_ids: float32, int32 [rows, 2 * chunk_tokens]; candidates of the
            top-k and top-p cuts.
        chunk_tokens: ids a piece.
    """

    depths: torch.Tensor
    cut_values: torch.Tensor
    cut_ids: torch.Tensor
    chunk_values: torch.Tensor
    chunk_ids: torch.Tensor
    gathered_values: torch.Tensor
    gathered_ids: torch.Tensor
    chunk_tokens: int


def sample_workspace(
    max_rows: int, vocab_size: int, device: torch.device | str, chunk_tokens: int = CHUNK_TOKENS
) -> SampleWorkspace:
    """Return a workspace for ``max_rows`` rows; ``chunk_tokens`` is a power of two, at least 16."""
    num_chunks = -(-vocab_size // chunk_tokens)

    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return SampleWorkspace(
        depths=empty(torch.int32, max_rows),
        cut_values=empty(torch.float32, max_rows),
        cut_ids=empty(torch.int32, max_rows),
        chunk_values=empty(torch.float32, max_rows, num_chunks),
        chunk_ids=empty(torch.int32, max_rows, num_chunks),
        gathered_values=empty(torch.float32, max_rows, 2 * chunk_tokens),
        gathered_ids=empty(torch.int32, max_rows, 2 * chunk_tokens),
        chunk_tokens=chunk_tokens,
    )


@triton.jit(do_not_specialize=["num_seqs"])
def _cut_kernel(batch, state, workspace, sizes, num_seqs, TOKENS: tl.constexpr):
    row = tl.program_id(0)
    seq = tl.load(batch.row_seqs + row)
    if (seq < 0) | (seq >= num_seqs):
        return
    batch_slot = batch_slot_of(batch, sizes, seq)
    start = tl.minimum(tl.maximum(tl.load(batch.row_starts + seq), 0), row)
    depth = start * 0
    node = row - start
    while node > 0:
        depth += 1
        node = parent_of(batch, start, node)
    cut = tl.full([], float("-inf"), tl.float32)
    cut_id = tl.full([], NO_TOKEN, tl.int32)
    top_k = tl.load(state.top_k + batch_slot)
    is_cut = ((top_k > 0) & (top_k < sizes.vocab_limit)) | (tl.load(state.top_p + batch_slot) < 1.0)
    is_cut = is_cut | (tl.load(state.min_p + batch_slot) > 0.0)
    if is_cut & (tl.load(state.temperature + batch_slot) > 0.0):
        masks_stops = tl.load(batch.num_outputs + seq) + depth < tl.load(state.min_tokens + batch_slot)
        at = LogitsRow(batch, state, sizes, row, start, batch_slot, masks_stops)
        cut, cut_id = row_cut(at, workspace, TOKENS)
    tl.store(workspace.depths + row, depth)
    tl.store(workspace.cut_values + row, cut)
    tl.store(workspace.cut_ids + row, cut_id)


@triton.jit
def _noised_best(values, ids, first_id, position, state, batch_slot, TOKENS: tl.constexpr):
    """Return the largest value with noise and its lowest id; at least one value must be above -inf.

    An estimate of the noise shows which tokens can win at all: nearly always one or two.
    """
    key_low = tl.load(state.seed_low + batch_slot)
    key_high = tl.load(state.seed_high + batch_slot)
    words = token_words(first_id // 4, position, tl.load(state.choice + batch_slot), key_low, key_high, TOKENS)
    estimates = values + gumbel_estimate(words)
    top = tl.max(estimates, axis=0)
    # Twice the error of one sum: the estimate's, and two roundings of a sum of this size.
    margin = tl.abs(top) * 1e-6 + 2.0 * ESTIMATE_ERROR
    rivals = estimates >= top - margin
    num_rivals = tl.sum(rivals.to(tl.int32), axis=0)
    best = tl.full([], float("-inf"), tl.float32)
    best_id = tl.full([], NO_TOKEN, tl.int32)
    if (num_rivals >= 1) & (num_rivals <= _MAX_RIVALS):
        rival = tl.full([], -1, tl.int32)
        for _ in range(num_rivals):
            rival = tl.min(tl.where(rivals & (ids > rival), ids, NO_TOKEN), axis=0)
            value = tl.max(tl.where(ids == rival, values, float("-inf")), axis=0)
            word = tl.sum(tl.where(ids == rival, words, 0).to(tl.int32, bitcast=True), axis=0)
            noised = value + gumbel_from_words(word.to(tl.uint32, bitcast=True))
            # Ids ascend, so the first of equal values stays.
            is_better = noised > best
            best = tl.where(is_better, noised, best)
            best_id = tl.where(is_better, rival, best_id)
    else:
        all_noised = values + gumbel_from_words(words)
        best = tl.max(all_noised, axis=0)
        best_id = tl.min(tl.where(all_noised == best, ids, NO_TOKEN), axis=0)
    return best, best_id


@triton.jit(do_not_specialize=["num_seqs", "num_chunks", "chunks_each"])
def _chunk_kernel(batch, state, workspace, sizes, num_seqs, num_chunks, chunks_each, TOKENS: tl.constexpr):
    group = tl.program_id(0)
    row = tl.program_id(1)
    first = group * chunks_each
    end = tl.minimum(first + chunks_each, num_chunks)
    limit = tl.minimum(end * TOKENS, sizes.vocab_limit)
    # Load before deciding what to do with the logits; in the loop, load the next piece before
    # processing this one. Both hide the latency.
    raw = raw_logits(first * TOKENS, batch, sizes, row, limit, TOKENS)
    seq = tl.load(batch.row_seqs + row)
    if (seq < 0) | (seq >= num_seqs):
        return
    batch_slot = batch_slot_of(batch, sizes, seq)
    start = tl.minimum(tl.maximum(tl.load(batch.row_starts + seq), 0), row)
    depth = tl.load(workspace.depths + row)
    masks_stops = tl.load(batch.num_outputs + seq) + depth < tl.load(state.min_tokens + batch_slot)
    cut = tl.load(workspace.cut_values + row)
    cut_id = tl.load(workspace.cut_ids + row)
    is_noised = tl.load(state.temperature + batch_slot) > 0.0
    position = tl.load(batch.positions + seq) + depth
    best = tl.full([], float("-inf"), tl.float32)
    best_id = tl.full([], NO_TOKEN, tl.int32)
    for chunk in range(first, end):
        first_id = chunk * TOKENS
        following = raw_logits(first_id + TOKENS, batch, sizes, row, limit, TOKENS)
        values = processed_logits(
            raw, first_id, batch, state, sizes, start, row - start, batch_slot, masks_stops, TOKENS
        )
        ids = first_id + tl.arange(0, TOKENS)
        is_sound = (raw.to(tl.float32) < float("inf")) & (values < float("inf"))
        values = tl.where((values > cut) | ((values == cut) & (ids <= cut_id)), values, float("-inf"))
        values = tl.where(is_sound, values, float("inf"))
        chunk_best = tl.max(values, axis=0)
        chunk_id = tl.min(tl.where(values == chunk_best, ids, NO_TOKEN), axis=0)
        if is_noised & (chunk_best > float("-inf")) & (chunk_best < float("inf")):
            chunk_best, chunk_id = _noised_best(values, ids, first_id, position, state, batch_slot, TOKENS)
        is_better = (chunk_best > best) | ((chunk_best == best) & (chunk_id < best_id))
        best = tl.where(is_better, chunk_best, best)
        best_id = tl.where(is_better, chunk_id, best_id)
        raw = following
    out = row.to(tl.int64) * tl.num_programs(0) + group
    tl.store(workspace.chunk_values + out, best)
    tl.store(workspace.chunk_ids + out, best_id)


@triton.jit(do_not_specialize=["num_seqs", "num_chunks"])
def _best_chunk_kernel(
    batch, workspace, sizes, sampled_ptr, num_seqs, num_chunks, CHUNKS: tl.constexpr, TOKENS: tl.constexpr
):
    row = tl.program_id(0)
    seq = tl.load(batch.row_seqs + row)
    if (seq < 0) | (seq >= num_seqs):
        tl.store(sampled_ptr + row, -1)
        return
    chunks = tl.arange(0, CHUNKS)
    inside = chunks < num_chunks
    at = row.to(tl.int64) * num_chunks + chunks
    values = tl.load(workspace.chunk_values + at, mask=inside, other=float("-inf"))
    ids = tl.load(workspace.chunk_ids + at, mask=inside, other=NO_TOKEN)
    best = tl.max(values, axis=0)
    best_id = tl.min(tl.where(values == best, ids, NO_TOKEN), axis=0)
    is_sampled = (best > float("-inf")) & (best < float("inf"))
    token = tl.where(is_sampled, tl.minimum(best_id, sizes.vocab_size - 1), _NO_SAMPLE)
    # The first condition is known when the kernel is compiled.
    if batch.mask_rows is not None:  # noqa: SIM102
        if (token == _NO_SAMPLE) & (tl.load(batch.mask_rows + row) >= 0):
            token = tl.where(_is_sound(batch, sizes, row, TOKENS), _NOT_ALLOWED, token)
    tl.store(sampled_ptr + row, token)


@triton.jit
def _is_sound(batch, sizes, row, TOKENS: tl.constexpr):
    """Return whether a row's logits hold no NaN and no +inf, and one above -inf."""
    is_finite = tl.full([], 1, tl.int32)
    best = tl.full([], float("-inf"), tl.float32)
    for first_id in range(0, sizes.vocab_limit, TOKENS):
        raw = raw_logits(first_id, batch, sizes, row, sizes.vocab_limit, TOKENS).to(tl.float32)
        # Comparisons with NaN are false.
        is_finite &= tl.min((raw < float("inf")).to(tl.int32), axis=0)
        best = tl.maximum(best, tl.max(tl.where(raw < float("inf"), raw, float("-inf")), axis=0))
    return (is_finite != 0) & (best > float("-inf"))


def sample_rows(batch: SampleBatch, state: SamplerState, workspace: SampleWorkspace, sampled: torch.Tensor) -> None:
    """Sample one token for each row; reference_sampling.sample_rows_reference defines it.

    Args:
        sampled: int32 [rows]; written; -1 for rows that belong to no sequence, NO_SAMPLE for rows
            with broken logits, NOT_ALLOWED for others of which the mask leaves no token.
    """
    num_rows, vocab_size = batch.logits.shape
    if num_rows == 0:
        return
    num_chunks = workspace.chunk_values.shape[1]
    chunk_tokens = workspace.chunk_tokens
    assert batch.logits.stride(1) == 1 and vocab_size == state.counts.shape[1]
    assert num_chunks * chunk_tokens >= vocab_size and len(workspace.depths) >= num_rows
    sizes = sample_sizes(batch, state)
    num_seqs = batch.batch_slots.shape[0]
    _cut_kernel[(num_rows,)](
        batch, state, workspace, sizes, num_seqs, TOKENS=2 * chunk_tokens, num_warps=16, enable_fp_fusion=False
    )
    chunks_each = max(num_rows * num_chunks // _PROGRAMS, 1)
    num_groups = triton.cdiv(num_chunks, chunks_each)
    _chunk_kernel[(num_groups, num_rows)](
        batch,
        state,
        workspace,
        sizes,
        num_seqs,
        num_chunks,
        chunks_each,
        TOKENS=chunk_tokens,
        num_warps=_NUM_WARPS,
        enable_fp_fusion=False,
    )
    chunks = triton.next_power_of_2(num_chunks)
    _best_chunk_kernel[(num_rows,)](
        batch,
        workspace,
        sizes,
        sampled,
        num_seqs,
        num_groups,
        CHUNKS=chunks,
        TOKENS=chunk_tokens,
        num_warps=1,
        enable_fp_fusion=False,
    )
