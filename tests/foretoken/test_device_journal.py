"""A device journal keeps the kernels' repeated results, which are read later, oldest first."""

from __future__ import annotations

import pytest
import torch

from foretoken.models.device_journal import DeviceJournal


def test_records_are_read_in_their_order(device: str) -> None:
    journal = DeviceJournal({"counts": (2,), "tokens": (2, 3)}, 2, torch.device(device))
    found = []
    for step in range(5):
        journal.device["counts"].fill_(step)
        journal.device["tokens"].copy_(torch.arange(6).view(2, 3) + 10 * step)
        journal.record()
        if step % 2:
            assert len(journal) == 2
            with pytest.raises(ValueError, match="a journal of 2 records is full"):
                journal.record()
            for _ in range(2):
                while not journal.is_ready():
                    pass
                found.append({name: values.tolist() for name, values in journal.take().items()})
    assert len(journal) == 1
    assert [record["counts"] for record in found] == [[step, step] for step in range(4)]
    assert found[3]["tokens"] == [[30, 31, 32], [33, 34, 35]]


def test_arrays_are_aligned(device: str) -> None:
    """Arrays of any size are aligned: Triton compiles another kernel for an unaligned one."""
    journal = DeviceJournal({"first": (3,), "second": (5, 2), "third": (1,)}, 1, torch.device(device))
    assert [array.data_ptr() % 16 for array in journal.device.values()] == [0, 0, 0]
