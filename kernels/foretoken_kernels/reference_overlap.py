"""Define the operations between the passes of overlapped steps, in plain PyTorch."""

from __future__ import annotations

import torch

from foretoken_kernels.overlap_state import (
    FAIRNESS,
    MOST_FAIRNESS,
    NO_NODE,
    NO_SLOT,
    RATE_STEPS,
    RATE_TRUST,
    SCORE_BITS,
    SCORE_STEPS,
    DraftedTrees,
    Joining,
    Seats,
    StepResults,
    StepRows,
)
from foretoken_kernels.sampler_state import FINISH_BROKEN, FINISH_LENGTH, FINISH_NONE, FINISH_NOT_ALLOWED, WalkTensors


def join_seats_reference(seats: Seats, joining: Joining) -> None:
    """Define gpu.overlap_joins.join_seats: seat the sequences that join."""
    for seat in joining.joins.nonzero()[:, 0].tolist():
        for name in Joining._fields[1:]:
            getattr(seats, name)[seat] = getattr(joining, name)[seat]
        seats.rates[seat] = 0


def share_rows_reference(
    seats: Seats,
    drafted: DraftedTrees,
    found: DraftedTrees,
    scores: torch.Tensor,
    widths: torch.Tensor,
    row_starts: torch.Tensor,
    num_rows: int,
) -> None:
    """Define gpu.shared_rows.share_rows: divide rows among the seats.

    They go to the drafted nodes with the largest chance / rate ** FAIRNESS.
    """
    step, worst = int(seats.step[0]), (1 << SCORE_BITS) - 1
    num_steps = (step - seats.joined).clamp(0, RATE_STEPS) * ((widths > 0) & (seats.num_left > 0))
    mean = ((seats.rates * num_steps).sum() / num_steps.sum().clamp(min=1)).clamp(min=1.0)
    own = (seats.rates * num_steps + RATE_TRUST * mean) / (num_steps + RATE_TRUST)
    ahead = (FAIRNESS * (own / mean).log()).clamp(-MOST_FAIRNESS, MOST_FAIRNESS)
    keys: list[tuple[int, int]] = []
    sizes = []
    for seat, width in enumerate(widths.tolist()):
        is_found = int(found.stamp[0]) == step and int(found.num_nodes[seat]) > 1
        is_drafted = int(drafted.stamp[0]) == step > int(seats.joined[seat])
        count = int(found.num_nodes[seat]) if is_found else int(drafted.num_nodes[seat]) if is_drafted else 1
        count = min(count, int(seats.num_left[seat]))
        sizes.append(int(width > 0))
        for node in range(1, width):
            key = worst
            if node < count:
                key = 0
                if not is_found and node < scores.shape[1]:
                    score, behind = scores[seat, node], ahead[seat] + MOST_FAIRNESS
                    is_good = bool(score * SCORE_STEPS > -(worst - 1))
                    key = int((behind - score.clamp(max=0.0)) * SCORE_STEPS) if is_good else worst
                    key = min(key, worst - 1)
            keys.append((key, seat))
    quota = min(num_rows, int(widths.sum())) - sum(sizes)
    # The sort is stable: of equal keys, the lower seat's come first.
    for _, seat in sorted(keys, key=lambda each: each[0])[:quota]:
        sizes[seat] += 1
    row_starts[0] = 0
    row_starts[1:] = torch.tensor(sizes).cumsum(0)


