"""Buffers that the host fills while a copy of what it filled before still waits in the stream."""

from __future__ import annotations

import torch

from foretoken.models.pinned_buffers import PinnedBuffers


def buffers() -> PinnedBuffers:
    arrays = {"ids": ((3,), torch.int32), "weights": ((2,), torch.float32)}
    return PinnedBuffers(arrays, torch.device("cpu"))


class CountedEvent:
    """An event that counts who waits for it."""

    def __init__(self) -> None:
        self.num_waits = 0

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        self.num_waits += 1


def test_the_device_gets_what_was_filled() -> None:
    made = buffers()
    for first in range(4):
        made.wait()
        made.host["ids"][:] = range(first, first + 3)
        made.host["weights"][:] = first
        made.send()
        assert made.device["ids"].tolist() == [first, first + 1, first + 2]
        assert made.device["weights"].tolist() == [first, first]


def test_what_a_copy_reads_is_not_filled() -> None:
    made = buffers()
    made.wait()
    made.host["ids"][:] = 7
    under_way = made.host["ids"]
    made.send()
    made.wait()
    made.host["ids"][:] = 8
    assert under_way.tolist() == [7, 7, 7]


def test_content_stays_from_one_copy_to_the_next() -> None:
    made = buffers()
    made.wait()
    made.host["ids"][:] = (1, 2, 3)
    made.send()
    made.wait()
    made.host["ids"][1] = 9
    made.send()
    assert made.device["ids"].tolist() == [1, 9, 3]


def test_only_the_copy_before_the_last_one_is_waited_for() -> None:
    """The last one may stand in the stream behind a long prefill pass."""
    made = buffers()
    events = [CountedEvent(), CountedEvent()]
    made._side, made._last = made._side._replace(sent=events[0]), made._last._replace(sent=events[1])
    made.send()
    made.wait()
    assert [event.num_waits for event in events] == [0, 1]
    made.send()
    made.wait()
    assert [event.num_waits for event in events] == [1, 1]


def test_received_arrays_are_the_devices() -> None:
    made = buffers()
    made.device["ids"][:] = torch.tensor([4, 5, 6], dtype=torch.int32)
    assert made.receive()["ids"].tolist() == [4, 5, 6]
