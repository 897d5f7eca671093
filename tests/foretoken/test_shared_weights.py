"""One copy of a target's embedding and head for all drafters of a host."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
import torch

from foretoken.arena_layout import new_memory
from foretoken.errors import PreconditionError
from foretoken.models.target_weights import TargetWeights
from foretoken.models.weight_layout import PanelLayout
from foretoken.shared_weights import SharedWeights, map_weights


def weights(*, tied: bool, bfloat16: bool) -> TargetWeights:
    size = 40 * 16
    head = torch.arange(size, dtype=torch.float32)
    embedding = head if tied else head + 0.5
    if bfloat16:
        head, embedding = (each.to(torch.bfloat16).view(torch.uint16) for each in (head, embedding))
    return TargetWeights(40, 16, tied, PanelLayout(bfloat16), head if tied else embedding, head)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bfloat16", [True, False])
def test_what_is_mapped_is_what_was_shared(tied: bool, bfloat16: bool) -> None:
    original = weights(tied=tied, bfloat16=bfloat16)
    shared = SharedWeights(original)
    mapped = map_weights(shared.fileno())
    for one in (shared.weights, mapped):
        assert (one.vocab_size, one.hidden_size, one.tied, one.bfloat16) == (40, 16, tied, bfloat16)
        assert torch.equal(one.head.int(), original.head.int())
        assert torch.equal(one.embedding.float(), original.embedding.float())
    # A drafter that writes writes to pages of its own.
    mapped.head.fill_(0)
    assert torch.equal(shared.weights.head.int(), original.head.int())
    shared.close()
    assert torch.equal(shared.weights.head.int(), original.head.int())


def test_nobody_else_can_write_or_resize() -> None:
    shared = SharedWeights(weights(tied=False, bfloat16=True))
    size = os.fstat(shared.fileno()).st_size
    with pytest.raises(PermissionError):
        mmap.mmap(shared.fileno(), size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        os.ftruncate(shared.fileno(), 0)
    with pytest.raises(PermissionError):
        os.write(shared.fileno(), b"x")
    shared.close()


def test_other_memory_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"x" * 100, b"x" * mmap.PAGESIZE, b"FTWEIGHT\x09" + b"\0" * mmap.PAGESIZE):
        fd = new_memory("test", max(len(content), 1))
        os.pwrite(fd, content, 0)
        with pytest.raises(PreconditionError, match="shared weights"):
            map_weights(fd)
        os.close(fd)
