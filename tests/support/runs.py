"""An engine with overlapped steps, a free target, and a drafter that knows the texts."""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.overlap_memory import OverlapMemory, StreamOrder
from foretoken.results import FinishReason
from foretoken.sampling import SamplingParams, has_token_masks
from tests.support.engine_harness import Harness, Request, Result
from tests.support.grammars import VOCAB, regex, vocabulary
from tests.support.hash_target import HIDDEN_SIZE, HashTarget
from tests.support.host_step import HostStep, plain_memory
from tests.support.oracle_drafter import OracleDrafter
from verifier_svc.drafters.request import Shape, TreeBounds
from verifier_svc.messages import SequenceKey
from verifier_svc.outbox import Outbox
from verifier_svc.overlap.runs import OverlapRuns
from verifier_svc.sampling.grammar import Vocabulary, compile_grammar
from verifier_svc.scheduling.sequence import Sequence as Running
from verifier_svc.speculation import overlap_policy
from verifier_svc.speculation.controller import Controller
from verifier_svc.speculation.controllers import DrafterController

BLOCK, NODES, BATCH_ROWS = 4, 6, 8
LAYERS = (1, 2)


def prompt(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB) for _ in range(length)]


def greedy(seed: int, length: int, max_tokens: int, **options: Any) -> Request:
    return Request(prompt(seed, length), SamplingParams(temperature=0.0, max_tokens=max_tokens), **options)


@cache
def _vocabulary() -> Vocabulary:
    with tempfile.TemporaryDirectory() as folder:
        return vocabulary(Path(folder))


def with_grammar(request: Request, pattern: str = "[a-f0-9 ]{400}", *, looks_ahead: bool = True) -> Request:
    """Return a request whose output must match a pattern."""
    grammar = regex(pattern)
    matcher = compile_grammar(grammar, _vocabulary())
    if looks_ahead:
        matcher.look_ahead()
    return replace(request, sampling=replace(request.sampling, grammar=grammar), matcher=matcher)


def keep_masked_steps_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the host work between two steps for a grammar or token
    masks, as it does for logprobs of a prompt.
    """
    monkeypatch.setattr(
        overlap_policy,
        "needs_host",
        lambda sequence: has_token_masks(sequence.sampling) or sequence.wants_prompt_logprobs,
    )


def with_prompt_logprobs(request: Request) -> Request:
    """Return a request for which the host works between
    any two steps until its prompt is computed.
    """
    return replace(request, sampling=replace(request.sampling, prompt_logprobs=0))


def plain(requests: Sequence[Request]) -> list[Result]:
    target = HashTarget(VOCAB, 400, BLOCK)
    return Harness(target, vocab_size=VOCAB, num_blocks=400, block_size=BLOCK).run([r.plain() for r in requests])


def oracle_of(requests: Sequence[Request], results: Sequence[Result], **options: Any) -> OracleDrafter:
    texts = []
    for request, result in zip(requests, results, strict=True):
        # Results have no tokens of a resumed request's earlier attempts.
        output = [*request.output, *result.token_ids[len(request.output) :]]
        texts.append([*request.prompt, *output, 3])
    return OracleDrafter(
        texts,
        "cpu",
        captured_layers=LAYERS,
        width=len(LAYERS) * HIDDEN_SIZE,
        dtype=torch.float32,
        batch_rows=BATCH_ROWS,
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
        max_running: int = BATCH_ROWS,
        timeout_s: float = 600.0,
        num_steps: int = 3,
        on_launch: Callable[[int], None] = lambda number: None,
        is_stuck: Callable[[int, int], bool] = lambda number, num_releases: False,
        target: HashTarget | None = None,
        **options: Any,
    ) -> None:
        target = target or HashTarget(VOCAB, num_blocks, BLOCK)
        self.steps: list[HostStep] = []
        self.on_launch = on_launch

        def make(memory: OverlapMemory, order: StreamOrder) -> HostStep:
            step = HostStep(
                target,
                memory,
                order,
                block_size=BLOCK,
                num_blocks=num_blocks,
                on_launch=lambda number: self.on_launch(number),
                # The first one made is for plain decode, which waits for nobody.
                **({"is_stuck": is_stuck} if self.steps else {}),
            )
            self.steps.append(step)
            return step

        ahead = OverlapRuns(make, make(plain_memory(BATCH_ROWS, NODES), StreamOrder()), timeout_s=timeout_s)  # type: ignore[arg-type]
        self.harness = Harness(
            target,
            vocab_size=VOCAB,
            num_blocks=num_blocks,
            block_size=BLOCK,
            sources=sources,  # type: ignore[arg-type]
            overlap_runs=ahead,
            max_running=max_running,
            max_nodes=NODES,
            num_steps=num_steps,
            timeout_s=600.0,
            **options,
        )

    @property
    def num_ahead(self) -> int:
        return self.harness.engine.counters.num_overlapped_steps

    @property
    def num_ordinary(self) -> int:
        """Return the number of steps that did not overlap."""
        return self.harness.engine.counters.num_steps - self.num_ahead


class _Choices(Controller):
    """A controller whose choices the test makes."""

    choice: Callable[[int], Shape]
    num_choices = 0

    def choose(self, batch: int) -> Shape:
        self.num_choices += 1
        return self.choice(self.num_choices)


class _ChosenShapes(DrafterController, _Choices):
    """The same for a drafter's."""


