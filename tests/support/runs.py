"""An engine with overlapped steps, a free target, and a drafter that knows the texts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from foretoken.resident import ResidentMemory, StreamOrder
from foretoken.sampling import SamplingParams
from tests.support.engine_harness import Harness, Request, Result
from tests.support.hash_target import HIDDEN_SIZE, HashTarget
from tests.support.host_step import HostStep, plain_memory
from tests.support.oracle_drafter import OracleDrafter
from verifier_svc.overlap import RunAhead

VOCAB, BLOCK, NODES, SEATS = 40, 4, 6, 8
FEATURES = (1, 2)


def prompt(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB) for _ in range(length)]


def greedy(seed: int, length: int, max_tokens: int, **options: Any) -> Request:
    return Request(prompt(seed, length), SamplingParams(temperature=0.0, max_tokens=max_tokens), **options)


def plain(requests: Sequence[Request]) -> list[Result]:
    target = HashTarget(VOCAB, 400, BLOCK)
    return Harness(target, vocab_size=VOCAB, num_blocks=400, block_size=BLOCK).run([r.plain() for r in requests])


def oracle_of(requests: Sequence[Request], results: Sequence[Result], **options: Any) -> OracleDrafter:
    texts = [[*request.prompt, *result.token_ids, 3] for request, result in zip(requests, results, strict=True)]
    return OracleDrafter(
        texts,
        "cpu",
        features=FEATURES,
        width=len(FEATURES) * HIDDEN_SIZE,
        dtype=torch.float32,
        seats=SEATS,
        nodes=NODES,
        block_size=BLOCK,
        **options,
    )


class Runs:
    """An engine with overlapped steps. ``steps``: the steps made for a drafter's memory."""

    def __init__(
        self,
        sources: Sequence[OracleDrafter] = (),
        *,
        num_blocks: int = 400,
        max_running: int = SEATS,
        timeout_s: float = 600.0,
        num_steps: int = 3,
        on_launch: Callable[[int], None] = lambda number: None,
        is_stuck: Callable[[int, int], bool] = lambda number, num_releases: False,
        target: HashTarget | None = None,
        **options: Any,
    ) -> None:
        target = target or HashTarget(VOCAB, num_blocks, BLOCK)
        self.steps: list[HostStep] = []

        def make(memory: ResidentMemory, order: StreamOrder) -> HostStep:
            step = HostStep(
                target,
                memory,
                order,
                block_size=BLOCK,
                num_blocks=num_blocks,
                on_launch=on_launch,
                # The first one made is for plain decode, which waits for nobody.
                **({"is_stuck": is_stuck} if self.steps else {}),
            )
            self.steps.append(step)
            return step

        ahead = RunAhead(make, make(plain_memory(SEATS), StreamOrder()), timeout_s=timeout_s)  # type: ignore[arg-type]
        self.harness = Harness(
            target,
            vocab_size=VOCAB,
            num_blocks=num_blocks,
            block_size=BLOCK,
            sources=sources,  # type: ignore[arg-type]
            run_ahead=ahead,
            max_running=max_running,
            max_nodes=NODES,
            num_steps=num_steps,
            timeout_s=600.0,
            **options,
        )

    @property
    def num_ahead(self) -> int:
        return self.harness.engine.counters.num_resident_steps

    @property
    def num_ordinary(self) -> int:
        """Return the number of steps that did not overlap."""
        return self.harness.engine.counters.num_steps - self.num_ahead
