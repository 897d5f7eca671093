"""Masks of a tree's nodes are those that the output would
meet there, and leave its own state alone.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from foretoken.results import FinishReason
from foretoken.sampling import Grammar, SamplingParams
from foretoken.tree import DraftTree
from tests.support.grammars import EOS, VOCAB, ids_of, regex
from verifier_svc.sampling import grammar
from verifier_svc.sampling.allowed_tokens import CLOSED, NO_MASK, AllowedTokens, TreeMasks
from verifier_svc.sampling.grammar import Vocabulary, compile_grammar
from verifier_svc.sampling.verify import SamplingState, WalkResult, followed

ROOT = 0


def allowed_of(vocab: Vocabulary, rules: Grammar, *, looks_ahead: bool = True, **fields: object) -> AllowedTokens:
    matcher = compile_grammar(rules, vocab)
    if looks_ahead:
        matcher.look_ahead()
    params = SamplingParams(grammar=rules, **fields)  # type: ignore[arg-type]
    return AllowedTokens(params, (), EOS, VOCAB, matcher)


def masks_of(allowed: AllowedTokens, texts: list[str], parents: list[int], num_output: int = 0) -> TreeMasks:
    """Return the masks of a tree whose nodes below the root hold these texts."""
    tokens = np.array([ROOT, *ids_of(*texts)], np.int32)
    return allowed.of_tree(tokens, np.array([-1, *parents], np.int32), num_output)


def after(vocab: Vocabulary, rules: Grammar, texts: list[str], **fields: object) -> AllowedTokens:
    """Return what an output of these texts, and no tree, would meet."""
    allowed = allowed_of(vocab, rules, looks_ahead=False, **fields)
    for count, token in enumerate(ids_of(*texts), 1):
        allowed.advance(token, count)
    return allowed


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"min_tokens": 3},
        {"bad_token_ids": ((*ids_of("a", "b"),), (*ids_of("c", "d", "1"),))},
        {"allowed_token_ids": tuple(ids_of(*"abcd12", "ab", "cd"))},
    ],
)
def test_each_node_has_the_mask_that_its_path_would_meet(vocab: Vocabulary, fields: dict[str, object]) -> None:
    rules = regex("[a-d]{1,3}(12?)?")
    paths = [[], ["a"], ["a", "b"], ["ab"], ["c"], ["c", "d"], ["c", "d", "1"], ["a", "1"], ["c", "d", "1", "2"]]
    texts, parents = [path[-1] for path in paths[1:]], [paths.index(path[:-1]) for path in paths[1:]]
    allowed = allowed_of(vocab, rules, **fields)
    masks = masks_of(allowed, texts, parents)
    num_open = 0
    for path, row in zip(paths, masks.rows.tolist(), strict=True):
        above = masks.rows[paths.index(path[:-1])] if path else 0
        if above < 0 or (path and not is_in(masks.bits[above], ids_of(path[-1])[0])):
            assert row == CLOSED
            continue
        want = after(vocab, rules, path, **fields)
        assert (row == CLOSED) == want.has_ended, path
        if row >= 0:
            num_open += 1
            assert masks.bits[row].tolist() == want.bits.tolist(), path
    assert num_open > 2
    # The output's own matcher has seen nothing of it.
    allowed.advance(ids_of("c")[0], 1)
    assert allowed.bits.tolist() == after(vocab, rules, ["c"], **fields).bits.tolist()
    again = masks_of(allowed, ["d"], [0], 1)
    assert again.bits[1].tolist() == after(vocab, rules, ["c", "d"], **fields).bits.tolist()


def is_in(bits: np.ndarray, token: int) -> bool:
    return bool(np.unpackbits(bits, bitorder="little")[token])


def test_a_tree_is_closed_where_nobody_looks_ahead(vocab: Vocabulary) -> None:
    allowed = allowed_of(vocab, regex("[a-d]{4}"), looks_ahead=False)
    masks = masks_of(allowed, ["a", "b", "x"], [0, 1, 0])
    assert masks.rows.tolist() == [0, CLOSED, CLOSED, CLOSED] and len(masks.bits) == 1


def test_no_mask_follows_a_stop_token(vocab: Vocabulary) -> None:
    """A request's stop tokens may be text of the grammar; a walk ends with them."""
    stop = ids_of("b")[0]
    matcher = compile_grammar(regex("[a-d]{4}"), vocab)
    matcher.look_ahead()
    allowed = AllowedTokens(SamplingParams(grammar=regex("[a-d]{4}")), (), frozenset({stop}), VOCAB, matcher)
    assert masks_of(allowed, ["a", "b", "c"], [0, 1, 2]).rows.tolist() == [0, 1, NO_MASK, CLOSED]


