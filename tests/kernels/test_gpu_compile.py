"""Test that the kernels compile for compute capability 9.0, with the shapes of Llama-3.1-8B.

The interpreter accepts much that the compiler does not, and the compiler needs no GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import foretoken_kernels
import pytest
from foretoken_kernels.gpu import strict_attention

pytestmark = pytest.mark.slow

# Bytes of shared memory of a program on compute capability 9.0 (CUDA's programming guide,
# "Technical specifications").
HOPPER_SHARED_MEMORY = 227 << 10
# A type for each argument that is not a constant; ``:16`` means that an integer is a multiple of
# 16.
Case = tuple[str, str, dict[str, Any], dict[str, int]]
LLAMA = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEAD_DIM": 128, "HALF_BLOCK": 64, "HEADS": 8}
CASES: dict[str, list[Case]] = {
    "rms_norm": [
        (
            "_rms_norm",
            f"*{x} *fp32 *{out} *i32 *{out} i32 i32:16 i32:16 i32:16 i32:16 fp32",
            {"HAS_ROWS": rows, "HAS_COPY": copy, "BLOCK": 4096},
            {"num_warps": 8},
        )
        for x, out, rows, copy in (
            ("bf16", "bf16", False, False),
            ("bf16", "bf16", True, False),
            ("bf16", "bf16", True, True),
            ("fp32", "bf16", False, False),
        )
    ],
    "activation": [("_silu_and_multiply", "*bf16 *bf16 i32:16 i32:16 i32:16", {"BLOCK": 512}, {"num_warps": 2})],
    "embedding": [
        (
            "_gather_rows",
            f"*{x} *i32 *i32 *{out} i32 i32:16 i32:16 i32:16 i32",
            {"HAS_ROWS": rows, "HAS_POSITIONS": positions, "BLOCK": 1024},
            {"num_warps": 4},
        )
        for x, out, rows, positions in (
            ("bf16", "bf16", True, True),
            ("bf16", "bf16", False, False),
            ("fp32", "bf16", False, False),
        )
    ],
    "rope_kv_write": [
        (
            "_rope_kv_write",
            "*bf16 *bf16 *bf16 *bf16 *fp32 *i32 *i32 *bf16 *bf16 fp32 i32 i32 i32:16 i32:16 i32:16",
            {**LLAMA, "HAS_BIAS": bias, "HAS_NORM": norm},
            {"num_warps": warps},
        )
        for bias, norm, warps in ((False, False, 4), (False, False, 1), (True, True, 4))
    ],
    "kv_commit": [
        (
            "_kv_commit",
            "*bf16 *i32 *i32 *i32 *i32 i32 i32 i32 i32:16 i64:16 i32:16 i32 i32",
            {"BLOCK_SIZE": 16, "DEPTHS": depths, "BLOCK": 256},
            {"num_warps": 4},
        )
        for depths in (1, 8, 16)
    ]
    + [
        ("_copy_kv_slots", "*bf16 *i32 *i32 i32 i32 i32:16 i64:16 i32:16", {"BLOCK": 1024}, {"num_warps": 4}),
    ],
}
CASES["draft_intake"] = [
    (
        "_take_step",
        " ".join(["*i32"] * 9 + ["i32"] + ["*i32"] * 9 + ["i32", "i32:16", "i32"]),
        {"TOKENS": tokens, "LANES": lanes},
        {"num_warps": 1},
    )
    for tokens, lanes in ((1, 1), (6, 8))
] + [("_stamp_draft", "*i32 *i32", {}, {"num_warps": 1})]
CASES["skinny_matmul"] = [
    (
        "_skinny_matmul",
        f"*{x} *{x} *{out} *fp32 *i32 i32 i32:16 i32:16 i32:16 i32:16 i32:16",
        {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "SPLIT_K": split, "EVEN_N": even, "EVEN_K": even}
        | {"ADD": mode == "add", "GATE_UP": mode == "gate_up"},
        {"num_stages": stages, "num_warps": warps},
    )
    for x, out, m, (n, k, split, stages, warps), mode, even in (
        ("bf16", "bf16", 16, (64, 128, 4, 3, 4), "store", True),
        ("bf16", "bf16", 16, (32, 256, 1, 5, 4), "add", True),
        ("bf16", "fp32", 16, (128, 128, 1, 3, 8), "store", True),
        ("bf16", "bf16", 32, (64, 128, 2, 5, 4), "add", True),
        ("bf16", "bf16", 32, (32, 128, 2, 5, 4), "gate_up", True),
        ("bf16", "bf16", 64, (128, 128, 4, 3, 8), "add", True),
        ("bf16", "bf16", 64, (64, 128, 1, 3, 8), "gate_up", True),
        ("bf16", "bf16", 64, (64, 128, 2, 4, 4), "store", False),
        ("bf16", "bf16", 128, (128, 64, 1, 4, 8), "gate_up", True),
        ("fp32", "fp32", 16, (32, 16, 2, 2, 4), "gate_up", False),
    )
]
CASES["wide_gate_up"] = [
    (
        "_wide_gate_up",
        "tensordesc<bf16[128,64]> tensordesc<bf16[64,64]> tensordesc<bf16[2,128,64]>"
        " *bf16 i32 i32:16 i32:16 i32:16 i32",
        {"PROGRAMS": 132, "M": 128, "N": 128, "K": 64},
        {"num_stages": 4, "num_warps": 8},
    )
]
CASES["qkv_rope"] = [
    (
        "_qkv_rope",
        f"*{x} *{x} *{x} *fp32 *fp32 *fp32 *fp32 *i32 *i32 *{x} *{x} *fp32 *i32 fp32 i32 i32:16 i32:16 i32 i32"
        " i32:16 i32:16 i32:16 i32:16",
        {"NUM_HEADS": heads[0], "NUM_KV_HEADS": heads[1], "HEAD_DIM": heads[2], "HAS_BIAS": bias, "HAS_NORM": norm}
        | {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "SPLIT_K": split, "EVEN_K": even, "WIDEN": False},
        {"num_stages": stages, "num_warps": warps},
    )
    for x, heads, bias, norm, m, (n, k, split, stages, warps), even in (
        ("bf16", (32, 8, 128), False, False, 16, (32, 256, 1, 4, 4), True),
        ("bf16", (32, 8, 128), False, False, 32, (32, 128, 2, 4, 4), True),
        ("bf16", (32, 8, 128), False, False, 64, (64, 128, 1, 4, 4), True),
        ("bf16", (28, 4, 128), True, False, 16, (64, 128, 4, 3, 4), True),
        ("bf16", (32, 8, 128), False, True, 32, (128, 128, 4, 3, 8), True),
        ("fp32", (6, 2, 80), True, False, 16, (32, 16, 2, 2, 4), False),
    )
]
# The tiles of Llama-3.1-8B's matrices, and of small and float32 ones.
CASES["strict_matmul"] = [
    (
        "_strict_matmul",
        f"*{x} *{x} *{out} *fp32 *i32 i32 i32:16 i32:16 i32:16 i32:16 i32:16",
        {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "SPLIT_K": split, "EVEN_N": even, "EVEN_K": even}
        | {"ADD": mode == "add", "GATE_UP": mode == "gate_up", "WIDEN": False},
        {"num_stages": stages, "num_warps": warps},
    )
    for x, out, m, (n, k, split, stages, warps), mode, even in (
        ("bf16", "bf16", 128, (128, 64, 4, 4, 8), "add", True),
        ("bf16", "bf16", 128, (128, 64, 1, 4, 8), "gate_up", True),
        ("bf16", "bf16", 128, (64, 128, 1, 3, 8), "store", True),
        ("bf16", "fp32", 128, (256, 64, 1, 3, 8), "store", True),
        ("bf16", "bf16", 64, (64, 128, 1, 5, 4), "store", True),
        ("bf16", "bf16", 64, (64, 128, 4, 3, 4), "add", True),
        ("bf16", "bf16", 64, (32, 128, 1, 3, 4), "gate_up", True),
        ("bf16", "fp32", 64, (64, 128, 1, 3, 4), "store", True),
        ("bf16", "bf16", 64, (64, 64, 1, 3, 4), "gate_up", False),
        ("fp32", "fp32", 16, (32, 32, 1, 3, 4), "gate_up", False),
    )
]
CASES["strict_attention"] = [
    (
        "_strict_attention",
        f"*{x} i32:16 i32:16 *{x} *{x} *i32 *i32 *i32 i32 *i32 *i32 i32 *i32 *{x} i32:16 i32:16 *fp32 *fp32 *fp32 *i32"
        " i32 i32 i32 i32 fp32",
        strict_attention._constants(*heads, block_size, 2 * words, x == "fp32"),
        {"num_stages": 5, "num_warps": 4, "enable_fp_fusion": False},
    )
    for x, heads, block_size, words in (
        ("bf16", (32, 8, 128), 16, 1),
        ("bf16", (28, 4, 128), 1, 4),
        ("bf16", (8, 2, 256), 24, 2),
        ("bf16", (64, 1, 64), 16, 1),
        ("fp32", (6, 2, 64), 16, 1),
    )
]
for _cases in CASES.values():
    # float16 has the same sources: one case of each kernel is enough.
    for _name in {case[0] for case in _cases}:
        _first = next((case for case in _cases if case[0] == _name and "bf16" in case[1]), None)
        if _first is not None:
            _cases.append((_name, _first[1].replace("bf16", "fp16"), *_first[2:]))
_COMPILE = """
import importlib, json, sys, traceback
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def shared_memory(module, name, types, constants, options):
    kernel = getattr(importlib.import_module("foretoken_kernels.gpu." + module), name)
    types = types.split()
    arguments = [a for a in kernel.arg_names if a not in constants]
    assert len(arguments) == len(types) and set(constants) <= set(kernel.arg_names), (kernel.arg_names, types)
    signature = {a: "constexpr" for a in constants} | {a: t.split(":")[0] for a, t in zip(arguments, types)}
    aligned = [a for a, t in zip(arguments, types) if t.startswith("*") or t.endswith(":16")]
    source = ASTSource(
        fn=kernel,
        signature={a: signature[a] for a in kernel.arg_names},
        constexprs=constants,
        attrs={(kernel.arg_names.index(a),): [["tt.divisibility", 16]] for a in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.asm["cubin"]
    return compiled.metadata.shared


for module, cases in json.load(sys.stdin).items():
    try:
        outcome = [shared_memory(module, *case) for case in cases]
    except Exception:
        outcome = traceback.format_exc()
    print(json.dumps([module, outcome]))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int] | str]:
    """Return, by module, the bytes of shared memory of each case, or an error.

    One process compiles all, because it takes seconds to start.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(foretoken_kernels.__file__).parents[1])
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, "-c", _COMPILE]
    result = subprocess.run(command, input=json.dumps(CASES), env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return dict(json.loads(line) for line in result.stdout.splitlines())


@pytest.mark.parametrize("module", CASES)
def test_compiles(module: str, compiled: dict[str, list[int] | str]) -> None:
    found = compiled[module]
    assert isinstance(found, list), found
    assert len(found) == len(CASES[module])
    if module == "wide_gate_up":
        # The kernel uses the largest tiles that fit and has no smaller ones to fall back on.
        assert found[-1] <= HOPPER_SHARED_MEMORY
