"""On a GPU in float32: every drafter and sampling field writes what plain decode on the CPU writes.

A GPU's matrix products round in another order, so near-ties could differ; the fitted targets have
none. In strict mode a GPU's text with a drafter equals its own plain decode, bit for bit, in
bfloat16 and float16 too. Without a GPU a short case of each kind runs in Triton's interpreter;
strict mode's case is in tests/verifier_svc.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest

from foretoken.sampling import SamplingParams, SpeculationOptions
from tests.matrix.test_same_text import FIELDS, TEMPERATURES, Case, cases, finish, submit
from tests.support import on_device
from tests.support.deployments import KINDS, SeenHarness, Target, Targets
from tests.support.engine_harness import Request, Result, assert_bits
from tests.support.fitted_models import text
from verifier_svc.drafters.request import Shape
from verifier_svc.speculation.candidate_shapes import chain


def plain_on_cpu(target: Target, request: Request) -> Result:
    harness = target.harness({}, prefix_cache=False)
    result = harness.run([request.plain()])[0]
    harness.drain()
    return result


def assert_same(expected: Result, got: Result, case: str) -> None:
    assert got.error is None and got.finished is not None and expected.finished is not None, case
    assert got.token_ids == expected.token_ids, case
    assert got.finished.reason == expected.finished.reason, case
    assert len(got.logprobs) == len(expected.logprobs), case
    for have, want in zip(got.logprobs, expected.logprobs, strict=True):
        assert have.logprob == pytest.approx(want.logprob, abs=1e-4), case


def check(
    harness: SeenHarness,
    made: Sequence[Case],
    expected: dict[str, list[Result]],
    assert_equal: Callable[[Result, Result, str], None],
    kind: str,
) -> None:
    """Run all cases in one batch, then some alone on a prefix hit; assert accepted drafts."""
    keys = {case.field: submit(harness, case) for case in made}
    for case in made:
        for want, have in zip(expected[case.field], finish(harness, keys[case.field]), strict=True):
            assert_equal(want, have, f"{case.field} in a batch")
    for case in made[:4]:
        for want, have in zip(expected[case.field], finish(harness, submit(harness, case)), strict=True):
            assert_equal(want, have, f"{case.field} alone, on a prefix hit")
    if kind != "none":
        assert sum(drafter.counters.num_accepted_tokens for drafter in harness.speculator.drafters) > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["EAGLE3", "STANDALONE", "NGRAM"])
def test_a_short_text_is_that_of_the_cpu(targets: Targets, kind: str, device: str) -> None:
    target = targets[KINDS[kind][0]]
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=6, presence_penalty=0.1, logprobs=1)
    request = Request(text(1, 20), params, speculation=SpeculationOptions(drafter=kind.lower()))
    expected = plain_on_cpu(target, request)
    harness = on_device.harness(target, KINDS[kind][1], device)
    got = harness.run([request])
    assert_same(expected, got[0], kind)
    assert got[0].finished is not None and got[0].finished.speculation.num_accepted_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "num_steps"), [("EAGLE3", 2), ("STANDALONE", 0)])
def test_a_short_text_of_overlapped_steps(targets: Targets, kind: str, num_steps: int, device: str) -> None:
    """Neither the drafter's nor the target's steps wait for the host."""
    target = targets["llama"]
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=9, presence_penalty=0.1)
    request = Request(text(1, 20), params, speculation=SpeculationOptions(drafter=kind.lower()))
    expected = plain_on_cpu(target, request)
    harness = on_device.harness(target, KINDS[kind][1], device, num_steps=num_steps)
    got = harness.run([request])
    assert_same(expected, got[0], kind)
    assert harness.engine.counters.num_overlapped_steps > 1
    assert harness.speculator.drafters[0].counters.num_accepted_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize(("algorithms", "num_steps"), [(("NGRAM",), 0), (("EAGLE3", "NGRAM"), 2)])
def test_a_short_text_with_lookups_in_overlapped_steps(
    targets: Targets, algorithms: tuple[str, ...], num_steps: int, device: str
) -> None:
    """The client predicts the text with two wrong tokens.

    Beside it another request drafts with the model.
    """
    target = targets["llama"]
    greedy = SamplingParams(temperature=0.0, max_tokens=14)
    request = Request(text(1, 20), greedy, speculation=SpeculationOptions(drafter="ngram"))
    other = Request(text(2, 9), SamplingParams(temperature=0.7, seed=3, max_tokens=9))
    expected = [plain_on_cpu(target, each) for each in (request, other)]
    prediction = [*expected[0].token_ids]
    prediction[6:8] = [0, 0]
    harness = on_device.harness(target, algorithms, device, num_steps=num_steps)
    got = harness.run([replace(request, prediction=tuple(prediction)), other])
    for have, want in zip(got, expected, strict=True):
        assert_same(want, have, "with look-ups")
    assert harness.engine.counters.num_steps == harness.engine.counters.num_overlapped_steps < 18
    assert all(drafter.counters.num_accepted_tokens > 0 for drafter in harness.speculator.drafters)


def share_rows(harness: SeenHarness, shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every step have this shape, whatever the size of the batch."""
    (drafter,) = harness.speculator.drafters
    chosen = harness.speculator.overlap.controllers.of(drafter)
    monkeypatch.setattr(chosen, "choose", lambda num_sequences: shape)


