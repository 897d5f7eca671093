"""Define the operations between the passes of overlapped steps, in plain PyTorch."""

from __future__ import annotations

import torch

from foretoken_kernels.overlap_state import (
    FAIRNESS,
    MOST_FAIRNESS,
    NO_KV_SLOT,
    NO_NODE,
    RATE_STEPS,
    RATE_TRUST,
    SCORE_BITS,
    SCORE_STEPS,
    BatchState,
    DraftedTrees,
    Joining,
    StepResults,
    StepRows,
)
from foretoken_kernels.sampler_state import FINISH_BROKEN, FINISH_LENGTH, FINISH_NONE, FINISH_NOT_ALLOWED, WalkTensors


def join_batch_reference(batch: BatchState, joining: Joining) -> None:
    """Define gpu.overlap_joins.join_batch: fill the batch rows of sequences that join."""
    for batch_row in joining.joins.nonzero()[:, 0].tolist():
        for name in Joining._fields[1:]:
            getattr(batch, name)[batch_row] = getattr(joining, name)[batch_row]
        batch.rates[batch_row] = 0


def share_rows_reference(
    batch: BatchState,
    drafted: DraftedTrees,
    found: DraftedTrees,
    scores: torch.Tensor,
    widths: torch.Tensor,
    row_starts: torch.Tensor,
    num_rows: int,
) -> None:
    """Define gpu.shared_rows.share_rows: divide the rows of a step among its sequences.

    They go to the drafted nodes with the largest chance / rate ** FAIRNESS.
    """
    step, worst = int(batch.step[0]), (1 << SCORE_BITS) - 1
    num_steps = (step - batch.joined).clamp(0, RATE_STEPS) * ((widths > 0) & (batch.num_left > 0))
    mean = ((batch.rates * num_steps).sum() / num_steps.sum().clamp(min=1)).clamp(min=1.0)
    own = (batch.rates * num_steps + RATE_TRUST * mean) / (num_steps + RATE_TRUST)
    ahead = (FAIRNESS * (own / mean).log()).clamp(-MOST_FAIRNESS, MOST_FAIRNESS)
    keys: list[tuple[int, int]] = []
    sizes = []
    for batch_row, width in enumerate(widths.tolist()):
        is_found = int(found.stamp[0]) == step and int(found.num_nodes[batch_row]) > 1
        is_drafted = int(drafted.stamp[0]) == step > int(batch.joined[batch_row])
        count = int(found.num_nodes[batch_row]) if is_found else int(drafted.num_nodes[batch_row]) if is_drafted else 1
        count = min(count, int(batch.num_left[batch_row]))
        sizes.append(int(width > 0))
        for node in range(1, width):
            key = worst
            if node < count:
                key = 0
                if not is_found and node < scores.shape[1]:
                    score, behind = scores[batch_row, node], ahead[batch_row] + MOST_FAIRNESS
                    is_good = bool(score * SCORE_STEPS > -(worst - 1))
                    key = int((behind - score.clamp(max=0.0)) * SCORE_STEPS) if is_good else worst
                    key = min(key, worst - 1)
            keys.append((key, batch_row))
    quota = min(num_rows, int(widths.sum())) - sum(sizes)
    # The sort is stable: of equal keys, the lower batch row comes first.
    for _, batch_row in sorted(keys, key=lambda each: each[0])[:quota]:
        sizes[batch_row] += 1
    row_starts[0] = 0
    row_starts[1:] = torch.tensor(sizes).cumsum(0)


