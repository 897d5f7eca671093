"""A request may ask for the exact shape of its draft trees, as the flags do for all requests."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from foretoken.drafting import DraftRequest
from foretoken.errors import InvalidRequestError
from foretoken.sampling import DraftShape, SamplingParams, SpeculationOptions
from tests.support.engine_harness import Harness, Request, Result, assert_bits
from tests.support.hash_target import HIDDEN_SIZE, HashTarget
from tests.support.runs import NODES, Runs, greedy, oracle_of, plain
from tests.verifier_svc.scheduling.test_captured_hidden_states import HeadLike
from verifier_svc.drafters.request import NO_DRAFT, Shape, TreeBounds
from verifier_svc.speculation import controllers
from verifier_svc.speculation.controller import Controller

VOCAB = 12
PROMPT = [1, 2, 3, 4, 5]
BOUNDS = TreeBounds(16, branches=4)
# A row costs as much as a step: where the server chooses, nothing is drafted.
DEAR_ROWS = {1: 1.0, 2: 2.0, 256: 256.0}


class Asked(HeadLike):
    """Notes the shapes that it is asked for: nodes, levels, children."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, int, int]] = []

    def draft(self, request: DraftRequest) -> object:  # type: ignore[override]
        columns = zip(request.max_nodes, request.max_depths, request.max_branches, strict=True)
        self.shapes += [tuple(map(int, each)) for each in columns if each[0] > 1]
        return super().draft(request)


def run(options: Sequence[SpeculationOptions], **more: object) -> tuple[Harness, Asked, list[Result]]:
    head = Asked()
    harness = Harness(
        HashTarget(VOCAB, 100, 4, spread=2.0),
        vocab_size=VOCAB,
        num_blocks=100,
        block_size=4,
        drafters={"head": head},  # type: ignore[dict-item]
        hidden_size=HIDDEN_SIZE,
        num_layers=2,
        **more,  # type: ignore[arg-type]
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=40)
    requests = [Request([index, *PROMPT], sampling, speculation=each) for index, each in enumerate(options)]
    results = harness.run(requests)
    harness.drain()
    return harness, head, results


def test_bounds_of_a_request_are_its_shape_or_the_servers() -> None:
    assert BOUNDS.of_request(None) is BOUNDS
    exact = BOUNDS.of_request(DraftShape(num_steps=5, topk=2, num_draft_tokens=8))
    assert exact == TreeBounds(8, 5, 2) and exact.is_fixed and not BOUNDS.is_fixed
    assert exact.of_row(True, 1, 7) == Shape(8, 5, 2)
    # Another verifier, with larger bounds, admitted it.
    assert BOUNDS.of_request(DraftShape(9, 8, 32)) == TreeBounds(16, 7, 4)


@pytest.mark.parametrize(
    ("shape", "field"),
    [(DraftShape(8, 4, 16), "num_steps"), (DraftShape(5, 5, 16), "topk"), (DraftShape(5, 4, 17), "num_draft_tokens")],
)
def test_a_shape_beyond_the_flags_is_refused_by_field(shape: DraftShape, field: str) -> None:
    BOUNDS.check(DraftShape(7, 4, 16))
    with pytest.raises(InvalidRequestError, match=re.escape(f"speculative.shape.{field} must be at most")) as caught:
        BOUNDS.check(shape)
    assert caught.value.field == f"speculative.shape.{field}"


@pytest.mark.parametrize("drafter", ["auto", "head"])
def test_a_request_gets_what_the_same_flags_give(drafter: str) -> None:
    """It is drafted for in every step, in this shape, though plain decode would be faster."""
    by_flags = run([SpeculationOptions(drafter=drafter)], max_nodes=5, num_steps=3, branches=2, costs=DEAR_ROWS)
    shape = DraftShape(num_steps=3, topk=2, num_draft_tokens=5)
    by_field = run([SpeculationOptions(drafter=drafter, shape=shape)], max_nodes=8, costs=DEAR_ROWS)
    assert by_flags[1].shapes == by_field[1].shapes and by_field[1].shapes[0] == (5, 3, 2)
    assert_bits(by_flags[2][0], by_field[2][0])
    figures = [each[2][0].finished.speculation for each in (by_flags, by_field)]  # type: ignore[union-attr]
    assert figures[0] == figures[1] and figures[0].num_draft_tokens > 20


