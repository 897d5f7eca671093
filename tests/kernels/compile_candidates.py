"""Compile the candidates of a matmul for a GPU, several at once; no GPU is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch
import triton
from foretoken_kernels.gpu.compile_ahead import compiling_ahead
from foretoken_kernels.gpu.matmul_choice import STORE, MatmulShape
from foretoken_kernels.gpu.matmul_timing import choose
from foretoken_kernels.gpu.skinny_configs import Device
from triton.backends.compiler import GPUTarget


class Driver:
    """The part of a GPU's driver that compiling needs."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


compiled: list[object] = []
threads: set[str] = set()


def note(*, key: object, **_: object) -> None:
    compiled.append(key)


def note_thread(*, src: object, **_: object) -> bool:
    threads.add(threading.current_thread().name)
    return False


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    triton.knobs.runtime.jit_post_compile_hook = note
    triton.knobs.compilation.listener = note_thread
    num_compiled: list[int] = []

    def measure(call: Callable[[torch.Tensor], None], weights: Sequence[torch.Tensor]) -> float:
        """Ask for what a launch would compile; PyTorch's own matmul has no configuration."""
        num_compiled.append(len(compiled))
        assert isinstance(call, partial)
        (config,) = call.args
        if config is not None:
            with compiling_ahead():
                call(weights[0])
        return 1.0

    weights = {MatmulShape(4096, 1024, STORE): [torch.zeros(4096, 1024, dtype=torch.bfloat16)]}
    # Not the word "cpu", which means that nothing is compiled.
    choose(weights, {}, torch.device("cpu"), Device(), measure)
    assert len(set(compiled)) == len(compiled) == num_compiled[0] > 5, (len(compiled), num_compiled[0])
    assert all(name.startswith("compiler") for name in threads) and threads, threads


if __name__ == "__main__":
    main()
