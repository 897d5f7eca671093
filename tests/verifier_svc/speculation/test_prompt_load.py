"""Long prompts: what the controller makes of a load whose steps are full."""

from __future__ import annotations

import pytest

from tests.support.prompt_load import PromptLoad
from tests.support.synthetic_machine import H200_MS, Machine
from verifier_svc.drafters.request import TreeBounds
from verifier_svc.speculation.controller import Controller

# Prompts of 8,000 tokens, whose attention is dearer than that of short ones.
MACHINE = Machine(H200_MS, prompt_us=35.0)


def speed(bounds: TreeBounds, seed: int) -> float:
    # Keys and values of 1,000 tokens of an 8B model are 131 MB: 32 us at 4.1 TB/s.
    load = PromptLoad(clients=64, prompt=8000, output=1000, requests=3, tokens=4, context_us=32.0)
    return load.speed(MACHINE, Controller(bounds, MACHINE.verify_s, limit_s=load.limit_s), seed)


def speed_after_fewer_clients(bounds: TreeBounds, seed: int) -> float:
    """Return the speed where steps of long drafts and their prompts just exceed the limit."""
    few, many = (
        PromptLoad(clients, prompt=8000, output=1000, requests=requests, tokens=4, context_us=25.0, limit_s=0.055)
        for clients, requests in ((16, 1), (64, 3))
    )
    controller = Controller(bounds, MACHINE.verify_s, limit_s=few.limit_s)
    few.speed(MACHINE, controller, seed)
    return many.speed(MACHINE, controller, seed)


@pytest.mark.parametrize("seed", range(3))
def test_shapes_that_leave_less_room_for_prompts_are_kept_if_they_yield_more(seed: int) -> None:
    """With fewer tokens a step more steps read the long contexts, and prompts get less time."""
    best = max(speed(TreeBounds(4, 3, 1), seed), speed(TreeBounds(6, 5, 1), seed))
    assert speed(TreeBounds(32), seed) > 0.98 * best


def test_shapes_that_leave_more_room_do_not_stand_for_long_if_they_yield_less() -> None:
    seeds = range(6)
    best = sum(speed_after_fewer_clients(TreeBounds(4, 3, 1), seed) for seed in seeds)
    assert sum(speed_after_fewer_clients(TreeBounds(32), seed) for seed in seeds) > 0.9875 * best