def test_others_of_the_batch_are_left_to_the_server() -> None:
    shape = DraftShape(num_steps=3, topk=2, num_draft_tokens=5)
    exact, free = SpeculationOptions(drafter="head", shape=shape), SpeculationOptions(drafter="head")
    _, alone, (expected, _) = run([exact, replace(exact, enabled=False)], costs=DEAR_ROWS)
    _, head, (first, second) = run([exact, free], costs=DEAR_ROWS)
    assert_bits(expected, first)
    assert first.finished is not None and second.finished is not None and expected.finished is not None
    assert first.finished.speculation.num_draft_tokens == expected.finished.speculation.num_draft_tokens
    # The gate of the other opens for probes only.
    assert second.finished.speculation.num_draft_tokens < first.finished.speculation.num_draft_tokens // 3
    assert head.shapes.count((5, 3, 2)) == alone.shapes.count((5, 3, 2))


def overlapped(shapes: Sequence[DraftShape | None]) -> tuple[Runs, set[str], list[Result]]:
    """Run requests in overlapped steps. Return also the shapes of the steps."""
    options = [SpeculationOptions(drafter="oracle", shape=shape) for shape in shapes]
    requests = [greedy(i, 6, 40, speculation=each) for i, each in enumerate(options)]
    expected = plain(requests)
    runs = Runs([oracle_of(requests, expected)], num_steps=0)
    speculator = runs.harness.speculator
    controller = speculator.overlap.controllers.of(speculator.drafters[0])
    seen: set[str] = set()
    learn = controller.observe_step

    def observe_step(shape: Shape, batch: int, seconds: float, *, num_prompt_tokens: int = 0) -> None:
        seen.add(shape.name)
        learn(shape, batch, seconds, num_prompt_tokens=num_prompt_tokens)

    controller.observe_step = observe_step  # type: ignore[method-assign]
    results = runs.harness.run(requests)
    for one, other in zip(expected, results, strict=True):
        assert one.token_ids == other.token_ids
    runs.harness.drain()
    assert runs.num_ahead > 5
    return runs, seen, results


def test_a_batch_drafts_in_the_shape_that_all_its_requests_ask_for() -> None:
    shape = DraftShape(num_steps=2, topk=2, num_draft_tokens=4)
    assert overlapped([shape, shape])[1] == {"2-2-4"}


def test_a_batch_that_does_not_agree_is_left_to_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    choose = Controller.choose

    def count(self: Controller, batch: int) -> Shape:
        chosen.append(batch)
        return choose(self, batch)

    monkeypatch.setattr(Controller, "choose", count)
    overlapped([DraftShape(2, 2, 4), DraftShape(2, 2, 4)])
    assert not chosen
    overlapped([DraftShape(2, 2, 4), DraftShape(1, 1, 2)])
    overlapped([DraftShape(2, 2, 4), None])
    assert set(chosen) == {2} or set(chosen) == {1, 2}


def test_a_drafter_that_rests_drafts_for_a_batch_that_asks_for_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that leave the shape open go on without the drafter.

    One that asks for a shape gets it afterwards.
    """
    monkeypatch.setattr(controllers, "PLAIN_AFTER", 2)
    monkeypatch.setattr(Controller, "choose", lambda self, batch: NO_DRAFT)
    shape = DraftShape(num_steps=2, topk=1, num_draft_tokens=3)
    free = [greedy(i, 6, 30, speculation=SpeculationOptions(drafter="oracle")) for i in range(2)]
    exact = greedy(7, 6, 60, speculation=SpeculationOptions(drafter="oracle", shape=shape))
    expected = plain([*free, exact])
    runs = Runs([oracle_of([*free, exact], expected)], num_steps=0)
    results = runs.harness.run([*free, exact])
    for one, other in zip(expected, results, strict=True):
        assert one.token_ids == other.token_ids
    runs.harness.drain()
    figures = [result.finished.speculation for result in results if result.finished is not None]
    assert figures[0].num_draft_tokens == figures[1].num_draft_tokens == 0
    assert figures[2].num_accepted_tokens > 5 and NODES > 3
