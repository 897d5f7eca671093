"""Look-ups within overlapped steps: a step with one is launched once the step before was read."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from foretoken.drafting import DraftRequest
from foretoken.sampling import SpeculationOptions
from tests.support.engine_harness import TestSource
from tests.support.lookup_play import INFO, MODEL, NUM_TOKENS, QUICK, Knowing, Play, request
from tests.support.runs import (
    BLOCK,
    NODES,
    VOCAB,
    Course,
    Runs,
    choose,
    greedy,
    keep_masked_steps_ordinary,
    plain,
    prompt,
    with_grammar,
)
from tests.support.scripted_drafter import Nodes
from verifier_svc.drafters import sent_tokens
from verifier_svc.drafters.acceptance_estimates import PRIOR_ACCEPTANCE
from verifier_svc.drafters.request import NO_DRAFT, Shape
from verifier_svc.overlap import blocks as overlap_blocks
from verifier_svc.speculation.costs import DraftCosts
from verifier_svc.speculation.gap_times import GapTimes
from verifier_svc.speculation.gate import LONGEST_PAUSE
from verifier_svc.speculation.model_yield import FIRST_EVERY, FIRST_ROWS, LATER_EVERY, ModelYield
from verifier_svc.speculation.overlap_drafting import OverlapDrafting


@pytest.mark.parametrize("num_steps", [0, 3])
@pytest.mark.parametrize("with_model", [True, False])
@pytest.mark.parametrize("drafter", ["auto", "quick", "merge"])
def test_all_steps_overlap_while_nothing_is_found(drafter: str, with_model: bool, num_steps: int) -> None:
    """No step waits for a drafter that finds nothing; it is scouted now and then."""
    play = Play([request(drafter)], range(0), with_model=with_model, num_steps=num_steps)
    (result,) = play.run()
    assert play.runs.num_ordinary == 0 and play.step_trees == 0
    asked = play.lookup.asked
    gaps = [later - place for place, later in pairwise(asked)]
    assert max(gaps) <= (LONGEST_PAUSE + 2) * NODES
    assert set(result.sources) == ({0, MODEL} if with_model and drafter != "quick" else {0})
    # In-flight depth: nothing was read before its successor was launched, except at the end.
    assert max(step.most_in_flight for step in play.runs.steps) == 2


@pytest.mark.parametrize("num_steps", [0, 3])
@pytest.mark.parametrize("with_model", [True, False])
def test_what_is_found_is_verified_in_the_next_step(with_model: bool, num_steps: int) -> None:
    known = range(100, 220)
    play = Play([request()], known, with_model=with_model, num_steps=num_steps)
    if with_model:
        # The model alone yields no more than one token a step.
        choose(play.runs, lambda step: NO_DRAFT if num_steps == 0 else Shape(NODES, 3, 4))
    (result,) = play.run()
    assert play.runs.num_ordinary == 0
    number = QUICK if with_model else 1
    if not (with_model and num_steps):
        first = result.sources.index(number)
        assert known.start <= first <= known.start + 2 * LONGEST_PAUSE
        within = result.sources[first : known.stop]
        assert within.count(number) > 0.7 * len(within)
    drafters = play.runs.harness.speculator.drafters
    assert sum(result.sources.count(drafter.number) for drafter in drafters) == sum(
        drafter.counters.num_accepted_tokens for drafter in drafters
    )


def test_the_counters_are_those_of_the_drafter_that_found_the_tree() -> None:
    requests = [request("quick", seed=1), request("oracle", seed=2), request("merge", seed=3)]
    play = Play(requests, range(50, 250))
    results = play.run()
    assert play.runs.num_ordinary == 0 and play.step_trees > 20
    drafters = play.runs.harness.speculator.drafters
    for drafter in drafters:
        shares = [
            stats
            for result in results
            if result.finished is not None
            for stats in result.finished.speculation.drafters
            if stats.name == drafter.name
        ]
        assert drafter.counters.num_draft_tokens == sum(stats.num_draft_tokens for stats in shares) > 0
        accepted = sum(result.sources.count(drafter.number) for result in results)
        assert drafter.counters.num_accepted_tokens == accepted == sum(s.num_accepted_tokens for s in shares)
    finished = results[0].finished
    assert finished is not None and {stats.name for stats in finished.speculation.drafters} == {"quick"}
    # All tokens, and no others, went to the drafters, whoever had drafted them.
    assert play.oracle is not None and not play.oracle.failures and not play.source.failures
    for index in (0, 2):
        whole = [*requests[index].prompt, *play.expected[index].token_ids]
        assert whole in play.lookup.learned


@pytest.mark.parametrize("num_steps", [0, 3])
@pytest.mark.parametrize("with_model", [False, True])
def test_a_prediction_is_asked_for_from_the_first_token_on(with_model: bool, num_steps: int) -> None:
    """And again as soon as the output returns to it."""
    changed = range(50, 56)
    known = [*range(50), *range(56, 200)]
    play = Play([request(prediction=(1,))], known, with_model=with_model, num_steps=num_steps)
    if with_model:
        choose(play.runs, lambda step: NO_DRAFT)
    (result,) = play.run()
    number = QUICK if with_model else 1
    assert play.runs.num_ordinary == 0 and result.sources[1] == number
    misses = [place for place in play.lookup.asked if place in changed]
    assert misses and max(play.lookup.asked) > 150
    assert result.sources[70:190].count(number) > 60


def test_one_with_lookups_costs_the_others_no_draft() -> None:
    """Its steps are launched late; all others draft with the model in each step."""
    requests = [greedy(i, 6, 120, speculation=SpeculationOptions(drafter="oracle")) for i in range(3)]
    requests.append(greedy(9, 6, 120, speculation=SpeculationOptions(drafter="quick")))
    play = Play(requests, range(400))
    results = play.run()
    assert play.runs.num_ordinary == 0 and play.step_trees > 10
    for result in results:
        assert result.finished is not None
        stats = result.finished.speculation
        assert stats.fallback_steps <= 4 and stats.num_accepted_tokens > 40


def test_the_model_drafts_where_it_does_as_well_as_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all rows it is expected to do worse, because rows with
    look-ups say nothing of it: a few are compared.
    """
    monkeypatch.setattr(GapTimes, "seconds", lambda self, batch: 0.0)
    monkeypatch.setattr(OverlapDrafting, "expected_tokens", lambda self, sequence: 1.2)
    play = Play([request(seed=seed) for seed in range(1, 5)], range(NUM_TOKENS), num_steps=0)
    # The model yields two tokens a step; of what look-ups find, every third token is wrong.
    choose(play.runs, lambda step: Shape(4, 3, 1))
    found_tree = play.lookup._tree

    def tree(asked: DraftRequest, row: int, known: list[int]) -> Nodes:
        nodes = found_tree(asked, row, known)[:2]
        return [nodes[0], *(((token + (len(known) % 3 == 0)) % VOCAB, parent) for token, parent in nodes[1:])]

    monkeypatch.setattr(play.lookup, "_tree", tree)
    play.run()
    assert play.runs.num_ordinary == 0
    found = [count for step in play.runs.steps for count in step.num_found]
    middle = len(found) // 2
    assert sum(found[:middle]) > 10 * sum(found[middle:])


