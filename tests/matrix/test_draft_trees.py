"""Draft trees in a running engine equal those of plain references of each head over the whole text.

This holds cold, after prefix hits, chunked prefill and preemption. A drafter that comes back drafts
well again. The target's hidden states come from transformers, the heads' arithmetic and the trees'
growth from tests/references.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from transformers import LlamaForCausalLM

from foretoken.sampling import SamplingParams
from tests.references.eagle_tree import Tree, head_tree, model_tree
from tests.support.deployments import EAGLE3_LAYERS, FINAL_STATE, KINDS, SeenHarness, Target, Targets, Walks
from tests.support.engine_harness import Request, Result
from tests.support.fitted_models import hidden_states_of, text
from tests.support.recording_drafter import Drawn, RecordingDrafter
from verifier_svc.drafters import sent_tokens

WITH_MODELS = [kind for kind, (_, algorithms) in KINDS.items() if len(algorithms) == 1 and "NGRAM" not in algorithms]
# A head and a draft model; other heads differ only in their layers and inputs.
QUICK = ("EAGLE3", "STANDALONE")
# Tolerance of one token's log-probability.
TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def _no_row_waits_for_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let chunks, prefix hits and cold runs begin at the same step: steps are compared."""
    monkeypatch.setattr(sent_tokens, "CATCH_UP_TOKENS", 10_000)


def greedy(max_tokens: int = 40) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


class Drafting:
    """One drafter's deployment, and the reference for its trees."""

    def __init__(self, target: Target, algorithm: str) -> None:
        self.target = target
        self.algorithm = algorithm
        self.drafter = RecordingDrafter(target.drafter(algorithm))
        if algorithm == "STANDALONE":
            self.model = LlamaForCausalLM.from_pretrained(target.standalone).eval()

    def harness(self, **options: object) -> SeenHarness:
        self.drafter.drawn.clear()
        return self.target.harness({"d": self.drafter}, **options)

    def expected(self, drawn: Drawn) -> Tree:
        if self.algorithm == "STANDALONE":
            return model_tree(self.model, drawn.tokens, drawn.shape)
        layers = EAGLE3_LAYERS if self.algorithm == "EAGLE3" else FINAL_STATE
        hidden_states = hidden_states_of(self.target.model, drawn.tokens, layers)
        head, num_depths = self.target.references[self.algorithm], self.target.num_depths
        return head_tree(head, drawn.tokens, hidden_states, drawn.shape, num_depths=num_depths)

    def check(self, drawn: Sequence[Drawn]) -> None:
        """Assert that all rows were drafted for, and that the trees are the reference's."""
        assert len(drawn) > 5
        for each in drawn:
            tree = self.expected(each)
            assert (each.tree_tokens, each.tree_parents) == (tree.tokens, tree.parents)
            depth = each.shape.steps
            np.testing.assert_allclose(each.scores, tree.values, rtol=0, atol=depth * TOLERANCE)


@pytest.fixture(params=[k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in WITH_MODELS])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def drafting(targets: Targets, kind: str) -> Drafting:
    name, (algorithm,) = KINDS[kind]
    return Drafting(targets[name], algorithm)


def cold_walks(drafting: Drafting, request: Request, **options: object) -> tuple[Result, Walks]:
    """Run this request on a fresh drafter and verifier; return its result and walks."""
    harness = drafting.harness(**options)
    (result,) = harness.run([request])
    (walks,) = harness.walks.values()
    harness.drain()
    return result, walks


@pytest.mark.parametrize("shape", [(12, 4, 3), (6, 5, 1), pytest.param((16, 5, 4), marks=pytest.mark.slow)])
def test_trees_of_random_heads(kind: str, shape: tuple[int, int, int], random_targets: Targets) -> None:
    name, (algorithm,) = KINDS[kind]
    drafting = Drafting(random_targets[name], algorithm)
    nodes, steps, branches = shape
    harness = drafting.harness(max_nodes=nodes, num_steps=steps, branches=branches)
    harness.run([Request(text(seed, 20), greedy(14)) for seed in range(3)])
    drafting.check(drafting.drafter.drawn)


def test_a_second_turn_is_drafted_as_if_it_were_the_first(drafting: Drafting) -> None:
    harness = drafting.harness()
    first = Request(text(3, 45), greedy())
    (answer,) = harness.run([first])
    second = Request([*first.prompt, *answer.token_ids, *text(4, 9)], greedy())
    expected, cold = cold_walks(drafting, second)
    drafting.check(drafting.drafter.drawn)
    drafting.drafter.drawn.clear()
    extended = drafting.drafter.gauges()

    harness = drafting.harness()
    harness.run([first])
    drafting.drafter.drawn.clear()
    before = drafting.drafter.gauges()["draft_extend_tokens"]
    key = harness.submit(second)
    while not harness.results[key].is_done:
        harness.step()
    drafting.check(drafting.drafter.drawn)
    got = harness.results[key]
    assert got.finished is not None and got.finished.num_cached_tokens >= 72
    assert got.token_ids == expected.token_ids
    assert harness.walks[key] == cold
    # The prefix was not drafted over again.
    after = drafting.drafter.gauges()["draft_extend_tokens"]
    assert after - before <= extended["draft_extend_tokens"] - 64
    harness.drain()


