"""A kernel that writes to an address 64 TiB above a tensor."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def wild_store(values) -> None:  # type: ignore[no-untyped-def]
    tl.store(values + (1 << 44), 1.0)
