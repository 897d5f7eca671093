"""A grammar's mask among the sampler's operations, and beside a request's own masks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.errors import InvalidRequestError
from foretoken.sampling import SamplingParams
from foretoken.tree import DraftTree
from tests.references.logits import sample_reference
from tests.support.grammars import EOS, PROMPT, VOCAB, ids_of, regex, text_of
from verifier_svc.sampling.grammar import Vocabulary, bits_of, compile_grammar
from verifier_svc.sampling.verify import SamplingState, sample_and_walk


class FixedMatcher:
    """A matcher that allows the same tokens for ever."""

    def __init__(self, allowed: set[int], width: int) -> None:
        self.allowed = bits_of(frozenset(allowed), width)
        self.is_accepting = False
        self.error = ""
        self.ahead = None

    def advance(self, token_ids: tuple[int, ...]) -> bool:
        return True


def masked_sample(logits: np.ndarray, params: SamplingParams, allowed: set[int], **context: Any) -> int | None:
    state = SamplingState(
        replace(params, grammar=regex("")),
        context["prompt_ids"],
        context["output_ids"],
        eos_ids=EOS,
        choice_index=0,
        matcher=FixedMatcher(allowed, len(logits)),  # type: ignore[arg-type]
    )
    return state.sample(logits, len(context["prompt_ids"]) + len(context["output_ids"]))


def test_filters_see_only_what_the_grammar_allows() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1, 0, 0, 0, 0], np.float32) + 1e-9)
    context: dict[str, Any] = {"prompt_ids": (0,), "output_ids": ()}
    for params, kept in (
        (SamplingParams(top_k=1), {1}),
        (SamplingParams(top_k=2), {1, 2}),
        # Chances 0.3, 0.2 and 0.1: the first is half of the mass, the last a third of the best.
        (SamplingParams(top_p=0.49), {1}),
        (SamplingParams(min_p=0.4), {1, 2}),
        (SamplingParams(logit_bias={0: 100.0}, temperature=0.0), {1}),
        (SamplingParams(presence_penalty=2.0, temperature=0.0), {1}),
    ):
        drawn = {masked_sample(logits, replace(params, seed=seed), {1, 2, 3}, **context) for seed in range(60)}
        assert drawn == kept, params


@settings(max_examples=300)
@given(data=st.data())
def test_the_compiled_mask_is_the_references(data: st.DataObject) -> None:
    width = data.draw(st.integers(9, 40))
    token = st.integers(0, width - 1)
    allowed = data.draw(st.sets(token, min_size=1))
    logits = np.array(data.draw(st.lists(st.floats(-40, 40, width=32), min_size=width, max_size=width)), np.float32)
    params = SamplingParams(
        temperature=data.draw(st.sampled_from([0.0, 0.7, 2.0])),
        top_k=data.draw(st.sampled_from([0, 1, 3])),
        top_p=data.draw(st.sampled_from([1.0, 0.8, 0.3])),
        min_p=data.draw(st.sampled_from([0.0, 0.3])),
        seed=data.draw(st.integers(0, 2**40)),
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.4])),
        logit_bias=data.draw(st.dictionaries(token, st.floats(-100, 100), max_size=4)),
    )
    context: dict[str, Any] = {"prompt_ids": (1, 2), "output_ids": tuple(data.draw(st.lists(token, max_size=4)))}
    expected = sample_reference(logits, params, eos_ids=EOS, allowed_ids=allowed, **context)
    assert masked_sample(logits, params, allowed, **context) == expected
    assert expected in allowed


@pytest.mark.parametrize(
    ("masks", "expected"),
    [
        ({"allowed_token_ids": tuple(ids_of("cd", "a", "b", "ab"))}, "cdcdcd"),
        ({"bad_token_ids": (tuple(ids_of("ab", "ab")),)}, "abcdab"),
        ({"bad_token_ids": (tuple(ids_of("ab")), tuple(ids_of("cd", "cd")))}, "cdabcd"),
    ],
)
def test_masks_and_a_grammar_hold_together(vocab: Vocabulary, masks: dict[str, Any], expected: str) -> None:
    grammar = regex("(ab|cd){3}")
    params = SamplingParams(temperature=0.0, max_tokens=20, **masks)
    state = SamplingState(params, PROMPT, eos_ids=EOS, choice_index=0, matcher=compile_grammar(grammar, vocab))
    # "ab" is best but where it is banned, then "cd", then single characters.
    row = np.zeros((1, VOCAB), np.float32)
    row[0, ids_of("ab", "cd", "a", "b")] = 5, 4, 3, 2
    if "allowed_token_ids" in masks:
        row[0, ids_of("ab", "cd")] = 4, 5
    output: list[int] = []
    while not state.has_ended:
        output += sample_and_walk(row, DraftTree.root_only(1), state, len(PROMPT), len(output), 9).tokens
    assert text_of(output) == expected and state.is_complete and state.error is None


def test_masks_that_leave_nothing_of_a_grammar_name_it(vocab: Vocabulary) -> None:
    params = SamplingParams(temperature=0.0, allowed_token_ids=tuple(ids_of("12")), grammar=regex("(ab|cd){3}"))
    assert params.grammar is not None
    matcher = compile_grammar(params.grammar, vocab)
    state = SamplingState(params, PROMPT, eos_ids=EOS, choice_index=0, matcher=matcher)
    assert isinstance(state.error, InvalidRequestError) and "the other fields" in state.error.message
