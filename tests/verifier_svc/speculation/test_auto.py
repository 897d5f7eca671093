"""The server chooses a free draft where there is one, and a model's draft elsewhere."""

from __future__ import annotations

import pytest

from foretoken.drafting import DraftRequest
from foretoken.sampling import SamplingParams, SpeculationOptions
from tests.support.engine_harness import Harness, Request, Result
from tests.support.hash_target import HIDDEN_SIZE, HashTarget
from tests.support.scripted_drafter import Nodes, ScriptedDrafter
from tests.verifier_svc.scheduling.test_captured_hidden_states import HeadLike
from verifier_svc.drafters.waits import DraftTimes
from verifier_svc.speculation.draft_round import SEND_BEHIND
from verifier_svc.speculation.model_trials import TRIAL_EVERY

VOCAB = 12
PROMPT = [1, 2, 3, 4, 5]
NUM_TOKENS = 120
# The scripted drafter knows the output between these places only.
KNOWN = range(40, 90)
MODEL, QUICK = 1, 2


class Knowing(ScriptedDrafter):
    """A drafter that drafts the whole rest of the output, or nothing."""

    def _tree(self, request: DraftRequest, row: int, known: list[int]) -> Nodes:
        output = self._outputs[tuple(PROMPT), 0]
        place = len(known) - len(PROMPT)
        nodes: Nodes = [(known[-1], -1)]
        if place in KNOWN:
            for token in output[place : place + int(request.max_nodes[row]) - 1]:
                nodes.append((token, len(nodes) - 1))
        return nodes


def new_harness(drafters: dict[str, object], **options: int) -> Harness:
    return Harness(
        HashTarget(VOCAB, 100, 4, spread=2.0),
        vocab_size=VOCAB,
        num_blocks=100,
        block_size=4,
        drafters=drafters,  # type: ignore[arg-type]
        hidden_size=HIDDEN_SIZE,
        num_layers=2,
        **options,
    )


def run(drafters: dict[str, object], drafter: str = "auto") -> tuple[Harness, Result]:
    harness = new_harness(drafters)
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    (result,) = harness.run([Request(PROMPT, sampling, speculation=SpeculationOptions(drafter=drafter))])
    harness.drain()
    return harness, result


def test_a_row_takes_the_quick_draft_where_there_is_one_and_the_models_elsewhere() -> None:
    plain = run({})[1].token_ids
    model, quick = HeadLike(), Knowing({(tuple(PROMPT), 0): plain})
    harness, result = run({"model": model, "quick": quick})
    assert result.token_ids == plain
    within, outside = result.sources[KNOWN.start + 5 : KNOWN.stop], result.sources[: KNOWN.start]
    assert within.count(QUICK) > len(within) // 2 and QUICK not in outside
    assert harness.speculator.drafter("model").counters.num_drafts > 0, "nobody else knew the beginning"
    # The model is sent all tokens with their hidden states, also where it did not draft.
    (key,) = model.tokens
    assert model.tokens[key] == PROMPT + plain and model.known[key] == list(range(1, len(PROMPT) + NUM_TOKENS))


def test_a_model_is_never_far_behind() -> None:
    plain = run({})[1].token_ids
    longest = 0

    class Watched(HeadLike):
        def _learn(self, request: DraftRequest, row: int) -> list[int]:
            nonlocal longest
            if self.tokens:
                longest = max(longest, int(request.new_token_starts[row + 1] - request.new_token_starts[row]))
            return super()._learn(request, row)

    run({"model": Watched(), "quick": Knowing({(tuple(PROMPT), 0): plain})})
    # A step adds a whole tree at most.
    assert 1 < longest < SEND_BEHIND + 8


def test_a_named_drafter_is_the_only_one() -> None:
    plain = run({})[1].token_ids
    for name, number in (("model", MODEL), ("quick", QUICK)):
        drafters = {"model": HeadLike(), "quick": Knowing({(tuple(PROMPT), 0): plain})}
        _, result = run(drafters, name)
        assert result.token_ids == plain and set(result.sources) == {0, number}


def test_merged_rows_have_both() -> None:
    plain = run({})[1].token_ids
    _, result = run({"model": HeadLike(), "quick": Knowing({(tuple(PROMPT), 0): plain})}, "merge")
    assert result.token_ids == plain and set(result.sources) == {0, MODEL, QUICK}
    assert result.finished is not None
    figures = result.finished.speculation
    most = max(figures.drafters, key=lambda drafter: drafter.num_draft_tokens)
    assert {drafter.name for drafter in figures.drafters} == {"model", "quick"} and figures.drafter == most.name


@pytest.mark.parametrize(
    ("num_steps", "size", "num_sent"),
    [
        (0, 1, 2),
        pytest.param(0, 4, 1, marks=pytest.mark.slow),
        pytest.param(0, 64, 1, marks=pytest.mark.slow),
        (3, 1, 3 * TRIAL_EVERY),
    ],
)
def test_a_model_that_does_not_pay_is_tried_in_one_step_of_many(
    num_steps: int, size: int, num_sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its second trial waits for twice as many steps as the first.

    Flags that fix the trees' shape override this; a request that names the model gets it.
    """
    monkeypatch.setattr(DraftTimes, "estimate", lambda self, depth, num_rows: 1000.0)
    model = HeadLike()
    harness = new_harness(
        {"model": model, "quick": Knowing({(tuple(PROMPT), 0): run({})[1].token_ids})}, num_steps=num_steps
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=2 * SEND_BEHIND)
    auto = Request(PROMPT, sampling, speculation=SpeculationOptions(drafter="auto"))
    for _ in range(3 * TRIAL_EVERY // size):
        harness.run([auto] * size)
    harness.drain()
    assert len(model.tokens) == num_sent
    harness.run([Request(PROMPT, sampling, speculation=SpeculationOptions(drafter="model"))])
    assert len(model.tokens) == num_sent + 1


def test_a_model_is_judged_by_the_batch_that_a_burst_will_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch before the burst, which is empty, does not count."""
    monkeypatch.setattr(DraftTimes, "estimate", lambda self, depth, num_rows: 0.0 if num_rows == 1 else 1000.0)
    sampling = SamplingParams(temperature=0.0, max_tokens=2 * SEND_BEHIND)
    auto = Request(PROMPT, sampling, speculation=SpeculationOptions(drafter="auto"))
    # A step computes all prompts, or one.
    for size, chunk_tokens, num_sent in ((1, 64, 1), (8, 64, 0), (8, len(PROMPT), 0)):
        model = HeadLike()
        harness = new_harness({"model": model}, chunk_tokens=chunk_tokens)
        harness.run([auto] * size)
        harness.drain()
        assert len(model.tokens) == num_sent