def test_of_siblings_with_one_token_none_is_entered_if_the_first_is_closed(vocab: Vocabulary) -> None:
    allowed = allowed_of(vocab, regex("ab|cd"))
    assert masks_of(allowed, ["ab", "ab", "a", "a"], [0, 0, 0, 0]).rows.tolist() == [0, CLOSED, CLOSED, 1, CLOSED]


def follow(vocab: Vocabulary, *, drafts: bool) -> tuple[list[int], list[WalkResult]]:
    """Write a text token by token, always the first allowed one, with drafts far ahead or none."""
    rules = regex("[a-f0-9 ]{400}")
    matcher = compile_grammar(rules, vocab)
    if drafts:
        matcher.look_ahead()
    params = SamplingParams(grammar=rules, temperature=0.0, max_tokens=300)
    state = SamplingState(params, (1,), eos_ids=EOS, choice_index=0, vocab_limit=VOCAB, matcher=matcher)
    tokens: list[int] = []
    walks: list[WalkResult] = []
    token = ids_of("a")[0]
    while not state.has_ended:
        size = 7 if drafts else 1
        tree = DraftTree(np.full(size, token, np.int32), np.arange(-1, size - 1, dtype=np.int32))
        rows = state.tree_masks(tree.tokens, tree.parents).rows.tolist()
        count = sum(row >= 0 for row in rows)
        nodes = list(range(1, count))
        walk = WalkResult([token] * count, nodes, [1] * count, None, None, [], count, nodes)
        walks.append(followed(state, walk))
        tokens += walks[-1].tokens
    return tokens, walks


def test_a_limit_ends_a_text_where_it_would_without_drafts(vocab: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """The matcher that looks ahead meets it first, which
    closes the trees and costs nothing else.
    """
    monkeypatch.setattr(grammar, "LIMITS", {**grammar.LIMITS, "max_lexer_states": 40})
    want, plain = follow(vocab, drafts=False)
    got, walks = follow(vocab, drafts=True)
    assert got == want and 10 < len(want) < 300
    assert walks[-1].error is not None and plain[-1].error is not None
    assert walks[-1].error.message == plain[-1].error.message and "too many states" in plain[-1].error.message
    assert len(walks[0].tokens) == 7 and len(walks[-1].tokens) < 7


def test_the_outputs_own_matcher_ends_a_walk(vocab: Vocabulary) -> None:
    """What a walk has after that was sampled with masks that the output would not have met."""
    matcher = compile_grammar(regex("abc"), vocab)
    params = SamplingParams(grammar=regex("abc"), max_tokens=9)
    state = SamplingState(params, (1,), eos_ids=EOS, choice_index=0, vocab_limit=VOCAB, matcher=matcher)
    ids = ids_of("a", "b", "c", "d", "e")
    walk = WalkResult(ids[:4], [1, 2, 3], [1, 1, 1, 0], FinishReason.STOP, ids[4], [], 5, [1, 2, 3, 4])
    assert followed(state, walk) == replace_walk(walk, ids[:3])


def replace_walk(walk: WalkResult, tokens: list[int]) -> WalkResult:
    count = len(tokens)
    return WalkResult(
        tokens, walk.accepted_nodes[:count], walk.sources[:count], FinishReason.STOP, None, [], count, [1, 2, 3]
    )


def test_token_lists_alone() -> None:
    """They need no matcher to look ahead."""
    a, b, c = ids_of("a", "b", "c")
    params = replace(SamplingParams(), bad_token_ids=((a, b), (b, c)))
    allowed = AllowedTokens(params, (), EOS, VOCAB, None)
    masks = masks_of(allowed, ["a", "b", "b", "c"], [0, 1, 0, 3])
    assert masks.rows.tolist() == [0, 1, CLOSED, 2, CLOSED]
    assert [is_in(masks.bits[row], token) for row, token in ((1, b), (2, c), (1, c))] == [False, False, True]
