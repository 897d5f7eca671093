"""Random courses of a verifier with several drafters keep plain decode's text.

Requests name any drafter, come and go, resume, and share prefixes in caches of any size, while
drafters die and return. Trees equal the references' wherever a head has seen the whole text.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from foretoken.drafting import DraftBatch, DraftRequest
from foretoken.results import FinishReason
from foretoken.sampling import SpeculationOptions
from tests.matrix.test_same_text import Case, Plain, cases
from tests.references.eagle_tree import head_tree
from tests.support.deployments import EAGLE3_LAYERS, FINAL_STATE, SeenHarness, Target, Targets
from tests.support.engine_harness import Harness, Result
from tests.support.fitted_models import hidden_states_of
from tests.support.recording_drafter import Drawn, RecordingDrafter
from verifier_svc.messages import SequenceKey

pytestmark = pytest.mark.slow

COURSES = 5
COSTS = {1: 1.0, 4: 1.2, 16: 2.0, 64: 6.0, 256: 20.0}
ATTACHED = [
    ("llama", ("EAGLE3", "EAGLE")),
    ("llama", ("EAGLE", "NGRAM", "EAGLE3")),
    ("llama", ("STANDALONE", "EAGLE3", "NGRAM")),
    ("mimo", ("MTP", "NGRAM")),
    ("mimo 2", ("MTP",)),
    ("qwen3", ("NGRAM", "MTP")),
]


class WholeTextRecorder(RecordingDrafter):
    """A recorder that keeps only drafts over whole texts."""

    def draft(self, request: DraftRequest) -> DraftBatch:
        windows, count = self._num_windows, len(self.drawn)
        batch = super().draft(request)
        if self._num_windows != windows:
            del self.drawn[count:]
        return batch

    @property
    def _num_windows(self) -> float:
        return self.gauges().get("draft_window_rows", 0)


@dataclass
class Sent:
    """A running request. ``cut``: how many tokens of the output it came with."""

    field: str
    key: SequenceKey
    want: Result
    cut: int


class Course:
    """One engine's life."""

    def __init__(self, target: Target, algorithms: tuple[str, ...], choose: random.Random) -> None:
        self.target = target
        self.choose = choose
        self.drafters = {name.lower(): WholeTextRecorder(target.drafter(name)) for name in algorithms}
        pick = choose.choice
        self.harness: SeenHarness = target.harness(
            self.drafters,
            num_steps=pick([0, 2, 3, 5]),
            branches=pick([1, 2, 4]),
            max_nodes=pick([5, 8, 16]),
            chunk_tokens=pick([3, 7, 24, 64]),
            max_running=pick([2, 5, 8]),
            num_blocks=pick([24, 44, 256]),
            max_model_len=150,
            prefix_cache=pick([True, True, False]),
            max_batch_size=pick([0, 0, 3]),
            costs=pick([None, COSTS]),
        )
        self.deaths: list[Callable[[Harness], None]] = []
        if pick([True, False]):
            self.deaths = [
                source.dies_and_returns(every=pick([9, 14]), dies_at=pick([3, 5]), returns_at=pick([6, 8]))
                for source in self.harness.sources
            ]
        self.sent: list[Sent] = []

    def step(self) -> None:
        self.harness.step()
        for die in self.deaths:
            die(self.harness)

    def submit(self, case: Case, expected: list[Result]) -> None:
        """Submit a case's choices, each with its own drafter, prediction and resumed output."""
        pick, request_id = self.choose.choice, f"{case.field} {len(self.sent)}"
        for request, want in zip(case.requests, expected, strict=True):
            tokens = want.token_ids
            can_resume = case.field != "prompt logprobs" and pick([False, False, True])
            cut = self.choose.randrange(len(tokens)) if can_resume else 0
            options: dict[str, Any] = {
                "drafter": pick(["merge", "auto", *self.drafters]),
                "enabled": self.choose.random() < 0.9,
                "max_draft_tokens": pick([None, None, 1, 3]),
            }
            resumed = replace(
                request,
                speculation=SpeculationOptions(**options),
                prediction=pick([(), (), [token if self.choose.random() < 0.9 else 3 for token in tokens]]),
                output=tokens[:cut],
                attempt=int(cut > 0),
            )
            self.sent.append(Sent(case.field, self.harness.submit(resumed, request_id), want, cut))

    def run(self, kinds: list[Case], expected: dict[str, list[Result]]) -> None:
        for _ in range(2):
            self.choose.shuffle(kinds)
            for case in kinds:
                self.submit(case, expected[case.field])
                for _ in range(self.choose.choice([0, 0, 3])):
                    self.step()
                aborted = self.choose.choice(self.sent)
                if self.choose.random() < 0.1 and not self.harness.results[aborted.key].is_done:
                    self.harness.abort(aborted.key)
        while not all(self.harness.results[sent.key].is_done for sent in self.sent):
            self.step()

    def check(self) -> None:
        for sent in self.sent:
            got, want = self.harness.results[sent.key], sent.want
            assert got.error is None and got.finished is not None and want.finished is not None, sent.field
            was_aborted = got.finished.reason is FinishReason.ABORT
            end = len(got.token_ids) if was_aborted else len(want.token_ids)
            assert got.token_ids[sent.cut :] == want.token_ids[sent.cut : end], sent.field
            assert got.logprobs == want.logprobs[sent.cut : end], sent.field
            assert was_aborted or got.finished.reason == want.finished.reason, sent.field
        if not self.deaths:
            assert all(source.failures == [] for source in self.harness.sources)
        self.harness.drain()

    def drawn(self) -> Iterator[tuple[str, Drawn]]:
        """Yield some of the heads' drafts over whole texts."""
        for name, drafter in self.drafters.items():
            drafted = [each for each in drafter.drawn if each.is_drafted]
            if name not in ("ngram", "standalone"):
                yield from ((name, each) for each in self.choose.sample(drafted, min(8, len(drafted))))


@pytest.mark.parametrize(("name", "algorithms"), ATTACHED)
def test_random_courses(targets: Targets, name: str, algorithms: tuple[str, ...]) -> None:
    target, plain = targets[name], Plain()
    choose = random.Random(f"{name} {algorithms}")
    num_trees = num_accepted = 0
    for _ in range(COURSES):
        temperature = choose.choice([0.0, 0.0, 0.7, 1.0])
        course = Course(target, algorithms, choose)
        course.run(cases(target, temperature, "none"), plain.results(target, temperature))
        course.check()
        num_accepted += sum(walks.num_accepted for walks in course.harness.walks.values())
        for algorithm, drawn in course.drawn() if temperature == 0 else ():
            layers = EAGLE3_LAYERS if algorithm == "eagle3" else FINAL_STATE
            hidden_states = hidden_states_of(target.model, drawn.tokens, layers)
            head = target.references[algorithm.upper()]
            tree = head_tree(head, drawn.tokens, hidden_states, drawn.shape, num_depths=target.num_depths)
            assert (drawn.tree_tokens, drawn.tree_parents) == (tree.tokens, tree.parents)
            np.testing.assert_allclose(drawn.scores, tree.values, rtol=0, atol=drawn.shape.steps * 1e-4)
            num_trees += 1
    assert num_accepted > 0 and num_trees > 0
