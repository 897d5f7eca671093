"""Grow all levels of a batch of draft trees in one call.

For each level: choose the beams, run the draft model over them, offer their children. A pass over a
few rows of a small head takes a tenth of a millisecond; with Python between the levels a draft took
twice as long.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretoken_kernels.cpu.addresses import float32_at
from foretoken_kernels.cpu.batch_check import longest_path
from foretoken_kernels.cpu.compile import compiled
from foretoken_kernels.cpu.decoder import GIVEN, LOGITS, NUM_OPERATIONS, OPERATIONS, SCORE_STRIDE, set_batch
from foretoken_kernels.cpu.draft_tree import (
    MAX_DEPTH,
    Beams,
    Float32,
    Int32,
    Trees,
    choose_beams,
    keep_module_ancestors,
    offer_children,
)
from foretoken_kernels.cpu.thread_team import load_symbols, parallel

# LevelPass.output_field of a model whose only input is tokens.
NO_OUTPUT = -1


class LevelPass(NamedTuple):
    """A draft model's pass over beams; its table has room for ``max_rows`` rows.

    Attributes:
        args: int64; the table of a pass, see foretoken_kernels.cpu.decoder.
        programs: int64 [modules, 2]; address and number of operations of each module's program.
        function, num_threads: what runs a program, and on how many threads.
        output_field: the field of ``args`` whose buffer holds a pass's hidden states, or NO_OUTPUT.
        hidden_size: elements of a hidden state; 0: none.
        max_rows: most rows of one pass.
        limits: (vocab_size, max_positions, num_blocks, block_size), as for batch_check.
    """

    args: NDArray[np.int64]
    programs: NDArray[np.int64]
    function: int
    num_threads: int
    output_field: int
    hidden_size: int
    max_rows: int
    limits: tuple[int, int, int, int]


class Places(NamedTuple):
    """Positions of the trees in the draft model's KV cache. ``rows`` are the rows of the request.

    Attributes:
        block_tables: int32 [rows, blocks].
        tree_starts: int32 [rows].
        context_starts: int32 [modules, rows].
        block_size: KV slots in a block.
    """

    block_tables: Int32
    tree_starts: Int32
    context_starts: Int32
    block_size: int


class DraftVocabulary(NamedTuple):
    """The tokens that may be drafted.

    Attributes:
        size: logits in a row.
        limit: draft ids below this may be drafted.
        target_ids: int32; as for offer_children.
    """

    size: int
    limit: int
    target_ids: Int32


@compiled
def _grow_levels(  # noqa: PLR0913 - compiled code takes its arrays one by one
    trees: Trees,
    rows: Int32,
    places: Places,
    beams: Beams,
    level: LevelPass,
    root_hidden: Float32,
    beam_hidden: Float32,
    vocabulary: DraftVocabulary,
    all_rows: Int32,
    scale: float,
) -> int:
    """Grow the trees of ``rows`` level by level; the roots must have offered their children.

    Args:
        root_hidden: float32 [len(rows), hidden_size]; hidden states for the first level.
        beam_hidden: float32 [beams, hidden_size]; scratch.
        all_rows: int32; 0, 1, ... up to the beams of a pass.
        scale: as for offer_children.

    Returns:
        The number of passes that ran. -1 if a pass would have had an index out of range or too many
        rows; nothing was written after that point.
    """
    deepest = 1
    for i in range(len(rows)):
        deepest = max(deepest, int(trees.shapes[rows[i], MAX_DEPTH]))
    num_modules, size = len(level.programs), level.hidden_size
    args = level.args
    for depth in range(1, deepest):
        count = choose_beams(trees, rows, depth, places.block_tables, places.block_size, beams)
        if count == 0:
            return depth - 1
        if count > level.max_rows:
            return -1
        module = min(depth, num_modules - 1)
        if num_modules > 1:
            keep_module_ancestors(trees, beams, count, module)
        if size > 0:
            before = float32_at(args[level.output_field])
            for beam in range(count):
                source = np.int64(beams.sources[beam])
                for i in range(size):
                    beam_hidden[beam, i] = root_hidden[source, i] if depth == 1 else before[source * size + i]
        batch = (
            beams.token_ids[:count],
            beams.positions[:count],
            beams.kv_slots[:count],
            beams.rows[:count],
            beams.context_lens[:count],
            beams.masks[:count],
            places.tree_starts,
            places.block_tables,
            all_rows[:count],
            places.context_starts[module],
        )
        longest = longest_path(*batch, level.limits)
        if longest < 0 or longest > args[SCORE_STRIDE]:
            return -1
        set_batch(args, *batch)
        args[OPERATIONS], args[NUM_OPERATIONS] = level.programs[module, 0], level.programs[module, 1]
        args[GIVEN] = beam_hidden.ctypes.data
        parallel(level.function, args.ctypes.data, np.uint32(level.num_threads), np.uint32(0))
        offer_children(
            trees,
            float32_at(args[LOGITS]),
            vocabulary.size,
            vocabulary.limit,
            vocabulary.target_ids,
            beams.rows[:count],
            beams.nodes[:count],
            0,
            scale,
        )
    return deepest - 1


@cache
def growth_function() -> Any:
    """Return ``_grow_levels``, linked with the thread team's functions by name."""
    load_symbols()
    return _grow_levels