def lay_out_rows_reference(
    batch: BatchState,
    drafted: DraftedTrees,
    found: DraftedTrees,
    block_tables: torch.Tensor,
    rows: StepRows,
    block_size: int,
    vocab_size: int,
    max_depth: int,
) -> None:
    """Define gpu.overlap_rows.lay_out_rows: lay out each sequence's root and tree as rows."""
    num_batch_rows = len(rows.tree_starts)
    step = int(batch.step[0])
    for batch_row in range(num_batch_rows):
        is_found = int(found.stamp[0]) == step and int(found.num_nodes[batch_row]) > 1
        has_tree = is_found or int(drafted.stamp[0]) == step > int(batch.joined[batch_row])
        trees = found if is_found else drafted
        start, end = int(rows.row_starts[batch_row]), int(rows.row_starts[batch_row + 1])
        left, length = int(batch.num_left[batch_row]), int(batch.lengths[batch_row])
        table = block_tables[batch_row].tolist()
        parents, tokens = trees.parents[batch_row].tolist(), trees.tokens[batch_row].tolist()
        count = 0
        if left > 0 and end > start:
            count = max(min(int(trees.num_nodes[batch_row]), end - start, left), 1) if has_tree else 1
            if any(not (0 <= parents[i] < i and 0 <= tokens[i] < vocab_size) for i in range(1, count)):
                count = 1
            depths = [0]
            for i in range(1, count):
                depths.append(depths[parents[i]] + 1)
            if max(depths) > max_depth:
                count = 1
        ancestors: list[set[int]] = []
        for i in range(end - start):
            row = start + i
            if i >= count:
                rows.token_ids[row], rows.positions[row], rows.context_lens[row] = 0, 0, 0
                rows.kv_slots[row], rows.row_seqs[row] = NO_KV_SLOT, -1
                rows.tokens[row] = rows.parents[row] = NO_NODE
                rows.masks[row] = 0
                continue
            ancestors.append(ancestors[parents[i]] | {i} if i else set())
            logical = length - 1 + i
            block = table[logical // block_size] if logical // block_size < len(table) else -1
            rows.token_ids[row] = rows.tokens[row] = tokens[i] if i else int(batch.last_tokens[batch_row])
            rows.parents[row] = parents[i] if i else -1
            rows.positions[row] = length - 1 + len(ancestors[i])
            rows.kv_slots[row] = block * block_size + logical % block_size if block >= 0 else NO_KV_SLOT
            rows.context_lens[row] = length
            rows.row_seqs[row] = batch_row
            for word in range(rows.masks.shape[1]):
                bits = sum(1 << (node % 64) for node in ancestors[i] if node // 64 == word)
                rows.masks[row, word] = bits - (1 << 64) if bits >= 1 << 63 else bits
        rows.num_nodes[batch_row] = count
        rows.tree_starts[batch_row] = max(length - 1, 0)
        rows.sample_positions[batch_row] = length
        rows.num_outputs[batch_row] = batch.num_outputs[batch_row]
        rows.max_new[batch_row] = max(left, 1)


def force_walk_reference(rows: StepRows, walk: WalkTensors, owed: torch.Tensor, mean: float) -> None:
    """Define gpu.forced_walk.force_walk: each tree's walk takes its deepest path.

    On average a step emits ``mean`` tokens.
    """
    for batch_row in range(len(rows.num_nodes)):
        start, count = int(rows.row_starts[batch_row]), int(rows.num_nodes[batch_row])
        if count <= 1 or int(walk.finish[batch_row]) in (FINISH_BROKEN, FINISH_NOT_ALLOWED):
            continue
        paths: list[list[int]] = [[]]
        for node in range(1, count):
            paths.append([*paths[int(rows.parents[start + node])], node])
        deepest = max(paths, key=len)
        owed[batch_row] += mean
        length = int(owed[batch_row])
        owed[batch_row] -= length
        length = max(1, min(length, len(deepest) + 1, walk.tokens.shape[1]))
        sampled = int(walk.tokens[batch_row, int(walk.num_walked[batch_row]) - 1])
        matched = deepest[: length - 1]
        emitted = min(length, int(rows.max_new[batch_row]))
        for i, node in enumerate(matched):
            walk.tokens[batch_row, i] = rows.tokens[start + node]
            walk.accepted[batch_row, i] = node
            walk.nodes[batch_row, i + 1] = node
        walk.nodes[batch_row, 0] = 0
        walk.tokens[batch_row, length - 1] = sampled
        walk.num_walked[batch_row], walk.num_tokens[batch_row] = length, emitted
        walk.num_matched[batch_row], walk.num_accepted[batch_row] = length - 1, min(length - 1, emitted)
        walk.finish[batch_row] = FINISH_LENGTH if emitted == int(rows.max_new[batch_row]) else FINISH_NONE


def advance_batch_reference(batch: BatchState, rows: StepRows, walk: WalkTensors, results: StepResults) -> None:
    """Define gpu.overlap_results.advance_batch: commit what the walk emitted."""
    most = results.new_tokens.shape[1]
    for batch_row in range(len(rows.num_nodes)):
        if int(rows.num_nodes[batch_row]) == 0:
            for counts in (walk.num_walked, walk.num_tokens, walk.num_matched, walk.num_accepted):
                counts[batch_row] = 0
            walk.finish[batch_row] = FINISH_NONE
            results.counts[batch_row] = 0
            results.lengths[batch_row], results.num_left[batch_row] = batch.lengths[batch_row], 0
            continue
        count = min(int(walk.num_tokens[batch_row]), most)
        batch.lengths[batch_row] += count
        batch.num_outputs[batch_row] += count
        left = int(batch.num_left[batch_row]) - count if int(walk.finish[batch_row]) == FINISH_NONE else 0
        batch.num_left[batch_row] = left
        num_steps = int(batch.step[0]) - int(batch.joined[batch_row]) + 1
        batch.rates[batch_row] += (count - batch.rates[batch_row]) / min(max(num_steps, 1), RATE_STEPS)
        if count:
            batch.last_tokens[batch_row] = walk.tokens[batch_row, count - 1]
        results.counts[batch_row], results.num_left[batch_row] = count, left
        results.lengths[batch_row] = batch.lengths[batch_row]
        results.new_tokens[batch_row, :count] = walk.tokens[batch_row, :count]


def gather_hidden_reference(
    hidden_states: torch.Tensor, rows: StepRows, walk: WalkTensors, results: StepResults
) -> None:
    """Define gpu.overlap_results.gather_hidden: copy the committed tokens' hidden states."""
    most = results.new_tokens.shape[1]
    for batch_row in range(len(rows.num_nodes)):
        for i in range(int(results.counts[batch_row])):
            node = int(walk.accepted[batch_row, i - 1]) if i else 0
            results.hidden[batch_row * most + i] = hidden_states[int(rows.row_starts[batch_row]) + node]


def finish_step_reference(batch: BatchState, results: StepResults) -> None:
    """Define gpu.overlap_results.finish_step: count the step and stamp its results."""
    batch.step.add_(1)
    results.stamp.copy_(batch.step)
