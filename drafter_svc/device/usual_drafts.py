"""The drafts and prompts from device memory that a drafter prepares for in advance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from foretoken_kernels.gpu.matmul_choice import ROW_BUCKETS

from drafter_svc.trees.growth import MAX_BRANCHES
from foretoken.drafting import TargetInfo
from foretoken.models.device_batch import NARROW_BLOCKS, WIDE_BLOCKS, seq_bucket
from foretoken.overlap_memory import OverlapLayout

# Blocks of a sequence: its table has the least width, and the next. Attention has the same kernels
# for all wider tables, so these compile what there is to compile.
_USUAL_BLOCKS = (1, NARROW_BLOCKS)
# Blocks of a prompt's table, for the same reason. The widest table may be of any width.
PROMPT_WIDTHS = (NARROW_BLOCKS, WIDE_BLOCKS)


class UsualDraft(NamedTuple):
    """What a graph of a draft depends on.

    Attributes:
        batch_rows: batch rows of the step.
        depth: levels of a tree.
        branches: children of a node.
        num_blocks: blocks of the longest sequence.
        filtered: whether any batch row has top-k, top-p or min-p.
    """

    batch_rows: int
    depth: int
    branches: int
    num_blocks: int
    filtered: bool


def usual_drafts(target: TargetInfo, layout: OverlapLayout) -> Iterator[UsualDraft]:
    """Yield the drafts that the target's verifier asks for most often, the earliest first.

    A run begins with few short sequences.
    """
    most_depth, most = max(layout.tokens - 1, 1), seq_bucket(layout.batch_rows)
    for num_blocks in _USUAL_BLOCKS:
        for filtered in (False, True):
            batch_rows = 1
            while batch_rows <= most:
                for depth, branches in target.usual_trees:
                    yield UsualDraft(
                        min(batch_rows, layout.batch_rows),
                        min(depth, most_depth),
                        min(branches, MAX_BRANCHES),
                        num_blocks,
                        filtered,
                    )
                batch_rows *= 2


def prompt_sizes(most_rows: int, most_seqs: int) -> Iterator[tuple[int, int]]:
    """Yield the sizes of prompt passes that together need all kernels.

    A size is a number of sequences, and the rows of the first one; the others have one row each.

    Matmuls have kernels for numbers of rows. Attention chooses its tiles by the rows of the longest
    sequence, and smaller ones where few sequences would leave a GPU idle.
    """
    powers = [1 << power for power in range(most_rows.bit_length())]
    yield from ((1, rows) for rows in sorted({*powers, *ROW_BUCKETS}) if rows <= most_rows)
    for seqs in powers[2::2]:
        if seqs <= most_seqs:
            yield from ((seqs, longest) for longest in powers if seqs - 1 + longest <= most_rows)
