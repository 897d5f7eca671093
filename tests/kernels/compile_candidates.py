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


def measure(call: Callable[[torch.Tensor], None], weights: Sequence[torch.Tensor]) -> float:
    """Ask for what a launch would compile; PyTorch's own way launches nothing here."""
    run = call
    assert isinstance(run, partial)
    if run.args[0] is not None:
        with compiling_ahead():
            call(weights[0])
    return 1.0


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    triton.knobs.runtime.jit_post_compile_hook = note
    triton.knobs.compilation.listener = note_thread
    shape = MatmulShape(4096, 1024, STORE)
    ahead: list[int] = []

    def measured(call: Callable[[torch.Tensor], None], weights: Sequence[torch.Tensor]) -> float:
        if not ahead:
            ahead.append(len(compiled))
        return measure(call, weights)

    # Not the word "cpu": what follows is a GPU's way.
    choose({shape: [torch.zeros(4096, 1024, dtype=torch.bfloat16)]}, {}, torch.device("cpu"), Device(), measured)
    assert len(set(compiled)) == len(compiled) == ahead[0] > 5, (len(compiled), ahead)
    assert all(name.startswith("compiler") for name in threads) and threads, threads


if __name__ == "__main__":
    main()
