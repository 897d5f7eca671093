"""The text is plain decode's, token for token, with every drafter and sampling field.

Logprobs are equal bit for bit. All models run in strict numerics, in float32 and some cases in
float16: tiny targets fitted to a repeating text, and heads fitted to the targets. Each case asserts
that drafted tokens were accepted and refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

from drafter_svc.model.placement import ModelPlacement
from foretoken.models.element_type import DType
from foretoken.results import FinishReason
from foretoken.sampling import SamplingParams, SpeculationOptions
from tests.support.deployments import KINDS, SeenHarness, Target, Targets
from tests.support.engine_harness import Request, Result
from tests.support.fitted_models import text
from tests.support.grammars import END, VOCAB, ids_of, regex
from verifier_svc.messages import SequenceKey
from verifier_svc.sampling.grammar import Vocabulary, compile_grammar

TEMPERATURES = {"greedy": 0.0, "T=0.7": 0.7, "T=1.0": 1.0}
MAX_TOKENS = 64
# Neither the x nor the 3 of the text that the models were fitted to.
GRAMMAR = regex("[abcd0-24-9]{80,120}")
# Pieces of the text that the models were fitted to.
BAD_WORDS = (("5",), ("a", "b"), ("x", "cd", "12"), ("99", "ab", "cd"))
FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"presence_penalty": 0.3, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
    "logit bias": {"logit_bias": dict.fromkeys(ids_of("9"), -3.0) | dict.fromkeys(ids_of("5"), 2.0)},
    "min-p": {"min_p": 0.1},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.85},
    "min tokens": {"min_tokens": 40, "stop_token_ids": tuple(ids_of("99", "x"))},
    "stop ids": {"stop_token_ids": tuple(ids_of("7", "}")), "min_tokens": 20},
    "grammar": {"grammar": GRAMMAR},
    "logprobs": {"logprobs": 3},
    "prompt logprobs": {"logprobs": 0, "prompt_logprobs": 2},
    "n = 2": {"presence_penalty": 0.5},
    "allowed tokens": {"allowed_token_ids": tuple(token for token in range(VOCAB) if token not in ids_of("3", "x"))},
    "bad words": {"bad_token_ids": tuple(tuple(ids_of(*each)) for each in BAD_WORDS)},
}


@dataclass(frozen=True)
class Case:
    """One column of the matrix: requests of one field, sharing a request id."""

    field: str
    requests: tuple[Request, ...]


def cases(target: Target, temperature: float, kind: str) -> list[Case]:
    vocabulary = Vocabulary(target.folder, vocab_limit=VOCAB, eos_ids=frozenset({END}))
    speculation = SpeculationOptions(drafter="merge") if kind == "merge" else SpeculationOptions()
    made = []
    for number, (field, fields) in enumerate(FIELDS.items()):
        params = SamplingParams(temperature=temperature, seed=number, max_tokens=MAX_TOKENS, **fields)
        matcher = compile_grammar(fields["grammar"], vocabulary) if "grammar" in fields else None
        if matcher is not None:
            matcher.look_ahead()
        # Salts keep one case's n-gram history from the others.
        request = Request(
            # From here on the stop token's digit is some phrases away.
            text(number, 36 + number, digit=1 if field == "stop ids" else None),
            params,
            speculation=speculation,
            cache_salt=field,
            matcher=matcher,
        )
        choices = (request, replace(request, choice_index=1)) if field == "n = 2" else (request,)
        made.append(Case(field, choices))
    return made


def submit(harness: SeenHarness, case: Case) -> list[SequenceKey]:
    return [harness.submit(request, f"{case.field} {harness.num_steps}") for request in case.requests]


def finish(harness: SeenHarness, keys: Sequence[SequenceKey]) -> list[Result]:
    while not all(harness.results[key].is_done for key in keys):
        harness.step()
    return [harness.results[key] for key in keys]


class Plain:
    """Plain decode's text for each request alone, without drafter or prefix cache."""

    def __init__(self) -> None:
        self.results = cache(self._results)

    def _results(self, target: Target, temperature: float, dtype: DType = "float32") -> dict[str, list[Result]]:
        found = {}
        for case in cases(target, temperature, "none"):
            found[case.field] = []
            for request in case.requests:
                harness = target.harness({}, prefix_cache=False, dtype=dtype)
                found[case.field] += harness.run([request.plain()])
                harness.drain()
        return found


@pytest.fixture(scope="session")
def plain() -> Plain:
    return Plain()


def assert_same(case: Case, expected: Sequence[Result], got: Sequence[Result]) -> None:
    for want, have in zip(expected, got, strict=True):
        assert have.error is None and have.finished is not None and want.finished is not None, case.field
        assert have.token_ids == want.token_ids, case.field
        assert have.logprobs == want.logprobs, case.field
        assert have.prompt_logprobs == want.prompt_logprobs, case.field
        assert (have.finished.reason, have.finished.stop_token_id) == (
            want.finished.reason,
            want.finished.stop_token_id,
        ), case.field


