"""When overlapped steps wait for look-ups: what these promise, find and cost."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from foretoken.drafting import DraftBatch, DraftRequest
from foretoken.sampling import DraftShape, SpeculationOptions
from tests.support.lookup_play import NUM_TOKENS, Knowing, Play, request, take_look_ups_for_vain
from tests.support.runs import (
    NODES,
    VOCAB,
    choose,
    greedy,
    prompt,
)
from tests.support.scripted_drafter import Nodes
from verifier_svc.drafters.request import NO_DRAFT, Shape
from verifier_svc.speculation.draft_round import SEND_BEHIND
from verifier_svc.speculation.gap_times import FIRST_GAP_S, GapTimes, StepGaps
from verifier_svc.speculation.lookup_pace import ASKS_A_TRY, RAREST_TRY, TRY_EVERY, LookupPace
from verifier_svc.speculation.lookup_yield import PRIOR_TOKENS, LookupYield
from verifier_svc.speculation.overlap_drafting import OverlapDrafting


def test_useless_lookups_are_tried_now_and_then_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no model drafts, a late launch must be worth its gap for the whole batch."""
    # A gap of some of the harness's plain steps.
    monkeypatch.setattr(GapTimes, "seconds", lambda self, batch: 3.0)
    requests = [greedy(seed, 6, 150) for seed in range(1, 9)]
    play = Play(requests, range(NUM_TOKENS), with_model=False, num_steps=0)
    wrong = play.lookup

    def tree(asked: DraftRequest, row: int, known: list[int]) -> Nodes:
        nodes = Knowing._tree(wrong, asked, row, known)
        return [nodes[0], *(((token + 1) % VOCAB, parent) for token, parent in nodes[1:])]

    wrong._tree = tree  # type: ignore[method-assign]
    play.run()
    (step,) = play.runs.steps
    assert play.runs.num_ordinary == 0
    late = sum(count > 0 for count in step.num_found)
    assert 0 < late <= play.runs.num_ahead / TRY_EVERY + 1


def test_a_large_batch_asks_rarely_while_look_ups_do_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host would take longer for its rows than the step takes. Texts are learned all the same."""
    monkeypatch.setattr(GapTimes, "seconds", lambda self, batch: 1e9)
    requests = [greedy(seed, 6, 150) for seed in range(1, 9)]
    play = Play(requests, range(NUM_TOKENS), with_model=False, num_steps=0)
    play.run()
    assert play.runs.num_ordinary == 0
    # Tries grow rare, and rows are asked four times as often.
    assert len(play.lookup.asked) < 8 * play.runs.num_ahead / 6
    # Without what may be sent later, in one piece.
    least = [[*r.prompt, *e.token_ids[: -SEND_BEHIND - NODES]] for r, e in zip(requests, play.expected, strict=True)]
    assert all(any(text[: len(known)] == known for text in play.lookup.learned) for known in least)


def test_rows_of_a_large_batch_scout_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """All in one step would take the host longer than the step. Each row is asked as often."""
    monkeypatch.setattr(GapTimes, "seconds", lambda self, batch: 1e9)
    num_rows = 2 * ASKS_A_TRY
    play = Play([greedy(seed, 6, 150) for seed in range(1, num_rows + 1)], (), with_model=False, num_steps=0)
    asked: list[list[int]] = []
    draft = play.lookup.draft

    def note(asks: DraftRequest) -> DraftBatch:
        asked.append(asks.batch_slots[asks.max_nodes > 1].tolist())
        return draft(asks)

    monkeypatch.setattr(play.lookup, "draft", note)
    play.run()
    assert play.runs.num_ordinary == 0
    # Before the first turn rows are asked together.
    rare = [rows for rows in asked if 0 < len(rows) < num_rows]
    assert len(rare) > 20 and max(map(len, rare)) <= num_rows / ASKS_A_TRY
    counts = Counter(slot for rows in rare for slot in rows)
    assert len(counts) == num_rows and max(counts.values()) <= min(counts.values()) + 2


@pytest.mark.parametrize("case", ["prediction", "fixed shape"])
def test_one_that_asks_at_once_does_so_in_a_batch_that_asks_rarely(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Its first look-up comes with its second token, although others have asked just before."""
    requests = [greedy(seed, 6, 120) for seed in range(1, 8)]
    late = greedy(9, 7, 60)
    if case == "prediction":
        late = replace(late, prediction=(1,))
    else:
        late = replace(late, speculation=SpeculationOptions(drafter="quick", shape=DraftShape(3, 1, 4)))
    play = Play([*requests, late], range(NUM_TOKENS), with_model=False, num_steps=0)
    firsts: list[int] = []
    found_tree = play.lookup._tree

    def tree(asked: DraftRequest, row: int, known: list[int]) -> Nodes:
        if int(asked.prompt_lengths[row]) == 7 and asked.max_nodes[row] > 1:
            firsts.append(len(known) - 7)
        # Of the others' texts nothing is found.
        return found_tree(asked, row, known)[: None if int(asked.prompt_lengths[row]) == 7 else 1]

    monkeypatch.setattr(play.lookup, "_tree", tree)
    harness = play.runs.harness
    keys = [harness.submit(each) for each in requests]

    def on_launch(number: int) -> None:
        if number >= 30 and len(keys) == 7:
            keys.append(harness.submit(late))

    play.runs.on_launch = on_launch
    harness.drain()
    assert [harness.results[key].token_ids for key in keys] == [result.token_ids for result in play.expected]
    assert play.runs.num_ordinary == 0 and firsts[0] <= 2


