"""Read an element of a tensor of 1000 on a GPU, inside or outside of it.

python -m tests.support.read_outside INDEX
"""

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl


@triton.jit
def _copy_element(source, out, index):  # type: ignore[no-untyped-def]
    tl.store(out, tl.load(source + index))


def main() -> None:
    source, out = torch.ones(1000, device="cuda"), torch.zeros(1, device="cuda")
    _copy_element[(1,)](source, out, int(sys.argv[1]))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
