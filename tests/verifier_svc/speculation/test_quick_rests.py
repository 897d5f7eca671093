"""Steps overlap while a drafter without a model finds nothing, where the server chooses."""

from __future__ import annotations

from collections.abc import Container

import pytest

from foretoken.drafting import DraftRequest, TargetInfo
from foretoken.sampling import SamplingParams, SpeculationOptions
from tests.support.engine_harness import Request, Result, TestSource
from tests.support.runs import BLOCK, NODES, VOCAB, Runs, oracle_of, plain, prompt
from tests.support.scripted_drafter import Nodes, ScriptedDrafter
from verifier_svc.scheduling.resident_seat import MAX_IN_FLIGHT
from verifier_svc.speculation.overlap_policy import LOOKUP_RESTS

NUM_TOKENS = 300
# Steps from one request to the next: the run's steps, and an ordinary one.
REST = LOOKUP_RESTS + MAX_IN_FLIGHT
MODEL, QUICK = 1, 2
INFO = TargetInfo("hash", VOCAB, 400, 8, NODES, 8, 2, BLOCK, 400, "")


class Knowing(ScriptedDrafter):
    """A drafter that knows the output from some places on. ``asked``: the places asked for."""

    def __init__(self, known: Container[int], prompt: list[int], output: list[int]) -> None:
        super().__init__({})
        self._known, self._prompt, self._output = known, prompt, output
        self.asked: list[int] = []

    def _tree(self, request: DraftRequest, row: int, known: list[int]) -> Nodes:
        place = len(known) - len(self._prompt)
        assert known == [*self._prompt, *self._output[:place]]
        self.asked.append(place)
        following = self._output[place : place + int(request.max_nodes[row]) - 1] if place in self._known else []
        return [(known[-1], -1), *((token, index) for index, token in enumerate(following))]


def run(
    known: Container[int],
    drafter: str = "auto",
    with_model: bool = True,
    num_steps: int = 3,
    prediction: tuple[int, ...] = (),
) -> tuple[Runs, Knowing, Result]:
    """Run with these drafters; ``num_steps`` of 0 lets the server choose the trees' shapes too."""
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    request = Request(prompt(1, 6), sampling, speculation=SpeculationOptions(drafter=drafter), prediction=prediction)
    expected = plain([request])
    quick = Knowing(known, list(request.prompt), expected[0].token_ids)
    sources = [*([oracle_of([request], expected)] if with_model else []), TestSource("quick", quick, INFO)]
    runs = Runs(sources, num_steps=num_steps)  # type: ignore[arg-type]
    (result,) = runs.harness.run([request])
    assert result.token_ids == expected[0].token_ids
    runs.harness.drain()
    return runs, quick, result


@pytest.mark.parametrize("num_steps", [0, 3])
@pytest.mark.parametrize("with_model", [True, False])
def test_it_is_asked_again_after_some_steps(with_model: bool, num_steps: int) -> None:
    """It is after many misses too: the steps of a run count towards its pause."""
    runs, quick, result = run(range(0), with_model=with_model, num_steps=num_steps)
    engine = runs.harness.engine.counters
    assert engine.num_resident_steps > 0.8 * engine.num_steps
    most = REST * (NODES if with_model else 1)
    assert 1 < max(later - place for place, later in zip(quick.asked, quick.asked[1:], strict=False)) <= most
    assert set(result.sources) == ({0, MODEL} if with_model else {0})


@pytest.mark.parametrize("num_steps", [0, 3])
def test_it_drafts_where_it_finds_something(num_steps: int) -> None:
    known = range(100, 220)
    runs, _, result = run(known, with_model=False, num_steps=num_steps)
    first = result.sources.index(1)
    # Nobody waits for the answer to the first request after so many misses.
    assert known.start <= first <= known.start + 2 * REST
    within = result.sources[first : known.stop]
    assert within.count(1) > 0.7 * len(within), "no step ran ahead here"
    assert runs.num_ahead > 100


@pytest.mark.parametrize("drafter", ["merge", "quick", "oracle+quick"])
def test_who_names_it_has_it_at_each_step(drafter: str) -> None:
    runs, quick, _ = run(range(0), drafter)
    assert runs.num_ahead == 0
    assert max(later - place for place, later in zip(quick.asked, quick.asked[1:], strict=False)) <= NODES


@pytest.mark.parametrize("num_steps", [0, 3])
@pytest.mark.parametrize("with_model", [False, True])
def test_a_prediction_is_not_left_aside_for_a_few_misses(with_model: bool, num_steps: int) -> None:
    """The drafter finds the prediction again as soon as the output returns to it.

    Runs begin once nothing has been found for longer.
    """
    changed = range(50, 56)
    runs, quick, result = run([*range(50), *range(56, 200)], "auto", with_model, num_steps, prediction=(1,))
    assert result.sources[1] == (QUICK if with_model else 1)
    miss, next_asked = next(
        pair for pair in zip(quick.asked, quick.asked[1:], strict=False) if pair[0] in changed and pair[0] > 1
    )
    assert next_asked <= miss + (NODES if with_model else 1)
    assert runs.num_ahead > 10
