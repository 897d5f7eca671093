"""Drafts that are not worth their rows: they are not verified, but judged by the text."""

from __future__ import annotations

import pytest

from foretoken.drafting import DraftRequest
from foretoken.sampling import SamplingParams
from tests.support.engine_harness import Harness, Request
from tests.support.hash_target import HashTarget
from tests.support.scripted_drafter import Nodes, ScriptedDrafter
from verifier_svc.drafters.acceptance_estimates import PRIOR_ACCEPTANCE
from verifier_svc.speculation.costs import DraftCosts

VOCAB = 40
PROMPT = [1, 2, 3]
NUM_TOKENS = 150


class Knowing(ScriptedDrafter):
    """A drafter that always knows what comes, or always errs.

    Attributes:
        num_asked: rows that wanted a tree.
    """

    def __init__(self, output: list[int], *, errs: bool) -> None:
        super().__init__({})
        self._output, self._errs = output, errs
        self.num_asked = 0

    def _tree(self, request: DraftRequest, row: int, known: list[int]) -> Nodes:
        place, most = len(known) - len(PROMPT), int(request.max_nodes[row]) - 1
        self.num_asked += most > 0
        following = [(token + self._errs) % VOCAB for token in self._output[place : place + most]]
        return [(known[-1], -1), *((token, index) for index, token in enumerate(following))]


def run(drafters: dict[str, Knowing]) -> tuple[Harness, list[int]]:
    harness = Harness(
        HashTarget(VOCAB, 100, 4),
        vocab_size=VOCAB,
        num_blocks=100,
        block_size=4,
        drafters=drafters,  # type: ignore[arg-type]
    )
    (result,) = harness.run([Request(PROMPT, SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS))])
    harness.drain()
    return harness, result.token_ids


def test_what_is_not_worth_verifying_is_judged_by_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row would else ask for the like for ever, and never learn what it is worth."""
    _, plain = run({})
    monkeypatch.setattr(DraftCosts, "best_counts", lambda self, drafts, base, free: list(free))
    acceptance, num_asked = [], []
    for errs in (True, False):
        drafter = Knowing(plain, errs=errs)
        harness, token_ids = run({"knowing": drafter})
        assert token_ids == plain and harness.speculator.drafter("knowing").counters.num_drafts == 0
        acceptance.append(harness.speculator.drafter("knowing").record.acceptance.value)
        num_asked.append(drafter.num_asked)
    assert acceptance[0] < PRIOR_ACCEPTANCE < acceptance[1]
    assert num_asked[0] < num_asked[1] / 3