@pytest.mark.parametrize("chunk", [1, 5, 13])
def test_chunks_of_a_prompt(drafting: Drafting, chunk: int) -> None:
    request = Request(text(5, 51), greedy())
    expected, cold = cold_walks(drafting, request, chunk_tokens=64)
    got, walks = cold_walks(drafting, request, chunk_tokens=chunk)
    drafting.check(drafting.drafter.drawn)
    assert (got.token_ids, walks) == (expected.token_ids, cold)


def test_a_second_turn_in_chunks_beside_others(drafting: Drafting) -> None:
    harness = drafting.harness(chunk_tokens=7)
    firsts = [Request(text(seed, 30 + seed), greedy(20)) for seed in range(4)]
    answers = harness.run(firsts)
    drafting.check(drafting.drafter.drawn)
    drafting.drafter.drawn.clear()
    harness.run(
        [
            Request([*first.prompt, *answer.token_ids, *text(seed, 5)], greedy(20))
            for seed, (first, answer) in enumerate(zip(firsts, answers, strict=True))
        ]
    )
    drafting.check(drafting.drafter.drawn)
    harness.drain()


def test_preempted_sequences(drafting: Drafting) -> None:
    harness = drafting.harness(num_blocks=32, chunk_tokens=19)
    harness.run([Request(text(seed, 25 + 3 * seed), greedy(60)) for seed in range(6)])
    assert harness.scheduler.num_preemptions > 0
    drafting.check(drafting.drafter.drawn)
    harness.drain()


def test_a_drafter_that_comes_back_gets_good_again(drafting: Drafting) -> None:
    request = Request(text(5, 40), greedy(150))
    expected, cold = cold_walks(drafting, request)
    harness = drafting.harness()
    every = harness.sources[0].dies_and_returns(every=10_000, dies_at=4, returns_at=8)
    (got,) = harness.run([request], every_step=every)
    assert got.token_ids == expected.token_ids
    assert harness.sources[0].num_attaches == 2
    (walks,) = harness.walks.values()
    late = np.mean(walks.accepted[-12:-1])
    assert late >= 0.9 * np.mean(cold.accepted[-12:-1])
    if drafting.algorithm == "STANDALONE":
        # It was sent everything again.
        drafting.check(drafting.drafter.drawn)
        assert drafting.drafter.gauges()["draft_window_rows"] == 0
    else:
        assert drafting.drafter.gauges()["draft_window_rows"] > 0
    harness.drain()


def test_the_next_turn_after_a_restart_has_no_hole(drafting: Drafting) -> None:
    """Blocks written before a drafter's restart do not count as its own."""
    harness = drafting.harness()
    first = Request(text(3, 45), greedy(60))
    (answer,) = harness.run([first])
    harness.sources[0].kill()
    harness.run([Request(text(8, 10), greedy(4))])
    harness.sources[0].start()
    second = Request([*first.prompt, *answer.token_ids, *text(4, 9)], greedy(60))
    expected, _ = cold_walks(drafting, second)
    key = harness.submit(second)
    drafting.drafter.drawn.clear()
    while not harness.results[key].is_done:
        harness.step()
    assert harness.results[key].token_ids == expected.token_ids
    assert harness.walks[key].num_accepted > 20
    harness.drain()


def test_a_head_that_joins_late_sees_what_came_since(targets: Targets) -> None:
    """Its trees are the reference's over the same last tokens: nothing from before is read."""
    drafting = Drafting(targets["llama"], "EAGLE3")
    harness = drafting.harness(prefix_cache=False)
    key = harness.submit(Request(text(5, 40), greedy(40)))
    while not harness.results[key].is_done:
        if harness.num_steps == 3:
            harness.sources[0].kill()
        if harness.num_steps == 5:
            harness.sources[0].start()
            drafting.drafter.drawn.clear()
        harness.step()
    drawn = [each for each in drafting.drafter.drawn if each.is_drafted]
    assert len(drawn) > 5
    starts = set(range(1, len(drawn[0].tokens)))
    for each in drawn:
        hidden_states = hidden_states_of(drafting.target.model, each.tokens, EAGLE3_LAYERS)
        head = drafting.target.references["EAGLE3"]
        trees = {first: head_tree(head, each.tokens, hidden_states, each.shape, first=first) for first in starts}
        starts = {first for first, tree in trees.items() if _is_near(tree, each)}
    assert len(starts) == 1 and starts.pop() >= 40


def _is_near(tree: Tree, drawn: Drawn) -> bool:
    same = (tree.tokens, tree.parents) == (drawn.tree_tokens, drawn.tree_parents)
    return same and bool(np.allclose(tree.values, drawn.scores, rtol=0, atol=drawn.shape.steps * TOLERANCE))
