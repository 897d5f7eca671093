"""Compile the device sampler and the walk for a GPU; no GPU is needed."""

from __future__ import annotations

from typing import Any

import triton
from foretoken_kernels.gpu import sample, walk
from foretoken_kernels.gpu.row_logits import SampleSizes
from foretoken_kernels.sampler_state import SampleBatch, SamplerState, WalkTensors
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

STATE = SamplerState(
    *("*fp32", "*i32", "*fp64", "*fp64", "*fp32", "*fp32", "*fp32", "*i64", "*i64", "*i32", "*i32", "*i32", "*i32"),
    *("*fp32", "*i32", "*i32", "*i32", "*i8"),
)
WORKSPACE = sample.SampleWorkspace("*i32", "*fp32", "*i32", "*fp32", "*i32", "*fp32", "*i32", "i32")
SIZES = SampleSizes(*["i32"] * 7)
RESULT = WalkTensors(*["*i32"] * 8)


def compile_kernel(kernel: Any, arguments: dict[str, Any], constants: dict[str, Any], num_warps: int) -> None:
    signature = arguments | dict.fromkeys(constants, "constexpr")
    absent = {
        (kernel.arg_names.index(name), place): None
        for name, fields in arguments.items()
        if isinstance(fields, tuple)
        for place, kind in enumerate(fields)
        if kind == "constexpr"
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs={**constants, **absent})
    options = {"num_warps": num_warps, "enable_fp_fusion": False}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    # A fused multiply-add would give a penalized logit other bits than the definition has.
    assert "fma.rn.f32" not in ptx and "div.full.f32" not in ptx


def compile_all(logits: str) -> None:
    """Compile the kernels as the engine launches them for a vocabulary of 128256.

    ``logits`` is the type of the logits' pointer, for example "*bf16".
    """
    for masks in ("constexpr", "*i32"):
        compile_batch(SampleBatch(logits, *["*i32"] * 8, "i32", masks, masks))


def compile_batch(batch: SampleBatch) -> None:
    step = {"batch": batch, "state": STATE, "workspace": WORKSPACE, "sizes": SIZES, "num_seqs": "i32"}
    compile_kernel(sample._cut_kernel, step, {"TOKENS": 2 * sample.CHUNK_TOKENS}, 16)
    compile_kernel(
        sample._chunk_kernel, step | {"num_chunks": "i32", "chunks_each": "i32"}, {"TOKENS": sample.CHUNK_TOKENS}, 4
    )
    best = {"batch": batch, "workspace": WORKSPACE, "sizes": SIZES, "sampled_ptr": "*i32"}
    best |= {"num_seqs": "i32", "num_chunks": "i32"}
    compile_kernel(sample._best_chunk_kernel, best, {"CHUNKS": 64, "TOKENS": sample.CHUNK_TOKENS}, 1)
    steps = {"batch": batch, "state": STATE, "result": RESULT, "sizes": SIZES, "sampled_ptr": "*i32", "num_rows": "i32"}
    for update_state in (True, False):
        constants = {"UPDATE_STATE": update_state, "STOPS": 64, "NODES": 128}
        compile_kernel(walk._walk_kernel, steps | {"max_tokens": "i32"}, constants, 4)