def test_look_ups_that_find_little_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found is right. But often nothing is, which rows' promises leave out."""
    # One of the harness's plain steps: less than the promises of few rows are worth.
    monkeypatch.setattr(GapTimes, "seconds", lambda self, batch: 1.0)

    def num_late(seed: int) -> int:
        play = Play([greedy(seed, 6, 150) for seed in range(1, 9)], range(NUM_TOKENS), with_model=False, num_steps=0)
        found_tree, chance = play.lookup._tree, random.Random(seed)

        def tree(asked: DraftRequest, row: int, known: list[int]) -> Nodes:
            return found_tree(asked, row, known)[: None if chance.random() < 0.35 else 1]

        monkeypatch.setattr(play.lookup, "_tree", tree)
        play.run()
        assert play.runs.num_ordinary == 0
        return sum(count > 0 for step in play.runs.steps for count in step.num_found)

    late = sum(map(num_late, range(1, 6)))
    monkeypatch.setattr(LookupYield, "observe", lambda self, promised, found, num_rows: None)
    assert late < 0.75 * sum(map(num_late, range(1, 6)))


@pytest.mark.parametrize("gap_s", [0.0, 1e9])
def test_a_model_hides_a_late_launch_only_while_it_drafts(monkeypatch: pytest.MonkeyPatch, gap_s: float) -> None:
    """Beyond its drafts, the GPU waits for the launch, and all sequences with it."""
    monkeypatch.setattr(GapTimes, "seconds", lambda self, batch: gap_s)
    play = Play([request()], range(NUM_TOKENS), num_steps=0)
    choose(play.runs, lambda step: Shape(NODES, 3, 4))
    play.run()
    assert play.runs.num_ordinary == 0
    num_late = sum(count > 0 for step in play.runs.steps for count in step.num_found)
    if gap_s:
        assert num_late <= play.runs.num_ahead / TRY_EVERY + 1
    else:
        assert num_late > play.runs.num_ahead / 4


def test_tries_that_change_nothing_grow_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GapTimes, "seconds", lambda self, batch: 1e9)
    play = Play([request(seed=seed) for seed in range(1, 5)], range(NUM_TOKENS), with_model=False, num_steps=0)
    play.run()
    (step,) = play.runs.steps
    late = [number for number, count in enumerate(step.num_found) if count]
    waits = [later - before for before, later in pairwise(late)]
    assert len(waits) > 1 and waits == sorted(waits) and waits[-1] <= RAREST_TRY


def test_a_try_that_pays_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look-ups were in vain before; now the drafter knows all texts."""
    take_look_ups_for_vain(monkeypatch, try_every=32)
    # One of the harness's plain steps.
    monkeypatch.setattr(GapTimes, "seconds", lambda self, batch: 1.0)
    requests = [greedy(seed, 6, 150) for seed in range(1, 9)]
    play = Play(requests, range(NUM_TOKENS), with_model=False, num_steps=0)
    play.run()
    (step,) = play.runs.steps
    late = [number for number, count in enumerate(step.num_found) if count]
    assert play.runs.num_ordinary == 0
    assert late[0] >= 32 and late[1:10] == [late[0] + number for number in range(1, 10)]


def test_a_try_that_finds_nothing_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch may wait as long as the model drafts, and nothing is worth more than that."""
    monkeypatch.setattr(GapTimes, "seconds", lambda self, batch: 0.0)
    monkeypatch.setattr(OverlapDrafting, "draft_s", lambda self, batch: 1.0)
    play = Play([request()], range(100), num_steps=0)
    choose(play.runs, lambda step: Shape(NODES, 3, 4))
    have_paid: list[bool] = []
    observe_try = LookupPace.observe_try

    def note(self: LookupPace, *, has_paid: bool) -> None:
        if play.lookup.asked[-1] >= 100:
            have_paid.append(has_paid)
        observe_try(self, has_paid=has_paid)

    monkeypatch.setattr(LookupPace, "observe_try", note)
    play.run()
    assert play.runs.num_ordinary == 0
    assert have_paid and not any(have_paid)


