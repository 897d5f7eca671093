"""The usual sizes of overlapped steps, whose graphs are captured before the first request."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from itertools import pairwise
from typing import NamedTuple

from foretoken.models.device_batch import bucket, seq_bucket
from foretoken.models.device_batches import PROMPT_SEQS, prompt_bucket
from verifier_svc.drafters.request import Shape
from verifier_svc.speculation.candidate_shapes import MOST_LARGE_TREE_ROWS, SHARED_FROM, is_large_tree

# Numbers of sequences, and rows of a step, whose graphs are captured before the first request.
_BATCH_ROW_COUNTS = (*range(1, 17), *range(18, 33, 2), *range(36, 65, 4), *range(72, 129, 8), *range(144, 513, 16))
MAX_USUAL_ROWS = 1024
# A long prompt of at most so many rows is faster in a pass for one sequence: attention divides its
# keys among more programs there.
_LONE_PROMPT_ROWS = 512
# Rows of a few large trees among many batch rows.
_EMPTIED_ROWS = (MOST_LARGE_TREE_ROWS // 4, MOST_LARGE_TREE_ROWS // 2, MOST_LARGE_TREE_ROWS)
# Rows of steps with long sequences. There are fewer sizes: spare rows matter less where contexts
# take most of the time.
_LONG_ROWS = (*range(1, 5), 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, MAX_USUAL_ROWS)


class UsualSize(NamedTuple):
    """Rows, sequences, and the most rows of one sequence."""

    rows: int
    seqs: int
    max_width: int


class ShapeRows(NamedTuple):
    """Rows of the steps in one shape of trees.

    Attributes:
        mean: of a sequence, on average.
        most: of one sequence.
        is_for_few: whether only small batches draft so (MOST_LARGE_TREE_ROWS).
    """

    mean: int
    most: int
    is_for_few: bool = False


def rows_of_shapes(shapes: Items[Shape]) -> list[ShapeRows]:
    """Return the rows of all shapes among which the controller chooses.

    With a single shape, return its rows for any batch.
    """
    has_choice = len(shapes) > 1
    return sorted({ShapeRows(shape.rows, shape.nodes, has_choice and is_large_tree(shape)) for shape in shapes})


def usual_sizes(
    max_batch_rows: int, most_nodes: int, shapes: Items[ShapeRows], *, has_found: bool
) -> Iterator[UsualSize]:
    """Yield the usual sizes of steps.

    Args:
        max_batch_rows: most sequences.
        most_nodes: of a tree from the host.
        shapes, has_found: as for OverlappedStep.captures.
    """
    for before, count in pairwise((0, *_BATCH_ROW_COUNTS)):
        for mean, most, is_for_few in shapes:
            limit = MOST_LARGE_TREE_ROWS if is_for_few else MAX_USUAL_ROWS
            if mean < most and count < SHARED_FROM:
                continue
            # The largest size has as many rows as a graph may, and holds some counts below its own.
            if before < max_batch_rows and (before + 1) * mean <= limit:
                seqs = min(count, max_batch_rows)
                yield UsualSize(min(seqs * mean, limit), seqs, most)
    if has_found:
        yield from _sizes_with_found(max_batch_rows, most_nodes)
    else:
        yield from _emptied_sizes(max_batch_rows, shapes)


def long_sizes(
    max_batch_rows: int, most_nodes: int, shapes: Items[ShapeRows], *, has_found: bool
) -> Iterator[UsualSize]:
    """Yield the usual sizes of steps whose sequences need more than the narrowest block tables.

    Args: as for ``usual_sizes``.
    """
    # Attention's tiles are for the widest tree of a step, so small trees and large ones have sizes
    # of their own.
    few = [shape for shape in shapes if shape.is_for_few]
    kinds = [(MOST_LARGE_TREE_ROWS, few), (MAX_USUAL_ROWS, [shape for shape in shapes if not shape.is_for_few])]
    if has_found:
        kinds.append((MAX_USUAL_ROWS, [ShapeRows(1, most_nodes)]))
    count = 1
    while count <= seq_bucket(max_batch_rows):
        seqs = min(count, max_batch_rows)
        for limit, kind in kinds:
            if not kind:
                continue
            most = max(shape.most for shape in kind)
            least, last = max(count // 2 + 1, min(shape.mean for shape in kind)), min(seqs * most, limit)
            for rows in (*(rows for rows in _LONG_ROWS if least <= rows < last), last):
                yield UsualSize(rows, seqs, most)
        count *= 2


def prompt_passes(max_rows: int, max_batch_rows: int, *, is_long: bool) -> Iterator[tuple[int, int]]:
    """Yield rows and sequences of the passes over prompts alone: of one, of a few, and of many.

    Args:
        max_rows: prompt tokens of a step, and rows of the largest such pass that has a graph.
        is_long: whether a prompt is long. One of more rows that fills no chunk runs in the pass of
            a few.
    """
    for count in PROMPT_SEQS:
        rows = 0
        while rows < max_rows:
            rows = min(prompt_bucket(max(rows + 1, count)), max_rows)
            if not is_long or count > 1 or rows <= _LONE_PROMPT_ROWS or rows == max_rows:
                yield rows, min(count, max_batch_rows)


def _sizes_with_found(max_batch_rows: int, most_nodes: int) -> Iterator[UsualSize]:
    """Yield sizes for steps with trees from the host.

    The trees may be of any size and belong to any sequences.
    """
    count = 1
    while count <= seq_bucket(max_batch_rows):
        seqs = min(count, max_batch_rows)
        rows = count // 2 + 2
        while rows <= min(seqs * most_nodes, MAX_USUAL_ROWS):
            yield UsualSize(rows, seqs, most_nodes)
            rows = bucket(rows) + 1
        count *= 2


def _emptied_sizes(max_batch_rows: int, shapes: Items[ShapeRows]) -> Iterator[UsualSize]:
    """Yield sizes for batches that have emptied.

    The few sequences left draft in large trees, among many batch rows.
    """
    most = max((shape.most for shape in shapes if shape.is_for_few), default=0)
    if not most:
        return
    count = seq_bucket(MOST_LARGE_TREE_ROWS // most + 1)
    while count <= seq_bucket(max_batch_rows):
        for rows in _EMPTIED_ROWS:
            yield UsualSize(rows, min(count, max_batch_rows), most)
        count *= 2
