"""When graphs are captured while nothing runs."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

from verifier_svc.overlap.runs import OverlapRuns
from verifier_svc.overlap.step import OverlappedStep
from verifier_svc.speculation.speculator import Speculator


class Capturing:
    """A step that captures what it lacks, and loses all when its buffers move."""

    def __init__(self) -> None:
        self.generation = 0
        self.captured: set[int] = set()
        self.has_long_sequences = False

    def captures(
        self, captured_layers: tuple[int, ...], shapes: Any, *, has_found: bool, is_long: bool
    ) -> Iterator[None]:
        for size in range(10, 12) if is_long else range(5):
            if size not in self.captured:
                self.captured.add(size)
                yield

    def move(self) -> None:
        self.generation += 1
        self.captured.clear()


def test_what_moved_is_captured_again() -> None:
    """A drafter that comes later may have a program whose buffers are larger."""
    step = Capturing()
    ahead = OverlapRuns(lambda *_: cast(OverlappedStep, step), cast(OverlappedStep, step), timeout_s=1.0)
    nobody = cast(Speculator, SimpleNamespace(drafters=[]))
    assert [ahead.prepare(nobody) for _ in range(7)] == [True] * 5 + [False] * 2
    step.move()
    assert [ahead.prepare(nobody) for _ in range(3)] == [True] * 3
    step.move()
    assert [ahead.prepare(nobody) for _ in range(7)] == [True] * 5 + [False] * 2


def test_graphs_for_short_sequences_come_first() -> None:
    """The captures before the first request may be cut short."""
    plain, drafted = Capturing(), Capturing()
    plain.has_long_sequences = True
    ahead = OverlapRuns(lambda *_: cast(OverlappedStep, drafted), cast(OverlappedStep, plain), timeout_s=1.0)
    nobody = cast(Speculator, SimpleNamespace(drafters=[]))
    assert [ahead.prepare(nobody) for _ in range(5)] == [True] * 5 and plain.captured == set(range(5))
    assert [ahead.prepare(nobody) for _ in range(3)] == [True] * 2 + [False]
    assert plain.captured == {*range(5), 10, 11}
