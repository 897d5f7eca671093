"""Where an output ends that a grammar binds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from foretoken.errors import InvalidRequestError, ModelOutputError
from foretoken.results import FinishReason
from foretoken.sampling import Grammar, SamplingParams
from foretoken.tree import DraftTree
from tests.support.grammars import END, EOS, VOCAB, ids_of, regex, text_of
from verifier_svc.sampling.grammar import Vocabulary, compile_grammar
from verifier_svc.sampling.verify import SamplingState, WalkResult, sample_and_walk


def peaks(*best: int) -> np.ndarray:
    """Return float32 [rows, vocab]: one row for each given token, which is its best."""
    return np.eye(VOCAB, dtype=np.float32)[list(best)]


def walk(
    grammar: Grammar,
    vocab: Vocabulary,
    logits: np.ndarray,
    tree: DraftTree | None = None,
    *,
    max_new_tokens: int = 100,
    **fields: Any,
) -> WalkResult:
    """Sample and walk one greedy step after a prompt of one token."""
    params = SamplingParams(temperature=0.0, max_tokens=100, grammar=grammar, **fields)
    matcher = compile_grammar(grammar, vocab)
    state = SamplingState(params, (1,), eos_ids=EOS, choice_index=0, vocab_limit=VOCAB, matcher=matcher)
    return sample_and_walk(logits, tree or DraftTree.root_only(1), state, 1, 0, max_new_tokens)


def chain(*texts: str) -> DraftTree:
    tokens = ids_of(*texts)
    return DraftTree(np.array([1, *tokens], np.int32), np.arange(-1, len(tokens), dtype=np.int32))


def test_the_grammar_ends_inside_an_accepted_run_without_a_trailing_token(vocab: Vocabulary) -> None:
    tree = chain("a", "b", "c", "d")
    result = walk(regex("abc"), vocab, peaks(*ids_of("a", "b", "c", "d", "e")), tree)
    assert text_of(result.tokens) == "abc"
    assert result.finish is FinishReason.STOP and result.stop_token_id is None
    assert result.accepted_nodes == [1, 2, 3] and result.sources == [1, 1, 1]
    assert result.num_walked_tokens == 3


def test_a_stop_token_is_allowed_where_the_output_may_end_and_nowhere_else(vocab: Vocabulary) -> None:
    assert walk(regex("[ab]{2,}"), vocab, peaks(END)).tokens == ids_of("a")
    ended = walk(regex("[ab]+"), vocab, peaks(*ids_of("a"), END), chain("a"))
    assert text_of(ended.tokens) == "a"
    assert ended.finish is FinishReason.STOP and ended.stop_token_id == END


def test_a_token_of_the_request_stops_where_the_output_may_end(vocab: Vocabulary) -> None:
    (z,) = ids_of("z")
    ended = walk(regex("[ab]+"), vocab, peaks(*ids_of("a"), z), chain("a"), stop_token_ids=(z,))
    assert text_of(ended.tokens) == "a" and ended.stop_token_id == z
    # As text it stops too: that is what the request asked for.
    inside = walk(regex("azb"), vocab, peaks(*ids_of("a", "z")), chain("a"), stop_token_ids=(z,))
    assert text_of(inside.tokens) == "a" and inside.stop_token_id == z


def test_ignoring_the_end_of_the_text_still_ends_with_the_grammar(vocab: Vocabulary) -> None:
    on = walk(regex("[ab]+"), vocab, peaks(*ids_of("a"), END), chain("a"), ignore_eos=True)
    assert text_of(on.tokens) == "aa" and on.finish is None
    ended = walk(regex("ab"), vocab, peaks(END, END), chain("a"), ignore_eos=True)
    assert text_of(ended.tokens) == "ab" and ended.finish is FinishReason.STOP


def test_a_complete_grammar_ends_before_min_tokens(vocab: Vocabulary) -> None:
    ended = walk(regex("ab"), vocab, peaks(END, END), chain("a"), min_tokens=50)
    assert text_of(ended.tokens) == "ab" and ended.finish is FinishReason.STOP
    longer = walk(regex("a*"), vocab, peaks(*ids_of("a"), END), chain("a"), min_tokens=50)
    assert text_of(longer.tokens) == "aa" and longer.finish is None


@pytest.mark.parametrize(
    ("room", "text", "finish"),
    [(2, "ab", FinishReason.LENGTH), (3, "abc", FinishReason.STOP), (4, "abc", FinishReason.STOP)],
)
@pytest.mark.parametrize("drafted", [True, False])
def test_the_length_cuts_unless_the_output_is_whole(
    vocab: Vocabulary, room: int, text: str, finish: FinishReason, drafted: bool
) -> None:
    best = ids_of("a", "b", "c")
    if drafted:
        result = walk(regex("abc"), vocab, peaks(*best, END), chain("a", "b", "c"), max_new_tokens=room)
        assert (text_of(result.tokens), result.finish) == (text, finish)
        return
    params = SamplingParams(temperature=0.0, max_tokens=room, grammar=regex("abc"))
    state = SamplingState(
        params, (1,), eos_ids=EOS, choice_index=0, vocab_limit=VOCAB, matcher=compile_grammar(regex("abc"), vocab)
    )
    output: list[int] = []
    while True:
        root = DraftTree.root_only(([1, *output])[-1])
        result = sample_and_walk(peaks(best[len(output)]), root, state, 1, len(output), room - len(output))
        output += result.tokens
        if result.finish is not None:
            break
    assert (text_of(output), result.finish) == (text, finish)


def test_an_empty_output_is_an_output(vocab: Vocabulary) -> None:
    result = walk(regex(""), vocab, peaks(5))
    assert result.tokens == [] and result.finish is FinishReason.STOP and result.error is None


def test_no_token_left_by_grammar_and_min_tokens_is_an_error_after_the_text(vocab: Vocabulary) -> None:
    (b,) = ids_of("b")
    result = walk(regex("abc"), vocab, peaks(*ids_of("a", "b")), chain("a"), stop_token_ids=(b,), min_tokens=9)
    assert text_of(result.tokens) == "a" and result.finish is None
    assert isinstance(result.error, InvalidRequestError) and result.error.field == "regex"
    assert "min_tokens" in result.error.message


def test_a_row_without_a_finite_logit_for_any_allowed_token_is_an_error(vocab: Vocabulary) -> None:
    logits = peaks(*ids_of("a"), 0)
    logits[1] = np.where(np.arange(VOCAB) == END, 0.0, -np.inf)
    result = walk(regex("ab"), vocab, logits, chain("a"))
    assert text_of(result.tokens) == "a" and result.finish is None
    assert isinstance(result.error, InvalidRequestError) and result.error.field == "regex"


@pytest.mark.parametrize("fault", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_broken_is_the_models_error_and_not_the_grammars(fault: float, vocab: Vocabulary) -> None:
    logits = peaks(*ids_of("a"), 0)
    logits[1] = fault
    result = walk(regex("ab"), vocab, logits, chain("a"))
    assert text_of(result.tokens) == "a" and result.finish is None
    assert isinstance(result.error, ModelOutputError)


def test_logprobs_are_of_the_raw_logits(vocab: Vocabulary) -> None:
    (entry,) = walk(regex("[ab]{2,}"), vocab, peaks(END), logprobs=2).logprobs
    (a,) = ids_of("a")
    assert entry.token_id == a and entry.top[0][0] == END
    assert entry.top[0][1] == pytest.approx(1 - np.log(np.e + VOCAB - 1))
    assert entry.logprob == pytest.approx(-np.log(np.e + VOCAB - 1))
