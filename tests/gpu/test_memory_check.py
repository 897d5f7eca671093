"""No kernel touches memory outside its tensors: compute-sanitizer watches every access."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.gpu import sanitizer
from tests.support.kernel_launches import all_kernels, launched


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command,
        env=sanitizer.environment(),
        cwd=sanitizer.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    print(done.stdout)
    return done


def run_checked(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    found = sanitizer.find()
    if found is None:
        pytest.skip("there is no compute-sanitizer")
    done = run(sanitizer.command(found, "memcheck", arguments))
    # Virtual machines may lack its debugging interface: it has watched nothing then.
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer does not support this device")
    return done


@pytest.mark.slow
def test_the_cases_launch_every_kernel() -> None:
    """The cases run without the sanitizer here, so this works everywhere."""
    kernels = all_kernels()
    assert {"_tree_attention", "_cut_row", "_rms_norm_kernel"} <= kernels and "gather" not in kernels
    done = run([sys.executable, *sanitizer.pytest_arguments()])
    assert done.returncode == 0
    assert launched(done.stdout) == kernels


@pytest.mark.gpu
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("index", "status"), [(999, 0), (1000, sanitizer.FOUND)])
def test_a_read_after_a_tensor_is_found(index: int, status: int) -> None:
    done = run_checked(["-m", "tests.support.read_outside", str(index)])
    assert done.returncode == status
    assert ("Invalid __global__ read of size 4 bytes" in done.stdout) == (status != 0)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(540)
def test_no_access_outside_of_a_tensor() -> None:
    done = run_checked(sanitizer.pytest_arguments())
    assert done.returncode == 0
    assert "ERROR SUMMARY: 0 errors" in done.stdout
    assert launched(done.stdout) == all_kernels()
