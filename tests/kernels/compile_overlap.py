"""Compile the kernels of overlapped steps for a GPU; no GPU is needed."""

from __future__ import annotations

from typing import Any

import triton
from foretoken_kernels.gpu import forced_walk, overlap_joins, overlap_results, overlap_rows, shared_rows
from foretoken_kernels.overlap_state import BatchState, DraftedTrees, Joining, StepResults, StepRows
from foretoken_kernels.sampler_state import WalkTensors
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

BATCH, TREES = BatchState(*["*i32"] * 6, "*fp32", "*i32"), DraftedTrees(*["*i32"] * 4)
ROWS = StepRows(*["*i32"] * 5, "*i64", *["*i32"] * 8)
WALK, RESULTS = WalkTensors(*["*i32"] * 8), StepResults(*["*i32"] * 5, "*bf16")


def compile_kernel(kernel: Any, arguments: dict[str, Any], constants: dict[str, int], num_warps: int) -> None:
    signature = arguments | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
    assert compiled.asm["cubin"]


def compile_all() -> None:
    """Compile chains and trees, with masks of one and two words."""
    sizes = dict.fromkeys(
        (
            "num_rows",
            "max_blocks",
            "num_kv_slots",
            "drafted_stride",
            "found_stride",
            "table_stride",
            "vocab_size",
            "max_depth",
        ),
        "i32",
    )
    rows = {"batch": BATCH, "drafted": TREES, "found": TREES, "block_tables": "*i32", "rows": ROWS} | sizes
    for nodes, words, warps in ((2, 1, 1), (32, 1, 1), (64, 1, 4), (128, 2, 4)):
        constants = {"BLOCK_SIZE": 16, "WORDS": words, "PADDED_WORDS": words, "NODES": nodes}
        compile_kernel(overlap_rows._lay_out_rows, rows, constants, warps)
        forced = {"rows": ROWS, "walk": WALK, "owed": "*fp32", "mean": "fp32", "max_walked": "i32"}
        compile_kernel(forced_walk._force_walk, forced, {"NODES": nodes}, 1)
    shared = {"batch": BATCH, "drafted": TREES, "found": TREES, "scores": "*fp32"}
    shared |= dict.fromkeys(("widths", "row_starts", "walk_starts"), "*i32")
    shared |= dict.fromkeys(("num_batch_rows", "num_rows", "stride"), "i32")
    for size, nodes in ((2, 2), (256, 8), (512, 64)):
        compile_kernel(
            shared_rows._share_rows, shared, {"BATCH_ROWS": size, "NODES": nodes, "STEPS": 256, "BITS": 12}, 8
        )
    step = {"rows": ROWS, "walk": WALK, "results": RESULTS}
    advance = {"batch": BATCH} | step | {"max_walked": "i32", "most": "i32"}
    compile_kernel(overlap_results._advance_batch, advance, {"TOKENS": 8, "RATE_STEPS": 64}, 1)
    gather = {"hidden_states": "*bf16"} | step
    gather |= dict.fromkeys(("num_rows", "max_walked", "most", "width", "stride"), "i32")
    compile_kernel(overlap_results._gather_hidden, gather, {"BLOCK": 2048}, 4)
    joining = {"batch": BATCH, "joining": Joining(*["*i32"] * 7), "num_batch_rows": "i32"}
    compile_kernel(overlap_joins._join_batch, joining, {"BLOCK": 128}, 4)
    compile_kernel(overlap_results._finish_step, {"batch": BATCH, "results": RESULTS}, {}, 1)
