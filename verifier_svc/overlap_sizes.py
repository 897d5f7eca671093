"""The usual sizes of overlapped steps, whose graphs are captured before the first request."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from itertools import pairwise
from typing import NamedTuple

from foretoken.models.device_batch import bucket, seq_bucket
from verifier_svc.speculation.candidate_shapes import SHARED_FROM

# Numbers of sequences, and rows of a step, whose graphs are captured before the first request.
_SEAT_COUNTS = (*range(1, 17), *range(18, 33, 2), *range(36, 65, 4), *range(72, 129, 8), *range(144, 513, 16))
MAX_USUAL_ROWS = 1024


class UsualSize(NamedTuple):
    """Rows, sequences, the most rows of one sequence, and whether the sequences share rows."""

    rows: int
    seqs: int
    max_width: int
    is_shared: bool


def usual_sizes(
    max_seats: int, most_nodes: int, sizes: Items[tuple[int, int]], *, has_found: bool
) -> Iterator[UsualSize]:
    """Yield the usual sizes of steps.

    Args:
        max_seats: most sequences.
        most_nodes: of a tree from the host.
        sizes, has_found: as for ResidentStep.captures.
    """
    for before, count in pairwise((0, *_SEAT_COUNTS)):
        for mean, most in sizes:
            is_shared = mean < most
            if is_shared and count < SHARED_FROM:
                continue
            # The largest size has as many rows as a graph may have, and holds some counts below its own.
            if before < max_seats and (before + 1) * mean <= MAX_USUAL_ROWS:
                seqs = min(count, max_seats)
                yield UsualSize(min(seqs * mean, MAX_USUAL_ROWS), seqs, most, is_shared)
    count = 1
    while has_found and count <= seq_bucket(max_seats):
        # Any number of the sequences has a tree of any size.
        seqs = min(count, max_seats)
        rows = count // 2 + 2
        while rows <= min(seqs * most_nodes, MAX_USUAL_ROWS):
            yield UsualSize(rows, seqs, most_nodes, False)
            rows = bucket(rows) + 1
        count *= 2
