"""Speculative text = plain text, exactly, with every sampling field.

Requests run alone and in mixed batches; preemption, prefix hits, aborts and drafter deaths are
forced. The target is a hash of what each row sees (tests/support/hash_target.py). The drafter
replays the plain text with planted errors. Every case asserts that drafts were accepted and
refused in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from foretoken.sampling import SamplingParams
from tests.support.block_books import check_blocks
from tests.support.engine_harness import Harness, Request, Result
from tests.support.hash_target import HashTarget
from tests.support.scripted_drafter import ScriptedDrafter

VOCAB = 40
BLOCK = 4
EOS = frozenset({7})

FIELDS: dict[str, dict[str, object]] = {
    "none": {},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    "logit_bias": {"logit_bias": {3: 2.0, 11: -100.0}},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.2},
    "min_tokens": {"min_tokens": 20, "stop_token_ids": (9, 12, 13)},
    "stop_token_ids": {"stop_token_ids": (5, 21)},
    "ignore_eos": {"ignore_eos": True},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 2},
}
TEMPERATURES = {"greedy": 0.0, "seeded 0.7": 0.7, "seeded 1.0": 1.0}


def params(temperature: float, seed: int = 1, **fields: object) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=seed, max_tokens=40, **fields)  # type: ignore[arg-type]


def harness(drafter: ScriptedDrafter | None = None, *, num_blocks: int = 400, **options: object) -> Harness:
    return Harness(
        HashTarget(VOCAB, num_blocks, BLOCK),
        vocab_size=VOCAB,
        num_blocks=num_blocks,
        block_size=BLOCK,
        eos_ids=EOS,
        drafters={"scripted": drafter} if drafter else None,
        **options,  # type: ignore[arg-type]
    )


def plain(requests: Sequence[Request]) -> list[Result]:
    """Run each request alone, without drafter or prefix cache."""
    results = []
    for request in requests:
        alone = harness(prefix_cache=False)
        results += alone.run([request.plain()])
        alone.drain()
    return results


def script(requests: Sequence[Request], results: Sequence[Result], seed: int = 0) -> ScriptedDrafter:
    outputs = {
        (tuple(r.prompt), r.choice_index): [*out.token_ids, 1, 2, 3] for r, out in zip(requests, results, strict=True)
    }
    return ScriptedDrafter(outputs, seed=seed)


def prompt(seed: int, length: int = 11) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def assert_same(requests: Sequence[Request], expected: Sequence[Result], got: Sequence[Result]) -> None:
    for request, want, have in zip(requests, expected, got, strict=True):
        assert have.error is None
        assert have.token_ids == want.token_ids, request
        assert have.logprobs == want.logprobs
        assert have.prompt_logprobs == want.prompt_logprobs
        assert have.finished is not None and want.finished is not None
        assert have.finished.reason == want.finished.reason
        assert have.finished.stop_token_id == want.finished.stop_token_id
        assert have.finished.num_output_tokens == want.finished.num_output_tokens
        assert len(have.sources) == len(have.token_ids)


def assert_speculated(results: Sequence[Result]) -> None:
    """Assert by counters that two drafted tokens in a row were accepted, and one refused."""
    stats = [result.finished.speculation for result in results if result.finished]
    longest = max(max((k for k, n in enumerate(s.acceptance_histogram) if n), default=0) for s in stats)
    assert longest >= 2, "no run of two drafted tokens was accepted"
    assert any(s.num_accepted_tokens < s.num_draft_tokens for s in stats), "no drafted token was refused"


@pytest.mark.parametrize("temperature", TEMPERATURES.values(), ids=TEMPERATURES)
@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_alone(fields: dict[str, object], temperature: float) -> None:
    requests = [Request(prompt(s), params(temperature, s, **fields)) for s in range(6)]
    expected = plain(requests)
    got = []
    for seed, (request, want) in enumerate(zip(requests, expected, strict=True)):
        run = harness(script([request], [want], seed))
        got += run.run([request])
        run.drain()
    assert_same(requests, expected, got)
    assert_speculated(got)


@pytest.mark.parametrize("temperature", TEMPERATURES.values(), ids=TEMPERATURES)
def test_mixed_batch_with_preemption(temperature: float) -> None:
    requests = [
        Request(prompt(seed, 5 + 3 * seed), params(temperature, seed, **fields))
        for seed, fields in enumerate(FIELDS.values())
    ]
    requests[4] = requests[4].plain()
    expected = plain(requests)
    run = harness(script(requests, expected), num_blocks=40, max_running=8, max_model_len=150)
    got = run.run(requests)
    run.drain()
    assert_same(requests, expected, got)
    assert_speculated(got)
    assert run.scheduler.num_preemptions > 0, "the cache was not small enough to force preemption"
    assert got[4].finished is not None and got[4].finished.speculation.num_draft_tokens == 0


@pytest.mark.parametrize("temperature", TEMPERATURES.values(), ids=TEMPERATURES)
def test_prefix_hits_and_two_choices(temperature: float) -> None:
    shared = prompt(3, 30)
    first = Request(shared, params(temperature, 5))
    second = replace(first, choice_index=1)
    third = Request([*shared[:20], *prompt(4, 9)], params(temperature, 5))
    requests = [first, second, third]
    expected = plain(requests)
    if temperature > 0:
        assert expected[0].token_ids != expected[1].token_ids, "two choices share their noise"
    run = harness(script(requests, expected))
    got = [*run.run([first]), *run.run([second, third])]
    run.drain()
    assert_same(requests, expected, got)
    assert_speculated(got)
    cached = [result.finished.num_cached_tokens for result in got if result.finished]
    assert cached == [0, 28, 20]


def test_choices_submitted_together_share_the_prompt() -> None:
    requests = [Request(prompt(3, 33), params(1.0, 5), choice_index=i) for i in range(3)]
    run = harness(chunk_tokens=16)
    keys = [run.submit(request, "same") for request in requests]
    while not all(run.results[key].is_done for key in keys):
        run.step()
    cached = [run.results[key].finished.num_cached_tokens for key in keys]  # type: ignore[union-attr]
    assert cached == [0, 32, 32]
    assert [run.results[key].token_ids for key in keys] == [r.token_ids for r in plain(requests)]


def test_prefix_hits_do_not_cross_salts() -> None:
    first = Request(prompt(3, 30), params(0.0), cache_salt="a")
    run = harness()
    cached = [run.run([replace(first, cache_salt=salt)])[0].finished for salt in ("a", "b", None, "a", "b", "")]
    assert [finished.num_cached_tokens for finished in cached if finished] == [0, 0, 0, 28, 28, 0]


@pytest.mark.parametrize("temperature", TEMPERATURES.values(), ids=TEMPERATURES)
def test_the_drafter_dies_and_comes_back(temperature: float) -> None:
    requests = [Request(prompt(seed), params(temperature, seed, ignore_eos=True)) for seed in range(4)]
    expected = plain(requests)
    run = harness(script(requests, expected))
    source = run.sources[0]
    got = run.run(requests, every_step=source.dies_and_returns(every=6, dies_at=3, returns_at=5))
    run.drain()
    assert_same(requests, expected, got)
    assert_speculated(got)
    assert source.num_attaches >= 3
    assert any(result.finished.speculation.fallback_steps for result in got if result.finished)


def test_plain_above_the_batch_limit_and_back() -> None:
    requests = [Request(prompt(s), replace(params(0.0, s, ignore_eos=True), max_tokens=10 + 8 * s)) for s in range(5)]
    expected = plain(requests)
    run = harness(script(requests, expected), max_batch_size=2)
    got = run.run(requests)
    run.drain()
    assert_same(requests, expected, got)
    assert_speculated(got)
    assert run.speculator.limit.num_steps_above > 0
    shortest = got[0].finished
    assert shortest is not None and shortest.speculation.num_draft_tokens == 0


@pytest.mark.parametrize("cut", [1, 5, 17])
@pytest.mark.parametrize("temperature", TEMPERATURES.values(), ids=TEMPERATURES)
def test_a_resumed_sequence_goes_on_with_the_same_text(temperature: float, cut: int) -> None:
    request = Request(
        prompt(2), params(temperature, 3, presence_penalty=0.8, min_tokens=30, logprobs=1, ignore_eos=True)
    )
    want = plain([request])[0]
    resumed = replace(request, output=want.token_ids[:cut], attempt=1)
    run = harness(script([request], [want]))
    got = run.run([resumed])[0]
    assert got.token_ids[cut:] == want.token_ids[cut:]
    assert got.logprobs == want.logprobs[cut:]
    assert got.finished is not None and want.finished is not None
    assert got.finished.reason == want.finished.reason
    assert got.finished.num_output_tokens == want.finished.num_output_tokens
    # Decodes only the rest: the first token comes out of prefill.
    alone = harness()
    rest = alone.run([resumed.plain()])[0].finished
    assert rest is not None and rest.speculation.num_decode_steps == len(want.token_ids) - cut - 1


@pytest.mark.slow
def test_ten_thousand_requests_with_aborts_at_every_phase_leave_no_block() -> None:
    rng = np.random.default_rng(0)
    drafter = ScriptedDrafter({}, seed=1)
    run = harness(drafter, num_blocks=36, max_running=6, max_model_len=60)
    keys = []
    submitted = itertools.count()
    while next(submitted) < 10_000:
        request = Request(
            prompt(int(rng.integers(30)), int(rng.integers(1, 30))),
            replace(params(float(rng.choice([0.0, 1.0])), int(rng.integers(9))), max_tokens=int(rng.integers(1, 16))),
            cache_salt=[None, "a", "b"][rng.integers(3)],
        )
        keys.append(run.submit(request))
        for _ in range(int(rng.integers(0, 4))):
            run.step()
        if rng.random() < 0.3:
            run.abort(keys[int(rng.integers(max(len(keys) - 12, 0), len(keys)))])
        if rng.random() < 0.02:
            check_blocks(run.blocks)
    run.drain()
    assert not run.scheduler.running and run.engine.is_idle
    assert all(run.results[key].is_done for key in keys)
    assert run.scheduler.num_preemptions > 0
    reasons = {run.results[key].finished.reason.name for key in keys if run.results[key].finished}  # type: ignore[union-attr]
    assert reasons == {"STOP", "LENGTH", "ABORT"}
