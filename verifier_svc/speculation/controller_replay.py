"""Give a controller's log to a new controller, and compare the decisions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, cast

from verifier_svc.drafters.request import Shape, TreeBounds
from verifier_svc.speculation.controller import Controller
from verifier_svc.speculation.controller_log import Record


class ReplayedDecision(NamedTuple):
    """What was decided for one step, then and now."""

    batch: int
    logged: Shape
    replayed: Shape
    controller: Controller


class _Times:
    """The target's times as they were logged last."""

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}

    def __call__(self, num_rows: int) -> float:
        known = self.seconds.get(num_rows)
        if known is not None:
            return known
        # Other code may ask for rows that were not logged: the nearest
        # count that was is the best guess.
        nearest = min(self.seconds, key=lambda rows: abs(rows - num_rows))
        return self.seconds[nearest] * max(num_rows / nearest, 1.0)


def replay(records: Iterable[Record]) -> Iterator[ReplayedDecision]:
    """Return the decisions that a new controller makes from the records of one.

    Raises:
        ValueError: the first record says no bounds, or a record is of an unknown kind.
    """
    records = iter(records)
    kind, *first = next(records, ("",))
    if kind != "bounds":
        raise ValueError("the log does not begin with the bounds of trees")
    *bounds, limit_s = first
    times = _Times()
    controller = Controller(TreeBounds(*cast("list[int]", bounds)), times, limit_s=float(limit_s))
    for kind, *values in records:
        numbers = cast("list[int]", values)
        match kind:
            case "verify":
                times.seconds[numbers[0]] = float(values[1])
            case "choose":
                batch, *logged = numbers
                yield ReplayedDecision(batch, Shape(*logged), controller.choose(batch), controller)
            case "step":
                *logged, batch, _, num_prompt_tokens = numbers
                controller.observe_step(Shape(*logged), batch, float(values[-2]), num_prompt_tokens=num_prompt_tokens)
            case "walks":
                *logged, num_matched, drafted, count = numbers
                for _ in range(count):
                    controller.observe_walk(Shape(*logged), num_matched, drafted)
            case _:
                raise ValueError(f"unknown record: {kind}")