@pytest.mark.slow
def test_a_short_text_of_steps_whose_sequences_share_rows(
    targets: Targets, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = targets["llama"]
    params = [SamplingParams(temperature=each, seed=3, max_tokens=9) for each in (0.0, 0.7)]
    requests = [Request(text(number, 9 + number), each) for number, each in enumerate(params)]
    expected = [plain_on_cpu(target, request) for request in requests]
    harness = on_device.harness(target, ("EAGLE3",), device, num_steps=0)
    share_rows(harness, chain(3)._replace(budget=2), monkeypatch)
    for want, have in zip(expected, harness.run(requests), strict=True):
        assert_same(want, have, "with shared rows")
    counters = harness.speculator.drafters[0].counters
    assert counters.num_accepted_tokens > 0
    assert counters.num_draft_tokens <= 2 * harness.engine.counters.num_overlapped_steps


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["EAGLE3", "STANDALONE"])
@pytest.mark.parametrize("temperature", list(TEMPERATURES))
def test_in_strict_mode_shared_rows_change_no_bit(
    targets: Targets, kind: str, temperature: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All fields in one batch: grammars, logprobs, and requests that end at different times."""
    target = targets[KINDS[kind][0]]
    made = cases(target, TEMPERATURES[temperature], kind)
    strict = partial(on_device.harness, target, device=device, dtype="bfloat16", strict=True)
    plain = strict((), overlap=False, graphs=False, prefix_cache=False)
    expected = {case.field: [plain.run([request.plain()])[0] for request in case.requests] for case in made}
    harness = strict(KINDS[kind][1], num_steps=0)
    share_rows(harness, chain(5)._replace(budget=2), monkeypatch)
    check(harness, made, expected, assert_bits, kind)


@pytest.mark.gpu
@pytest.mark.parametrize("num_steps", [0, 3])
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize(
    ("temperature", "dtype"), [*((each, "bfloat16") for each in TEMPERATURES), ("T=0.7", "float16")]
)
def test_in_strict_mode_the_text_has_the_bits_of_plain_decode(
    targets: Targets, kind: str, temperature: str, num_steps: int, dtype: str, device: str
) -> None:
    """A drafted batch of all fields, as graphs, equals each plain request without overlap."""
    target = targets[KINDS[kind][0]]
    made = cases(target, TEMPERATURES[temperature], kind)
    strict = partial(on_device.harness, target, device=device, dtype=dtype, strict=True)
    plain = strict((), overlap=False, graphs=False, prefix_cache=False)
    expected = {case.field: [plain.run([request.plain()])[0] for request in case.requests] for case in made}
    harness = strict(KINDS[kind][1], num_steps=num_steps)
    check(harness, made, expected, assert_bits, kind)


@pytest.mark.gpu
@pytest.mark.parametrize("num_steps", [0, 3])
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("temperature", list(TEMPERATURES))
def test_the_text_is_that_of_the_cpu(
    targets: Targets, kind: str, temperature: str, num_steps: int, device: str
) -> None:
    """All fields run in one batch, and each alone; ``num_steps``: levels of a fixed tree shape."""
    target = targets[KINDS[kind][0]]
    made = cases(target, TEMPERATURES[temperature], kind)
    assert {case.field for case in made} == set(FIELDS)
    expected = {case.field: [plain_on_cpu(target, request) for request in case.requests] for case in made}
    harness = on_device.harness(target, KINDS[kind][1], device, num_steps=num_steps)
    check(harness, made, expected, assert_same, kind)
    if kind in ("none", "NGRAM", "EAGLE", "EAGLE3", "STANDALONE", "MTP MiMo", "MTP Qwen3-Next"):
        assert harness.engine.counters.num_overlapped_steps > 20


@pytest.mark.gpu
def test_graphs_change_nothing(targets: Targets, device: str) -> None:
    target = targets["llama"]
    request = Request(text(2, 40), SamplingParams(temperature=0.0, max_tokens=48))
    texts = [
        on_device.harness(target, ("EAGLE3",), device, graphs=graphs).run([request])[0].token_ids
        for graphs in (True, False)
    ]
    assert texts[0] == texts[1]
