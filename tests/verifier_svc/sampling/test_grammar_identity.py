"""Speculative text = plain text under grammars, in the engine.

Sequences run alone, mixed, preempted, after a prefix hit, and resumed. Every case asserts that
drafts were accepted and refused in it. The target is tests/support/hash_target.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from foretoken.results import FinishReason
from foretoken.sampling import Grammar, SamplingParams
from tests.support.engine_harness import Harness, Request, Result
from tests.support.grammars import END, RECORD, VOCAB, Record, ids_of, regex, schema, text_of
from tests.support.hash_target import HashTarget
from tests.support.scripted_drafter import ScriptedDrafter
from tests.verifier_svc.test_identity import TEMPERATURES, assert_same, assert_speculated, script
from verifier_svc.sampling.grammar import Vocabulary, compile_grammar

BLOCK = 4
LIST = schema({"type": "array", "items": {"enum": ["a", "ab", 12, None, True]}, "minItems": 6, "maxItems": 9})
CALLS = Grammar("lark", 'start: call{2,4}\ncall: "ab" args "cd"\nargs: %json {"enum": [12, null, "a", "abc"]}\n')
FIELDS: dict[str, dict[str, Any]] = {
    "schema": {"grammar": RECORD},
    "list": {"grammar": LIST},
    "regex": {"grammar": regex("(ab|cd|[0-9]{2}){12,20}")},
    "lark": {"grammar": CALLS},
    "open end": {"grammar": regex("[a-f ]{4,}")},
    "penalties": {"grammar": LIST, "presence_penalty": 0.7, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    "bias": {"grammar": regex("[a-f]{9,}1?"), "logit_bias": {END: 1.0, 24: 2.0}},
    "top-k": {"grammar": LIST, "top_k": 2},
    "top-p": {"grammar": RECORD, "top_p": 0.7},
    "min-p": {"grammar": LIST, "min_p": 0.3},
    "min tokens": {"grammar": regex("[a-f]*"), "min_tokens": 20},
    "stop tokens": {"grammar": regex("[a-fxyz0-9]{3,}"), "stop_token_ids": tuple(ids_of("9"))},
    "ignore eos": {"grammar": regex("[ab]{5,30}"), "ignore_eos": True},
    "logprobs": {"grammar": LIST, "logprobs": 3, "prompt_logprobs": 2},
}


def harness(drafter: ScriptedDrafter | None = None, *, num_blocks: int = 600, **options: Any) -> Harness:
    return Harness(
        HashTarget(VOCAB, num_blocks, BLOCK),
        vocab_size=VOCAB,
        num_blocks=num_blocks,
        block_size=BLOCK,
        eos_ids=frozenset({END}),
        drafters={"scripted": drafter} if drafter else None,
        **options,
    )


def request(vocab: Vocabulary, seed: int, temperature: float, *, length: int = 11, **fields: Any) -> Request:
    prompt = np.random.default_rng(seed).integers(0, VOCAB, length).tolist()
    sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=60, **fields)
    return Request(prompt, sampling, matcher=compile_grammar(fields["grammar"], vocab))


def plain(requests: Sequence[Request]) -> list[Result]:
    """Run each request alone, without drafter or prefix cache."""
    results = []
    for item in requests:
        alone = harness(prefix_cache=False)
        results += alone.run([item.plain()])
        alone.drain()
    return results


def assert_in_grammar(requests: Sequence[Request], results: Sequence[Result]) -> None:
    """Assert that every text that ended by itself is a whole text of its grammar."""
    for item, result in zip(requests, results, strict=True):
        assert result.finished is not None
        grammar: Grammar | None = item.sampling.grammar
        if grammar is None or result.finished.reason is not FinishReason.STOP or item.sampling.stop_token_ids:
            continue
        text = text_of(result.token_ids)
        if grammar == RECORD:
            Record.model_validate_json(text)
        elif grammar == CALLS:
            assert re.fullmatch(r'(ab(12|null|"a"|"abc")cd){2,4}', text)
        elif grammar.kind == "regex":
            assert re.fullmatch(grammar.text, text)


@pytest.mark.parametrize("temperature", TEMPERATURES.values(), ids=TEMPERATURES)
@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_alone(vocab: Vocabulary, fields: dict[str, Any], temperature: float) -> None:
    requests = [request(vocab, seed, temperature, **fields) for seed in range(6)]
    expected = plain(requests)
    got = []
    for seed, (item, want) in enumerate(zip(requests, expected, strict=True)):
        run = harness(script([item], [want], seed))
        got += run.run([item])
        run.drain()
    assert_same(requests, expected, got)
    assert_in_grammar(requests, got)
    assert_speculated(got)


@pytest.mark.parametrize("temperature", TEMPERATURES.values(), ids=TEMPERATURES)
def test_mixed_batch_with_preemption(vocab: Vocabulary, temperature: float) -> None:
    requests = [
        request(vocab, seed, temperature, length=5 + 3 * seed, **fields) for seed, fields in enumerate(FIELDS.values())
    ]
    # A request without a grammar runs beside them.
    free = replace(requests[3].sampling, grammar=None, ignore_eos=True)
    requests[3] = replace(requests[3], sampling=free, matcher=None)
    expected = plain(requests)
    run = harness(script(requests, expected), num_blocks=44, max_running=8, max_model_len=170)
    got = run.run(requests)
    run.drain()
    assert_same(requests, expected, got)
    assert_in_grammar(requests, got)
    assert_speculated(got)
    assert run.scheduler.num_preemptions > 0, "the cache was not small enough to force preemption"


@pytest.mark.parametrize("temperature", TEMPERATURES.values(), ids=TEMPERATURES)
def test_prefix_hits_and_two_choices(vocab: Vocabulary, temperature: float) -> None:
    first = request(vocab, 5, temperature, length=30, grammar=LIST, logprobs=2)
    requests = [first, replace(first, choice_index=1)]
    expected = plain(requests)
    if temperature > 0:
        assert expected[0].token_ids != expected[1].token_ids, "two choices share their noise"
    run = harness(script(requests, expected))
    got = [*run.run([first]), *run.run([requests[1]])]
    run.drain()
    assert_same(requests, expected, got)
    assert_speculated(got)
    assert [result.finished.num_cached_tokens for result in got if result.finished] == [0, 28]


@pytest.mark.parametrize("temperature", TEMPERATURES.values(), ids=TEMPERATURES)
def test_a_resumed_sequence_goes_on_with_the_same_text(vocab: Vocabulary, temperature: float) -> None:
    item = request(vocab, 2, temperature, grammar=LIST, presence_penalty=0.8, logprobs=1)
    want = plain([item])[0]
    for cut in range(1, len(want.token_ids)):
        resumed = replace(item, output=want.token_ids[:cut], attempt=1)
        run = harness(script([item], [want]))
        got = run.run([resumed])[0]
        run.drain()
        assert got.token_ids[cut:] == want.token_ids[cut:]
        assert got.logprobs == want.logprobs[cut:]
        assert got.finished is not None and want.finished is not None
        assert got.finished.reason == want.finished.reason


def test_an_output_that_cannot_go_on_is_an_error_and_frees_its_blocks(vocab: Vocabulary) -> None:
    (b,) = ids_of("b")
    grammar = regex("abc")
    dead = request(vocab, 1, 1.0, grammar=grammar, stop_token_ids=(b,), min_tokens=9, logit_bias={22: 100.0})
    other = request(vocab, 2, 1.0, grammar=LIST)
    run = harness()
    failed, fine = run.run([dead, other])
    run.drain()
    assert text_of(failed.token_ids) == "a"
    assert failed.error is not None and failed.error.field == "regex" and "min_tokens" in failed.error.message
    assert fine.error is None and fine.token_ids == plain([other])[0].token_ids


def test_a_grammar_that_the_length_ends_with_is_whole(vocab: Vocabulary) -> None:
    item = request(vocab, 4, 1.0, grammar=regex("[ab]{10}"))
    want = plain([item])[0]
    num_tokens = len(want.token_ids)
    for room, reason in ((num_tokens, FinishReason.STOP), (num_tokens - 1, FinishReason.LENGTH)):
        cut = replace(item, sampling=replace(item.sampling, max_tokens=room))
        for run in (harness(), harness(script([item], [want]))):
            got = run.run([cut])[0]
            assert got.finished is not None
            assert (got.token_ids, got.finished.reason) == (want.token_ids[:room], reason)