def choose(runs: Runs, choice: Callable[[int], Shape]) -> None:
    """Let ``choice`` give the shape of trees of the first drafter.

    It gets the number of choices.
    """
    speculator = runs.harness.speculator
    (drafter, *_), controllers = speculator.drafters, speculator.overlap.controllers
    controller = _ChosenShapes(drafter, TreeBounds(NODES), lambda rows: 1.0, limit_s=math.inf)
    controller.choice = choice
    controllers._known[drafter.number] = controller


class Course:
    """Requests that come, and are aborted, at given steps of overlapped runs.

    ``step``: the step of the drafter's memory; without a drafter, of plain decode. ``errors``: the
    requests that end with an error; their text is a part of the whole.

    Args:
        comes: by request, when it comes: at the launch of this step or of a later one, or at the
            first launch where this is true. The others are there at the start.
        look: called with the number of each step at its launch.
        closes: the requests with a session of their own, which the test closes.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        comes: Mapping[int, int | Callable[[], bool]] | None = None,
        *,
        drafts: bool = True,
        look: Callable[[int], None] = lambda number: None,
        prompt_rows: int = 64,
        closes: Collection[int] = (),
        **options: Any,
    ) -> None:
        self.expected = plain(requests)
        self.oracle = oracle_of(requests, self.expected, prompt_rows=prompt_rows)
        self.errors: set[int] = set()
        self._requests, self._comes, self.look = requests, dict(comes or {}), look
        self._keys: dict[int, SequenceKey] = {}
        self._aborted: set[int] = set()
        self._started: set[int] = set()
        self._closes = closes
        options.setdefault("chunk_tokens", prompt_rows)
        self.runs = Runs([self.oracle] if drafts else [], on_launch=self._launch, **options)
        self.harness = self.runs.harness

    @property
    def step(self) -> HostStep:
        return self.runs.steps[-1]

    @property
    def num_runs(self) -> int:
        return sum(step.num_runs for step in self.runs.steps)

    def submit(self, index: int, request_id: str | None = None) -> None:
        engine = self.harness.engine
        session = engine.open_session(Outbox(lambda: None)) if index in self._closes else None
        self._keys[index] = self.harness.submit(self._requests[index], request_id, session=session)

    def has_come(self, index: int) -> bool:
        return index in self._keys

    def abort(self, index: int) -> None:
        self._aborted.add(index)
        self.harness.abort(self._keys[index])

    def close(self, index: int) -> None:
        """Close the session of a request of ``closes``."""
        self.harness.engine.close_session(self._keys[index].session_id)

    def sequence(self, index: int) -> Running | None:
        """Return a request's sequence while it waits or runs."""
        scheduler = self.harness.scheduler
        sequences = [*scheduler.running, *scheduler.waiting]
        return next((s for s in sequences if s.key == self._keys.get(index)), None)

    def num_output(self, index: int) -> int:
        """Return how many tokens the host knows of a request that has not ended; 0 if it has."""
        sequence = self.sequence(index)
        return sequence.num_output_tokens if sequence is not None else 0

    def has_ended(self, index: int) -> bool:
        return index in self._started and self.sequence(index) is None

    def result(self, index: int) -> Result:
        return self.harness.results[self._keys[index]]

    def num_accepted(self, index: int) -> int:
        """Return how many drafted tokens of a request were accepted."""
        finished = self.result(index).finished
        assert finished is not None
        return finished.speculation.num_accepted_tokens

    def run(self) -> None:
        """Run all requests to their ends, and check texts and blocks."""
        for index in range(len(self._requests)):
            if index not in self._comes and index not in self._keys:
                self.submit(index)
        self.harness.drain()
        self.check()

    def check(self) -> None:
        """Check that each request has the text of plain decode, or a part of it if it was ended."""
        assert len(self._keys) == len(self._requests), "a request never came"
        for index, expected in enumerate(self.expected):
            got = self.result(index)
            if index in self._closes:
                continue
            assert got.token_ids == expected.token_ids[: len(got.token_ids)], index
            if index in self.errors:
                assert got.error is not None
                continue
            assert got.error is None and got.finished is not None and expected.finished is not None
            if index in self._aborted:
                assert got.finished.reason == FinishReason.ABORT
                continue
            assert got.token_ids == expected.token_ids, index
            assert got.finished.reason == expected.finished.reason
            assert got.finished.stop_token_id == expected.finished.stop_token_id

    def _launch(self, number: int) -> None:
        self._started |= {index for index in self._keys if self.sequence(index) is not None}
        for index, at in self._comes.items():
            if index not in self._keys and (at <= number if isinstance(at, int) else at()):
                self.submit(index)
        self.look(number)
