"""The kernels' tests under NVIDIA's compute-sanitizer.

    python -m tests.gpu.sanitizer [memcheck | initcheck | racecheck | synccheck]

Every tensor is an allocation of exactly its size, with no other memory right after it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The toolkit's place for it; it is rarely on the PATH.
INSTALLED = "/usr/local/cuda/bin/compute-sanitizer"
# pytest never ends with this status.
FOUND = 9
# Cases with exactly sized tensors and with garbage in them; together they launch every kernel.
CASES = (
    "test_gpu_exact_sizes.py",
    "test_gpu_tree_attention.py::test_garbage_makes_no_illegal_address",
    "test_gpu_strict_attention.py::test_garbage_makes_no_illegal_address",
    "test_gpu_kv_commit.py::test_kv_slots_of_several_pieces",
    "test_gpu_kv_commit.py::test_moves_from_or_to_nowhere_are_left_out",
    "test_gpu_walk.py::test_steps_commit_what_the_verifier_commits[0]",
    "test_gpu_walk.py::test_garbage_stays_inside_its_tensors",
    "test_gpu_overlap.py::test_rows[widths3-140-3-0]",
    "test_gpu_overlap.py::test_the_best_nodes_of_the_batch_get_the_rows",
    "test_gpu_overlap.py::test_sequences_that_join[150]",
    "test_gpu_overlap.py::test_an_unsound_tree_is_a_root",
    "test_gpu_overlap.py::test_results[0]",
    "test_gpu_overlap.py::test_a_forced_walk[2.5]",
    "test_gpu_draft_intake.py",
    "test_gpu_draft_tree.py::test_kv_slots_outside_the_cache_become_the_scratch_kv_slot",
)


def pytest_arguments() -> list[str]:
    """Return Python's arguments; the first failing case ends the run: the device is lost."""
    plugin = ["-p", "tests.support.kernel_launches", "-p", "no:cacheprovider"]
    return ["-m", "pytest", "-q", "-x", *plugin, *(f"tests/kernels/{case}" for case in CASES)]


def find() -> str | None:
    return shutil.which("compute-sanitizer") or (INSTALLED if os.path.exists(INSTALLED) else None)


def command(sanitizer: str, tool: str, arguments: Sequence[str]) -> list[str]:
    """Return Python's command under a tool; its status is FOUND if the tool finds something."""
    # Triton's children are compilers, and PyTorch asks for functions that a driver need not have.
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--target-processes", "application-only"]
    if tool == "memcheck":
        options += ["--padding", "4096", "--report-api-errors", "no"]
    return [sanitizer, *options, sys.executable, *arguments]


def environment() -> dict[str, str]:
    search = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": os.pathsep.join(filter(None, search))}


def main() -> None:
    sanitizer = find()
    if sanitizer is None:
        sys.exit(f"compute-sanitizer is neither on the PATH nor {INSTALLED}")
    tool = sys.argv[1] if len(sys.argv) > 1 else "memcheck"
    sys.exit(subprocess.run(command(sanitizer, tool, pytest_arguments()), env=environment(), cwd=ROOT).returncode)


if __name__ == "__main__":
    main()
