"""Requests that run with a look-up drafter that knows some places of their texts."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import pytest

from foretoken.drafting import DraftBatch, DraftRequest, TargetInfo
from foretoken.sampling import SamplingParams, SpeculationOptions
from tests.support.engine_harness import Request, Result, TestSource
from tests.support.runs import (
    BLOCK,
    NODES,
    VOCAB,
    Runs,
    oracle_of,
    plain,
    prompt,
)
from tests.support.scripted_drafter import Nodes, ScriptedDrafter
from verifier_svc.speculation import lookup_pace
from verifier_svc.speculation.lookup_yield import LookupYield, LookupYields

NUM_TOKENS = 300
MODEL, QUICK = 1, 2
INFO = TargetInfo("hash", VOCAB, 400, 8, NODES, 8, 2, BLOCK, 400, "")


class Knowing(ScriptedDrafter):
    """A drafter that knows outputs from some places on.

    Attributes:
        asked: the places of the output that it was asked for.
        learned: the texts that it was sent, by batch slot and generation.
        num_new: the new tokens of each request.
    """

    def __init__(self, known: Container[int], texts: Sequence[tuple[list[int], list[int]]]) -> None:
        super().__init__({})
        self._known, self._texts = known, texts
        self.asked: list[int] = []
        self.num_new: list[int] = []

    def draft(self, request: DraftRequest) -> DraftBatch:
        self.num_new.append(len(request.new_tokens))
        return super().draft(request)

    @property
    def learned(self) -> list[list[int]]:
        return list(self._tokens.values())

    def release(self, batch_slots: Sequence[int]) -> None:
        """Remember everything: the test looks at it."""

    def _tree(self, request: DraftRequest, row: int, known: list[int]) -> Nodes:
        following: list[int] = []
        if request.max_nodes[row] > 1:
            length = int(request.prompt_lengths[row])
            place = len(known) - length
            (output,) = (output for prompt, output in self._texts if prompt == known[:length])
            assert known[length:] == output[:place]
            self.asked.append(place)
            if place in self._known:
                following = output[place : place + int(request.max_nodes[row]) - 1]
        following = following[: int(request.max_depths[row])]
        return [(known[-1], -1), *((token, index) for index, token in enumerate(following))]


class Play:
    """Requests that run with a look-up drafter that knows some places, beside a model or alone."""

    def __init__(
        self,
        requests: Sequence[Request],
        known: Container[int],
        *,
        with_model: bool = True,
        num_steps: int = 3,
        **options: Any,
    ) -> None:
        self.expected = plain(requests)
        texts = [(list(r.prompt), e.token_ids) for r, e in zip(requests, self.expected, strict=True)]
        self.lookup = Knowing(known, texts)
        self.source = TestSource("quick", self.lookup, INFO)
        oracles = [oracle_of(requests, self.expected)] if with_model else []
        self.oracle = oracles[0] if oracles else None
        self.runs = Runs([*oracles, self.source], num_steps=num_steps, **options)  # type: ignore[list-item]
        self._requests = requests

    def run(self) -> list[Result]:
        results = self.runs.harness.run(self._requests)
        assert [result.token_ids for result in results] == [result.token_ids for result in self.expected]
        self.runs.harness.drain()
        return results

    def run_late(self, at: int, look: Callable[[int], None] = lambda number: None) -> None:
        """Run two requests; the second comes at step ``at``.

        ``look`` is called at the launch of each step.
        """
        harness = self.runs.harness
        keys = [harness.submit(self._requests[0])]

        def on_launch(number: int) -> None:
            look(number)
            if number >= at and len(keys) == 1:
                keys.append(harness.submit(self._requests[1]))

        self.runs.on_launch = on_launch
        harness.drain()
        assert [harness.results[key].token_ids for key in keys] == [result.token_ids for result in self.expected]

    @property
    def step_trees(self) -> int:
        """Return how many trees of overlapped steps came from the host."""
        return sum(sum(step.num_found) for step in self.runs.steps)


def take_look_ups_for_vain(monkeypatch: pytest.MonkeyPatch, *, try_every: int) -> None:
    """Let look-ups be believed to find nothing, and the first try come after so many steps."""
    found = LookupYield()
    for _ in range(100):
        found.observe(10.0, 0.0, 0)
    monkeypatch.setattr(LookupYields, "of", lambda self, batch: found)
    monkeypatch.setattr(lookup_pace, "TRY_EVERY", try_every)


def request(drafter: str = "auto", prediction: tuple[int, ...] = (), seed: int = 1) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    return Request(prompt(seed, 6), sampling, speculation=SpeculationOptions(drafter=drafter), prediction=prediction)