def test_the_gap_is_learned_from_late_launches() -> None:
    gaps = GapTimes()
    gaps.observe(8, FIRST_GAP_S / 2)
    assert FIRST_GAP_S / 2 < gaps.seconds(8) < FIRST_GAP_S
    # One that captures a graph counts as a few.
    slow = GapTimes()
    slow.observe(8, 10.0)
    assert slow.seconds(8) < 4 * FIRST_GAP_S


def test_the_gap_of_a_batch_is_that_of_the_nearest_one_measured() -> None:
    gaps = GapTimes()
    for _ in range(200):
        gaps.observe(2, 1e-3)
        gaps.observe(200, 2e-2)
    assert gaps.seconds(1) == gaps.seconds(2) == pytest.approx(1e-3, rel=0.01)
    assert gaps.seconds(130) == gaps.seconds(256) == pytest.approx(2e-2, rel=0.01)


def test_the_gap_before_a_step_with_prompts_is_its_own() -> None:
    gaps = StepGaps()
    for _ in range(200):
        gaps.observe(8, 1e-3, has_prompts=False)
        gaps.observe(8, 3e-3, has_prompts=True)
    assert gaps.seconds(8, has_prompts=False) == pytest.approx(1e-3, rel=0.01)
    assert gaps.seconds(8, has_prompts=True) == pytest.approx(3e-3, rel=0.01)


@pytest.mark.parametrize("with_model", [False, True])
def test_look_ups_beside_prompts_are_worth_the_gap_before_such_steps(
    monkeypatch: pytest.MonkeyPatch, with_model: bool
) -> None:
    """A second prompt comes in many pieces while look-ups
    would help the first sequence in every step.
    """
    monkeypatch.setattr(StepGaps, "seconds", lambda self, batch, *, has_prompts: 1e9 if has_prompts else 0.0)
    requests = [request(), replace(request(seed=2), prompt=prompt(2, 120))]
    play = Play(requests, range(NUM_TOKENS), with_model=with_model, num_steps=0, chunk_tokens=10)
    if with_model:
        choose(play.runs, lambda step: NO_DRAFT)
    steps = play.runs.steps
    # Before each step: prompt passes so far, and how many of the steps
    # before had trees from the host.
    seen: list[tuple[int, int]] = []

    def look(number: int) -> None:
        num_late = sum(count > 0 for step in steps for count in step.num_found)
        seen.append((sum(len(step.prefills) for step in steps), num_late))

    play.run_late(40, look)
    late_with_prompts = [
        later[1] - now[1] for before, now, later in zip(seen, seen[1:], seen[2:], strict=False) if now[0] > before[0]
    ]
    assert len(late_with_prompts) > 10 and sum(late_with_prompts) <= 1
    assert seen[-1][1] > 20


def test_a_yield_follows_what_was_found() -> None:
    found = LookupYield()
    assert (found.tokens(3.0), found.num_rows(3.0)) == (3.0, 3)
    for _ in range(100):
        found.observe(8.0, 2.0, 4)
    assert found.tokens(8.0) == pytest.approx(2.0, abs=0.01) and found.num_rows(8.0) == 4
    # One step hardly changes it, and some do.
    found.observe(8.0, 8.0, 16)
    assert 2.0 < found.tokens(8.0) < 3.0
    for _ in range(50):
        found.observe(8.0, 8.0, 16)
    assert found.tokens(8.0) == pytest.approx(8.0, abs=0.1)


def test_a_step_that_finds_nothing_lowers_the_yield() -> None:
    found = LookupYield()
    found.observe(PRIOR_TOKENS, 0.0, 0)
    assert 0 < found.tokens(1.0) < 0.5
