"""A batch drafted by a model on the target's device; one row has a grammar, one has logprobs.

Hidden states never leave the device. Trees equal those of a drafter that the host sends to. Runs
on a GPU, or in Triton's interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest

from foretoken.drafting import DraftBatch, DraftRequest
from foretoken.sampling import SamplingParams
from tests.support import on_device
from tests.support.deployments import KINDS, SeenHarness, Target, Targets
from tests.support.engine_harness import Request, Result
from tests.support.fitted_models import text
from tests.support.grammars import regex, vocabulary
from tests.support.oracle_drafter import way_of
from tests.support.runs import keep_masked_steps_ordinary
from verifier_svc.drafters import attachment as attachments
from verifier_svc.sampling.grammar import compile_grammar

# A row of a reply: the tokens before the tree, the tree's tokens, and its parents.
Tree = tuple[int, list[int], list[int]]


def requests_for(target: Target) -> list[Request]:
    def greedy(max_tokens: int, **fields: Any) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=max_tokens, **fields)

    grammar = regex("[a-f0-9 ]{4,}")
    matcher = compile_grammar(grammar, vocabulary(target.folder))
    return [
        Request(text(1, 20), greedy(5)),
        Request(text(2, 23), greedy(12, grammar=grammar), matcher=matcher),
        Request(text(3, 17), greedy(9, logprobs=1)),
    ]


def run(target: Target, kind: str, device: str) -> tuple[list[Result], list[str], list[list[Tree]], SeenHarness]:
    """Return the results, how each request came, all trees, and the harness."""
    harness = on_device.harness(target, KINDS[kind][1], device, num_steps=2)
    ways: list[str] = []
    trees: list[list[Tree]] = []
    drafter = harness.sources[0]._drafter
    draft = drafter.draft

    def seen(request: DraftRequest) -> DraftBatch:
        ways.append(way_of(request))
        batch = draft(request)
        trees.append(
            [
                (int(request.batch_slots[row]), batch.tree(row).tokens.tolist(), batch.tree(row).parents.tolist())
                for row in range(request.num_rows)
                if request.max_nodes[row] > 1
            ]
        )
        return batch

    drafter.draft = seen  # type: ignore[method-assign]
    results = harness.run(requests_for(target))
    harness.drain()
    return results, ways, trees, harness


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["EAGLE3", "STANDALONE"])
def test_trees_are_those_of_a_drafter_that_the_host_tells(
    targets: Targets, kind: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_masked_steps_ordinary(monkeypatch)
    target = targets["llama"]
    plain = target.harness({}).run([request.plain() for request in requests_for(target)])
    results, ways, trees, harness = run(target, kind, device)
    monkeypatch.setattr(attachments, "can_feed", lambda rows, layout: False)
    others, other_ways, other_trees, _ = run(target, kind, device)
    for result, other, want in zip(results, others, plain, strict=True):
        assert result.token_ids == other.token_ids == want.token_ids
        assert result.finished is not None and other.finished is not None
        assert result.finished.speculation == other.finished.speculation
    assert trees == other_trees
    # The host sends prompts, requests that nobody waits for, and a draft model's final updates.
    assert ways.count("fed") >= 2 and "fed" not in other_ways
    assert ways[0] == "host" and ways[1:3] == ["fed", "fed"] and ways.count("host") <= 4
    assert sum(drafter.counters.num_accepted_tokens for drafter in harness.speculator.drafters) > 0
