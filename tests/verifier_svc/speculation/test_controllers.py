"""A drafter's controller: when a run goes on without the drafter, and what its metrics say."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.support.runs import Runs, greedy, oracle_of, plain
from verifier_svc.drafters.request import NO_DRAFT, Shape
from verifier_svc.speculation.controller import Controller
from verifier_svc.speculation.controllers import PLAIN_AFTER, DrafterControllers


def run_of(**options: int) -> Runs:
    requests = [greedy(1, 6, 60)]
    expected = plain(requests)
    runs = Runs([oracle_of(requests, expected)], **options)
    assert runs.harness.run(requests)[0].token_ids == expected[0].token_ids
    return runs


def test_metrics_say_why_a_shape_was_chosen() -> None:
    (drafter,) = run_of().harness.speculator.drafters
    figures = drafter.gauges
    assert figures["chosen_nodes"] == 6 and figures["chosen_levels"] == 3
    assert figures["chosen_batch"] == 1 and figures["chosen_tokens_per_second"] > 0
    drafter.detach()
    assert drafter.gauges == {}


def test_drafts_rest_after_many_steps_in_which_they_did_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = run_of()
    (drafter,) = runs.harness.speculator.drafters
    controller = runs.harness.speculator.overlap.controllers.of(drafter)
    shapes = [NO_DRAFT] * PLAIN_AFTER + [Shape(3, 2, 1)]
    monkeypatch.setattr(Controller, "choose", lambda controller, batch: shapes.pop(0))
    rests = []
    while shapes:
        controller.choose(1)
        rests.append(controller.rests)
    assert rests == [False] * (PLAIN_AFTER - 1) + [True, False]


def test_each_drafter_has_a_log_of_its_own(tmp_path: Path) -> None:
    runs = run_of()
    (drafter,) = runs.harness.speculator.drafters
    bounds = runs.harness.speculator.overlap.controllers._bounds
    controllers = DrafterControllers(bounds, lambda num_rows: 1e-3, math.inf, str(tmp_path / "log"))
    assert controllers.of(drafter) is controllers.of(drafter)
    controllers.of(drafter).choose(1)
    records = [json.loads(line) for line in (tmp_path / "log.oracle").read_text().splitlines()]
    assert records[0][0] == "bounds" and records[-1][:2] == ["choose", 1]