def test_look_ups_that_get_better_are_verified_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree that the model's was preferred to is scored by the text, too."""
    monkeypatch.setattr(GapTimes, "seconds", lambda self, batch: 0.0)
    monkeypatch.setattr(OverlapDrafting, "expected_tokens", lambda self, sequence: 1.2)
    play = Play([request(seed=seed) for seed in range(1, 5)], range(NUM_TOKENS), num_steps=0)
    # The model yields two tokens a step; a look-up four from the middle on, and mostly one before.
    choose(play.runs, lambda step: Shape(4, 3, 1))
    found_tree, chance = play.lookup._tree, random.Random(1)

    def tree(asked: DraftRequest, row: int, known: list[int]) -> Nodes:
        nodes = found_tree(asked, row, known)
        is_right = len(known) > NUM_TOKENS // 2 or chance.random() < 0.25
        return nodes if is_right else [nodes[0], *(((token + 1) % VOCAB, parent) for token, parent in nodes[1:])]

    monkeypatch.setattr(play.lookup, "_tree", tree)
    play.run()
    found = [count for step in play.runs.steps for count in step.num_found]
    # Mostly all four.
    assert sum(found[-len(found) // 5 :]) > 2.5 * (len(found) // 5)


@pytest.mark.parametrize("errs", [False, True])
def test_a_tree_that_is_not_worth_its_rows_is_judged_by_the_text(monkeypatch: pytest.MonkeyPatch, errs: bool) -> None:
    monkeypatch.setattr(GapTimes, "seconds", lambda self, batch: 0.0)
    monkeypatch.setattr(DraftCosts, "best_counts", lambda self, drafts, base, free: list(free))
    play = Play([request()], range(NUM_TOKENS), with_model=False, num_steps=0)
    found_tree = play.lookup._tree

    def tree(asked: DraftRequest, row: int, known: list[int]) -> Nodes:
        nodes = found_tree(asked, row, known)
        return [nodes[0], *(((token + errs) % VOCAB, parent) for token, parent in nodes[1:])]

    monkeypatch.setattr(play.lookup, "_tree", tree)
    play.run()
    assert play.runs.num_ordinary == 0 and play.step_trees == 0
    (drafter,) = play.runs.harness.speculator.drafters
    assert (drafter.record.acceptance.value > PRIOR_ACCEPTANCE) is not errs
    assert (len(play.lookup.asked) > NUM_TOKENS / 3) is not errs


def test_what_the_model_yields_beside_look_ups_is_learned_from_a_few_rows() -> None:
    model = ModelYield()
    assert model.tokens(2.0, 8) == 2.0
    compared = [model.is_compared() for _ in range(20_000)]
    first = next(count for count in range(len(compared)) if sum(compared[:count]) == FIRST_ROWS)
    assert first == pytest.approx(FIRST_EVERY * FIRST_ROWS, rel=0.5)
    assert sum(compared[first:]) == pytest.approx((20_000 - first) / LATER_EVERY, rel=0.2)
    # Sequences come in the order of their batch rows: each is compared now and then.
    assert all(any(compared[batch_row::16]) for batch_row in range(16))
    for _ in range(100):
        model.observe(6, 2.0)
    assert model.tokens(2.0, 8) == pytest.approx(6.0, rel=0.05)
    assert model.tokens(3.0, 8) == 8, "its trees are no deeper"
    for _ in range(300):
        model.observe(1, 4.0)
    assert model.tokens(2.0, 8) == 1.0, "a step yields a token in any case"


@pytest.mark.parametrize("with_model", [False, True])
def test_many_prompts_at_once_are_learned_in_pieces(monkeypatch: pytest.MonkeyPatch, with_model: bool) -> None:
    """A look-up drafter may learn on the engine's thread: no step
    may wait until it has learned all prompts.
    """
    most = 2 * BLOCK + 1
    monkeypatch.setattr(sent_tokens, "MOST_LEARNT", most)
    requests = [greedy(seed, 10 * BLOCK, NUM_TOKENS) for seed in range(1, 4)]
    play = Play(requests, range(NUM_TOKENS), with_model=with_model, num_steps=0)
    play.run()
    # The last tokens of ended sequences come on top.
    assert most <= max(play.lookup.num_new) < 2 * most
    for one, expected in zip(requests, play.expected, strict=True):
        assert [*one.prompt, *expected.token_ids] in play.lookup.learned


@pytest.mark.parametrize("what", ["dies", "returns", "is detached", "abort"])
@pytest.mark.parametrize("with_model", [False, True])
def test_a_lookup_drafter_goes_within_a_run(what: str, with_model: bool) -> None:
    requests = [request("merge", seed=1), request("quick", seed=2)]
    play = Play(requests, range(NUM_TOKENS), with_model=with_model)
    harness = play.runs.harness
    keys = [harness.submit(each) for each in requests]
    numbers: list[int] = []

    def look(number: int) -> None:
        numbers.append(number)
        if len(numbers) == 20:
            match what:
                case "dies" | "returns":
                    play.source.kill()
                case "is detached":
                    harness.speculator.remove_source("quick")
                case "abort":
                    harness.abort(keys[1])
        if len(numbers) == 30 and what == "returns":
            play.source.start()

    play.runs.on_launch = look
    while not all(harness.results[key].is_done for key in keys):
        harness.step()
    for key, expected in zip(keys, play.expected, strict=True):
        got = harness.results[key].token_ids
        assert got == expected.token_ids[: len(got)]
        assert len(got) == len(expected.token_ids) or (what == "abort" and key == keys[1])
    harness.drain()
    assert len(play.source.failures) == (what in ("dies", "returns"))
    if what == "returns":
        # It was sent all of both texts again.
        for asked, expected in zip(requests, play.expected, strict=True):
            assert [*asked.prompt, *expected.token_ids] in play.lookup.learned


def test_trees_of_the_last_ordinary_step_are_verified_by_the_first_overlapped_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An ordinary step finds trees; nothing of them is lost when steps overlap again."""
    keep_masked_steps_ordinary(monkeypatch)
    requests = [request("quick", seed=1), with_grammar(greedy(5, 6, 12))]
    play = Play(requests, range(NUM_TOKENS), with_model=False)
    results = play.run()
    assert 0 < play.runs.num_ordinary < 20 and play.runs.num_ahead > 20
    (step,) = play.runs.steps
    finished = results[0].finished
    assert step.num_found[0] == 1
    assert finished is not None and finished.speculation.num_accepted_tokens > 200


def test_blocks_are_reserved_for_what_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are short, and trees from the host take more rows than the model's."""
    monkeypatch.setattr(overlap_blocks, "_TOKENS_AHEAD", 0)
    requests = [greedy(i, 18, 60, speculation=SpeculationOptions(drafter="quick")) for i in range(3)]
    expected = plain(requests)
    texts = [(list(r.prompt), e.token_ids) for r, e in zip(requests, expected, strict=True)]
    source = TestSource("quick", Knowing(range(60), texts), INFO)
    runs = Runs([source], num_blocks=44)  # type: ignore[list-item]
    results = runs.harness.run(requests)
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]
    assert runs.harness.scheduler.num_preemptions > 0 and sum(runs.steps[0].num_found) > 5


def test_a_course_with_a_model_goes_on_where_the_lookups_end() -> None:
    course = Course([greedy(1, 6, 40)])
    course.run()
    assert sum(course.step.num_found) == 0 and course.num_accepted(0) > 10


@pytest.mark.parametrize("with_model", [True, False])
def test_prompts_are_computed_beside_trees_that_the_host_has_found(with_model: bool) -> None:
    """The second request comes while each step of the first one waits for look-ups."""
    requests = [request("quick"), replace(request("quick", seed=2), prompt=prompt(2, 30))]
    play = Play(requests, range(NUM_TOKENS), with_model=with_model)
    play.run_late(20)
    assert [size for step in play.runs.steps for size in step.prefills] == [5, 29]
    (num_found,) = (step.num_found for step in play.runs.steps if step.prefills)
    assert all(num_found[19:25])


@pytest.mark.parametrize("what", ["dies", "is late"])
@pytest.mark.parametrize("at", [10, 17, 24])
def test_prompts_that_wait_for_a_step_outlive_the_model(what: str, at: int) -> None:
    """It is lost while the host waits for a step's tokens to look up, and
    a prompt waits for the next step's pass.
    """
    requests = [request("merge"), replace(request("merge", seed=2), prompt=prompt(2, 30))]
    lost_at: list[int] = []

    def is_stuck(number: int, num_releases: int) -> bool:
        if not lost_at and play.runs.steps[-1].has_waiting:
            lost_at.append(number)
            if what == "dies":
                assert play.oracle is not None
                play.oracle.close()
        return lost_at == [number] and num_releases < 1

    options = {"timeout_s": 0.0} if what == "is late" else {}
    play = Play(requests, range(NUM_TOKENS), is_stuck=is_stuck, **options)
    play.run_late(at)
    assert lost_at
