"""Simulated walks for benchmarks: their length, their nodes, and how the engine goes on."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu.checkpoint import SHAPES, random_target
from foretoken.drafting import DraftRequest
from foretoken.errors import InvalidRequestError
from foretoken.results import FinishReason
from foretoken.sampling import SamplingParams
from foretoken.tree import DraftTree
from tests.support.engine_harness import Harness, Request
from tests.support.hash_target import HashTarget
from tests.support.scripted_drafter import ScriptedDrafter
from verifier_svc.assembly import build
from verifier_svc.config import VerifierSettings
from verifier_svc.sampling.simulated_acceptance import AcceptanceSimulator, SimulatedWalker, deepest_path
from verifier_svc.sampling.verify import SamplingState, WalkResult, sample_and_walk
from verifier_svc.sampling.walker import HostWalker

GREEDY = SamplingParams(temperature=0.0, max_tokens=100)
# The deepest path is 2, 4, 5; node 6 is as deep as node 5.
TREE = DraftTree(np.array([9, 1, 2, 3, 4, 5, 6], np.int32), np.array([-1, 0, 0, 1, 2, 4, 4], np.int32))


def walk(
    simulator: AcceptanceSimulator, tree: DraftTree = TREE, *, best: int = 7, max_new_tokens: int = 100
) -> WalkResult:
    """Return the committed tokens if the target always samples ``best``, which no node holds."""
    state = SamplingState(GREEDY, (9,), eos_ids=frozenset({0}), choice_index=0)
    logits = np.eye(10, dtype=np.float32)[[best] * tree.num_nodes]
    sources = [0, *([3] * (tree.num_nodes - 1))]
    result = sample_and_walk(logits, tree, state, 1, 0, max_new_tokens, sources=sources)
    return simulator.replace(result, tree, max_new_tokens, sources)


@given(st.floats(1.0, 7.0))
def test_lengths_have_the_wanted_mean(mean: float) -> None:
    simulator = AcceptanceSimulator(mean)
    lengths = [simulator.next_length(10) for _ in range(200)]
    assert {int(mean), int(mean) + 1} >= set(lengths)
    for count in (1, 50, 200):
        assert abs(sum(lengths[:count]) - count * mean) <= 1


def test_a_step_is_no_longer_than_its_tree_and_not_made_up_for() -> None:
    simulator = AcceptanceSimulator(3.0)
    assert [simulator.next_length(longest) for longest in (2, 9, 1, 9)] == [2, 3, 1, 3]


def test_the_deepest_path_is_taken_and_the_sampled_token_comes_last() -> None:
    assert deepest_path(TREE) == [2, 4, 5]
    result = walk(AcceptanceSimulator(3.0))
    assert result == WalkResult([2, 4, 7], [2, 4], [3, 3, 0], None, None, [], 3, [2, 4])
    result = walk(AcceptanceSimulator(9.0))
    assert result.tokens == [2, 4, 5, 7] and result.num_walked_tokens == 4


def test_a_length_of_one_accepts_nothing() -> None:
    result = walk(AcceptanceSimulator(1.0))
    assert (result.tokens, result.accepted_nodes) == ([7], [])


def test_what_the_target_would_have_accepted_does_not_matter() -> None:
    result = walk(AcceptanceSimulator(2.0), best=1)
    assert (result.tokens, result.matched_nodes) == ([2, 1], [2])


def test_a_stop_token_ends_nothing_and_the_length_does() -> None:
    result = walk(AcceptanceSimulator(2.0), best=0)
    assert (result.tokens, result.finish, result.stop_token_id) == ([2, 0], None, None)
    result = walk(AcceptanceSimulator(4.0), max_new_tokens=2)
    assert (result.tokens, result.finish) == ([2, 4], FinishReason.LENGTH)
    assert (result.accepted_nodes, result.sources, result.num_walked_tokens) == ([2, 4], [3, 3], 4)


def test_a_step_without_a_draft_is_left_alone() -> None:
    simulator = AcceptanceSimulator(2.5)
    result = walk(simulator, DraftTree.root_only(9))
    assert (result.tokens, result.num_walked_tokens) == ([7], 1)
    assert simulator.next_length(9) == 2


def test_a_sequence_that_cannot_go_on_is_left_alone() -> None:
    broken = WalkResult([7], [], [0], None, None, [], 1, [], InvalidRequestError("no", field="x"))
    assert AcceptanceSimulator(2.0).replace(broken, TREE, 9) is broken


class _WrongDrafter(ScriptedDrafter):
    """A drafter with the same tree of three levels for every row."""

    def __init__(self) -> None:
        super().__init__({})

    def _tree(self, request: DraftRequest, row: int, known: list[int]) -> list[tuple[int, int]]:
        return [(known[-1], -1), (30, 0), (31, 0), (32, 2), (33, 3)][: int(request.max_nodes[row])]


@pytest.mark.parametrize(("mean", "least", "most"), [(1.0, 0, 0), (2.0, 1, 1), (2.5, 1.2, 1.5), (4.0, 2, 3)])
def test_the_engine_commits_what_is_simulated(mean: float, least: float, most: float) -> None:
    """Each step accepts ``least`` to ``most`` drafted tokens.

    The target itself checks that a row sees every KV entry at its place. Trees get small where the
    policy finds them not worth their cost, and at an output's end.
    """
    run = Harness(
        HashTarget(40, 200, 4),
        vocab_size=40,
        num_blocks=200,
        block_size=4,
        drafters={"wrong": _WrongDrafter()},
        walker=SimulatedWalker(HostWalker(), AcceptanceSimulator(mean)),
    )
    results = run.run([Request([1, 2, 3 + i], SamplingParams(temperature=1.0, max_tokens=81)) for i in range(3)])
    steps = drafted = 0
    for result in results:
        assert result.finished is not None and result.finished.reason is FinishReason.LENGTH
        assert len(result.token_ids) == len(result.sources) == 81
        taken = {token for token, source in zip(result.token_ids, result.sources, strict=True) if source}
        assert taken <= {30, 31, 32, 33}
        steps += result.finished.speculation.num_spec_steps
        drafted += result.sources.count(1)
    assert steps > 20
    assert steps * least - len(results) <= drafted <= steps * most


def test_a_verifier_warns_and_names_it_in_its_mode(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    random_target(tmp_path, SHAPES["tiny"])
    settings = VerifierSettings(
        model=tmp_path,
        served_model_name="x",
        address="unix:/none",
        threads=1,
        max_total_tokens=4096,
        simulate_accept_length=2.5,
    )
    with caplog.at_level(logging.WARNING):
        verifier = build(settings, progress=lambda done, total, what: None)
    verifier.close()
    assert verifier.info.mode == "strict, simulated acceptance of 2.5"
    assert any("--simulate-accept-length 2.5" in record.message for record in caplog.records)