def assert_speculated(case: Case, harness: SeenHarness, keys: Sequence[SequenceKey]) -> None:
    for key in keys:
        walks = harness.walks[key]
        assert walks.num_accepted > 0, f"{case.field}: no drafted token was accepted"
        assert walks.num_refused > 0, f"{case.field}: no drafted token was refused"


# It fits a target of its own; MTP with one layer stays among the quick tests.
SLOW_KINDS = ("MTP MiMo of two layers",)


@pytest.fixture(params=[pytest.param(kind, marks=pytest.mark.slow) if kind in SLOW_KINDS else kind for kind in KINDS])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(
    params=[
        pytest.param(value, id=name, marks=pytest.mark.slow if name == "T=0.7" else ())
        for name, value in TEMPERATURES.items()
    ]
)
def temperature(request: pytest.FixtureRequest) -> float:
    return float(request.param)


def check(
    kind: str, harness: SeenHarness, plain: dict[str, list[Result]], ran: Sequence[tuple[Case, list[SequenceKey]]]
) -> None:
    for case, keys in ran:
        assert_same(case, plain[case.field], [harness.results[key] for key in keys])
        if kind != "none":
            assert_speculated(case, harness, keys)
    # Each of the merged drafters had a part, and none failed.
    for drafter in harness.speculator.drafters:
        assert 0 < drafter.counters.num_accepted_tokens < drafter.counters.num_draft_tokens, drafter.name
    assert all(source.failures == [] for source in harness.sources)
    harness.drain()


def test_alone(targets: Targets, plain: Plain, kind: str, temperature: float) -> None:
    target, drafters = targets.of_kind(kind)
    expected = plain.results(target, temperature)
    harness = target.harness(drafters, prefix_cache=False)
    ran = []
    for case in cases(target, temperature, kind):
        keys = submit(harness, case)
        finish(harness, keys)
        ran.append((case, keys))
    check(kind, harness, expected, ran)


def test_mixed_batch_with_preemption(targets: Targets, plain: Plain, kind: str, temperature: float) -> None:
    target, drafters = targets.of_kind(kind)
    expected = plain.results(target, temperature)
    harness = target.harness(drafters, num_blocks=44, max_running=7, max_model_len=130, chunk_tokens=24)
    ran = [(case, submit(harness, case)) for case in cases(target, temperature, kind)]
    finish(harness, [key for _, keys in ran for key in keys])
    assert harness.scheduler.num_preemptions > 0, "the cache was not small enough to force preemption"
    check(kind, harness, expected, ran)


@pytest.mark.slow
def test_prefix_hits(targets: Targets, plain: Plain, kind: str, temperature: float) -> None:
    target, drafters = targets.of_kind(kind)
    expected = plain.results(target, temperature)
    harness = target.harness(drafters)
    ran = []
    for case in cases(target, temperature, kind):
        if case.field == "prompt logprobs":
            continue  # They take no prefix from the cache.
        # Another text begins with the same prompt; its tokens are in the
        # drafter's history and both caches.
        first = replace(case.requests[0], sampling=SamplingParams(seed=99, max_tokens=20), matcher=None)
        harness.run([first])
        keys = submit(harness, case)
        for result in finish(harness, keys):
            assert result.finished is not None and result.finished.num_cached_tokens >= 16
        ran.append((case, keys))
    check(kind, harness, expected, ran)


@pytest.mark.slow
@pytest.mark.parametrize("of_drafters", [torch.float16, torch.float32])
def test_a_mixed_batch_in_float16(targets: Targets, plain: Plain, kind: str, of_drafters: torch.dtype) -> None:
    """The target runs in float16; drafters too, or in
    another type, which converts what they share.
    """
    target, drafters = targets.of_kind(kind, ModelPlacement(dtype=of_drafters))
    expected = plain.results(target, 1.0, "float16")
    harness = target.harness(drafters, dtype="float16", chunk_tokens=24)
    ran = [(case, submit(harness, case)) for case in cases(target, 1.0, kind)]
    finish(harness, [key for _, keys in ran for key in keys])
    check(kind, harness, expected, ran)


def test_a_mixed_batch_with_drafters_alone_in_float16(targets: Targets, plain: Plain) -> None:
    target, drafters = targets.of_kind("EAGLE3", ModelPlacement(dtype=torch.float16))
    harness = target.harness(drafters)
    ran = [(case, submit(harness, case)) for case in cases(target, 1.0, "EAGLE3")]
    finish(harness, [key for _, keys in ran for key in keys])
    check("EAGLE3", harness, plain.results(target, 1.0), ran)


def test_stop_ids_and_the_grammar_end_texts(targets: Targets, plain: Plain) -> None:
    reasons = {
        (field, result.finished.reason)
        for temperature in TEMPERATURES.values()
        for field, results in plain.results(targets["llama"], temperature).items()
        for result in results
        if result.finished
    }
    assert {
        ("stop ids", FinishReason.STOP),
        ("min tokens", FinishReason.STOP),
        ("plain", FinishReason.LENGTH),
    } <= reasons