def lay_out_rows_reference(
    seats: Seats,
    drafted: DraftedTrees,
    found: DraftedTrees,
    block_tables: torch.Tensor,
    rows: StepRows,
    block_size: int,
    vocab_size: int,
    max_depth: int,
) -> None:
    """Define gpu.overlap_rows.lay_out_rows: lay out each seat's root and tree as rows."""
    num_seats = len(rows.tree_starts)
    step = int(seats.step[0])
    for seat in range(num_seats):
        is_found = int(found.stamp[0]) == step and int(found.num_nodes[seat]) > 1
        has_tree = is_found or int(drafted.stamp[0]) == step > int(seats.joined[seat])
        trees = found if is_found else drafted
        start, end = int(rows.row_starts[seat]), int(rows.row_starts[seat + 1])
        left, length = int(seats.num_left[seat]), int(seats.lengths[seat])
        table = block_tables[seat].tolist()
        parents, tokens = trees.parents[seat].tolist(), trees.tokens[seat].tolist()
        count = 0
        if left > 0 and end > start:
            count = max(min(int(trees.num_nodes[seat]), end - start, left), 1) if has_tree else 1
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
                rows.slot_mapping[row], rows.row_seqs[row] = NO_SLOT, -1
                rows.tokens[row] = rows.parents[row] = NO_NODE
                rows.masks[row] = 0
                continue
            ancestors.append(ancestors[parents[i]] | {i} if i else set())
            logical = length - 1 + i
            block = table[logical // block_size] if logical // block_size < len(table) else -1
            rows.token_ids[row] = rows.tokens[row] = tokens[i] if i else int(seats.last_tokens[seat])
            rows.parents[row] = parents[i] if i else -1
            rows.positions[row] = length - 1 + len(ancestors[i])
            rows.slot_mapping[row] = block * block_size + logical % block_size if block >= 0 else NO_SLOT
            rows.context_lens[row] = length
            rows.row_seqs[row] = seat
            for word in range(rows.masks.shape[1]):
                bits = sum(1 << (node % 64) for node in ancestors[i] if node // 64 == word)
                rows.masks[row, word] = bits - (1 << 64) if bits >= 1 << 63 else bits
        rows.num_nodes[seat] = count
        rows.tree_starts[seat] = max(length - 1, 0)
        rows.sample_positions[seat] = length
        rows.num_outputs[seat] = seats.num_outputs[seat]
        rows.max_new[seat] = max(left, 1)


def force_walk_reference(rows: StepRows, walk: WalkTensors, owed: torch.Tensor, mean: float) -> None:
    """Define gpu.forced_walk.force_walk: each tree's walk takes its deepest path.

    On average a step emits ``mean`` tokens.
    """
    for seat in range(len(rows.num_nodes)):
        start, count = int(rows.row_starts[seat]), int(rows.num_nodes[seat])
        if count <= 1 or int(walk.finish[seat]) in (FINISH_BROKEN, FINISH_NOT_ALLOWED):
            continue
        paths: list[list[int]] = [[]]
        for node in range(1, count):
            paths.append([*paths[int(rows.parents[start + node])], node])
        deepest = max(paths, key=len)
        owed[seat] += mean
        length = int(owed[seat])
        owed[seat] -= length
        length = max(1, min(length, len(deepest) + 1, walk.tokens.shape[1]))
        sampled = int(walk.tokens[seat, int(walk.num_walked[seat]) - 1])
        matched = deepest[: length - 1]
        emitted = min(length, int(rows.max_new[seat]))
        for i, node in enumerate(matched):
            walk.tokens[seat, i] = rows.tokens[start + node]
            walk.accepted[seat, i] = node
            walk.nodes[seat, i + 1] = node
        walk.nodes[seat, 0] = 0
        walk.tokens[seat, length - 1] = sampled
        walk.num_walked[seat], walk.num_tokens[seat] = length, emitted
        walk.num_matched[seat], walk.num_accepted[seat] = length - 1, min(length - 1, emitted)
        walk.finish[seat] = FINISH_LENGTH if emitted == int(rows.max_new[seat]) else FINISH_NONE


def advance_seats_reference(seats: Seats, rows: StepRows, walk: WalkTensors, results: StepResults) -> None:
    """Define gpu.overlap_results.advance_seats: commit what the walk emitted."""
    most = results.new_tokens.shape[1]
    for seat in range(len(rows.num_nodes)):
        if int(rows.num_nodes[seat]) == 0:
            walk.num_walked[seat] = walk.num_tokens[seat] = walk.num_matched[seat] = walk.num_accepted[seat] = 0
            walk.finish[seat] = FINISH_NONE
            results.counts[seat] = 0
            results.lengths[seat], results.num_left[seat] = seats.lengths[seat], 0
            continue
        count = min(int(walk.num_tokens[seat]), most)
        seats.lengths[seat] += count
        seats.num_outputs[seat] += count
        left = int(seats.num_left[seat]) - count if int(walk.finish[seat]) == FINISH_NONE else 0
        seats.num_left[seat] = left
        num_steps = int(seats.step[0]) - int(seats.joined[seat]) + 1
        seats.rates[seat] += (count - seats.rates[seat]) / min(max(num_steps, 1), RATE_STEPS)
        if count:
            seats.last_tokens[seat] = walk.tokens[seat, count - 1]
        results.counts[seat], results.lengths[seat], results.num_left[seat] = count, seats.lengths[seat], left
        results.new_tokens[seat, :count] = walk.tokens[seat, :count]


def gather_hidden_reference(features: torch.Tensor, rows: StepRows, walk: WalkTensors, results: StepResults) -> None:
    """Define gpu.overlap_results.gather_hidden: copy the committed tokens' hidden states."""
    most = results.new_tokens.shape[1]
    for seat in range(len(rows.num_nodes)):
        for i in range(int(results.counts[seat])):
            node = int(walk.accepted[seat, i - 1]) if i else 0
            results.hidden[seat * most + i] = features[int(rows.row_starts[seat]) + node]


def finish_step_reference(seats: Seats, results: StepResults) -> None:
    """Define gpu.overlap_results.finish_step: count the step and stamp its results."""
    seats.step.add_(1)
    results.stamp.copy_(seats.step)
