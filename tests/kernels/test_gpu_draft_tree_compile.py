"""Test that the kernels of draft trees compile for compute capability 9.0, as they are launched.

The interpreter accepts much that the compiler does not, and the compiler needs no GPU.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from foretoken_kernels.gpu import draft_children, draft_cut, draft_tree
from foretoken_kernels.gpu import draft_tree_state as state

from tests.kernels.draft_courses import new_draft_output
from tests.support.environment import child_environment

# Trees, branches, levels, vocabulary, dtype of the logits, scale of the noise, whether draft ids
# are mapped.
SHAPES = (
    (16, 8, 3, 32000, torch.float32, 0.8, True),
    (16, 8, 3, 128256, torch.bfloat16, 0.8, False),
    (1, 1, 2, 128256, torch.float32, 0.0, False),
)
KERNELS = {
    draft_children: ("_look_through_chunk", "_offer_row"),
    draft_cut: ("_cut_row",),
    draft_tree: ("_choose_beams", "_place_nodes", "_write_nodes"),
}
TYPES = {torch.int32: "*i32", torch.int64: "*i64", torch.float32: "*fp32", torch.bfloat16: "*bf16"}


class Recorder:
    """Replaces a kernel: a launch compiles it for the given arguments instead of running it."""

    def __init__(self, kernel: Any, compiled: set[str]) -> None:
        self._kernel = kernel
        self._compiled = compiled

    def __getitem__(self, grid: Any) -> Any:
        return self._compile

    def _compile(self, *args: Any, num_warps: int = 4, **constants: Any) -> None:
        signature: dict[str, str] = {}
        hints: dict[tuple[int], list[list[Any]]] = {}
        for index, (name, value) in enumerate(zip(self._kernel.arg_names, args, strict=False)):
            if isinstance(value, torch.Tensor):
                signature[name] = TYPES[value.dtype]
            elif isinstance(value, float):
                signature[name] = "fp32"
                continue
            elif value == 1:
                signature[name], constants[name] = "constexpr", 1
                continue
            else:
                signature[name] = "i32"
            if isinstance(value, torch.Tensor) or value % 16 == 0:
                hints[(index,)] = [["tt.divisibility", 16]]
        signature |= dict.fromkeys(constants, "constexpr")
        key = f"{self._kernel.__name__} {sorted(signature.items())} {sorted(constants.items())} {sorted(hints)}"
        if key in self._compiled:
            return
        self._compiled.add(key)
        source = triton.compiler.ASTSource(fn=self._kernel, signature=signature, constexprs=constants, attrs=hints)
        target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
        binary = triton.compile(source, target=target, options={"num_warps": num_warps})
        assert binary.asm["cubin"]
        print("compiled", key)


def compile_draft(
    count: int, branches: int, depth: int, vocab: int, dtype: torch.dtype, scale: float, has_map: bool
) -> None:
    """Launch a whole draft with tensors without data."""
    trees, beams = state.new_draft_trees(count, branches, depth, "meta"), state.new_draft_beams(count, branches, "meta")
    workspace = draft_tree.offer_workspace(count, branches, vocab, "meta")
    target_ids = torch.zeros(vocab, dtype=torch.int32, device="meta") if has_map else None
    tables = torch.zeros((count, 64), dtype=torch.int32, device="meta")
    for level in range(depth):
        if level:
            options = {"num_kv_slots": 2**20, "scratch_kv_slot": 5, "first_depth": min(level, 2)}
            draft_tree.choose_beams(trees, level, tables, 16, beams, **options)
        logits = torch.zeros((count * (branches if level else 1), vocab), dtype=dtype, device="meta")
        draft_tree.offer_children(
            trees, logits, level, workspace, vocab_limit=vocab, target_ids=target_ids, scale=scale
        )
    draft_tree.emit_trees(trees, new_draft_output(count, 64, "meta"))


@pytest.mark.slow
def test_kernels_compile(tmp_path: Path) -> None:
    environment = {name: value for name, value in child_environment().items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, __file__]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    for names in KERNELS.values():
        for name in names:
            assert f"compiled {name} " in result.stdout


if __name__ == "__main__":
    known: set[str] = set()
    for module, names in KERNELS.items():
        for name in names:
            setattr(module, name, Recorder(getattr(module, name), known))
    for shape in SHAPES:
        compile_draft(*shape)
