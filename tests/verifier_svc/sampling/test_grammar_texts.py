"""A grammar's outputs are whole texts of it, and the same whatever was drafted."""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.results import FinishReason
from foretoken.sampling import SamplingParams
from foretoken.tree import DraftTree
from tests.references.logits import sample_reference
from tests.support.given_masks import give
from tests.support.grammars import END, EOS, PROMPT, RECORD, VOCAB, Record, regex, schema, text_of
from verifier_svc.sampling.allowed_tokens import ENDED
from verifier_svc.sampling.grammar import Matcher, Vocabulary, compile_grammar
from verifier_svc.sampling.verify import SamplingState, WalkResult, followed, sample_and_walk

GRAMMARS = {
    "schema": RECORD,
    "array": schema({"type": "array", "items": {"enum": ["a", "ab", 12, None, True]}, "minItems": 1, "maxItems": 4}),
    "regex": regex(r"(ab|cd){2,3}(1[0-9]*)?"),
    "open end": regex(r"[a-f]+"),
    "alternatives": regex("true|false|null|xyz"),
}


def fake_logits(tokens: tuple[int, ...]) -> np.ndarray:
    """Return float32 [VOCAB] that depends only on all tokens before; it likes to end."""
    rng = np.random.default_rng(zlib.crc32(bytes(tokens)))
    logits = (2.0 * rng.standard_normal(VOCAB)).astype(np.float32)
    logits[END] += 2.0
    return logits


@dataclass
class Text:
    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_token_id: int | None = None


def plain_text(params: SamplingParams, vocab: Vocabulary, choice_index: int = 0) -> Text:
    """Decode token by token with the reference sampler and a new matcher for each token."""
    assert params.grammar is not None
    text = Text()
    while text.finish is None:
        matcher = compile_grammar(params.grammar, vocab)
        if text.tokens:
            assert matcher.advance(text.tokens)
        stops = {*params.stop_token_ids} | (set() if params.ignore_eos else EOS)
        allowed = set(np.flatnonzero(np.unpackbits(matcher.allowed, bitorder="little")).tolist())
        if not allowed:
            assert matcher.is_accepting
            text.finish = FinishReason.STOP
            break
        if len(text.tokens) == params.max_tokens:
            text.finish = FinishReason.LENGTH
            break
        token = sample_reference(
            fake_logits((*PROMPT, *text.tokens)),
            params,
            prompt_ids=PROMPT,
            output_ids=text.tokens,
            eos_ids=EOS,
            choice_index=choice_index,
            vocab_limit=VOCAB,
            allowed_ids=allowed | stops if matcher.is_accepting else allowed,
        )
        if token in stops:
            text.finish, text.stop_token_id = FinishReason.STOP, token
            break
        text.tokens.append(token)
    return text


def draft(rng: np.random.Generator, known: list[int], right: list[int]) -> DraftTree:
    """Return a tree of up to 7 drafted nodes: right tokens, wrong ones and siblings at random."""
    tokens, parents, rights = [known[-1]], [-1], [0]
    while len(tokens) < int(rng.integers(1, 9)):
        on_path = rng.random() < 0.7
        parent = rights[-1] if on_path else int(rng.integers(len(tokens)))
        is_right = on_path and rng.random() < 0.8 and len(rights) <= len(right)
        tokens.append(right[len(rights) - 1] if is_right else int(rng.integers(VOCAB)))
        parents.append(parent)
        if is_right:
            rights.append(len(tokens) - 1)
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32))


def node_paths(tree: DraftTree) -> list[list[int]]:
    paths: list[list[int]] = [[]]
    for node in range(1, tree.num_nodes):
        paths.append([*paths[tree.parents[node]], int(tree.tokens[node])])
    return paths


def drafted_text(
    params: SamplingParams,
    template: Matcher,
    right: list[int],
    seed: int,
    choice_index: int = 0,
    resumed: int = 0,
    *,
    binds_late: bool = False,
) -> tuple[Text, int]:
    """Decode with random trees after ``resumed`` tokens of ``right``; count accepted drafts.

    ``binds_late``: each tree's masks are known before it is walked, as for a GPU.
    """
    rng = np.random.default_rng(seed)
    text, accepted = Text(right[:resumed]), 0
    matcher = template.anew()
    if binds_late:
        matcher.look_ahead()
    assert not resumed or matcher.advance(text.tokens)
    state = SamplingState(
        params, PROMPT, text.tokens, eos_ids=EOS, choice_index=choice_index, vocab_limit=VOCAB, matcher=matcher
    )
    while text.finish is None:
        tree = draft(rng, [*PROMPT, *text.tokens], right[len(text.tokens) :])
        logits = np.stack([fake_logits((*PROMPT, *text.tokens, *path)) for path in node_paths(tree)])
        room = params.max_tokens - len(text.tokens)
        if binds_late:
            bare = replace(params, grammar=None)
            other = SamplingState(bare, PROMPT, text.tokens, eos_ids=EOS, choice_index=choice_index, vocab_limit=VOCAB)
            masks = state.tree_masks(tree.tokens, tree.parents)
            walk = WalkResult([], [], [], FinishReason.STOP, None, [], 0, [])
            if masks is not ENDED:
                walk = sample_and_walk(logits, give(other, tree, masks), other, len(PROMPT), len(text.tokens), room)
            result = followed(state, walk)
        else:
            result = sample_and_walk(logits, tree, state, len(PROMPT), len(text.tokens), room)
        assert result.error is None
        text.tokens += result.tokens
        text.finish, text.stop_token_id = result.finish, result.stop_token_id
        accepted += len(result.accepted_nodes)
    return text, accepted


@pytest.mark.slow
@settings(max_examples=120)
@given(data=st.data())
def test_every_trees_text_is_plain_decodes(vocab: Vocabulary, data: st.DataObject) -> None:
    grammar = data.draw(st.sampled_from(list(GRAMMARS.values())))
    params = SamplingParams(
        temperature=data.draw(st.sampled_from([0.0, 0.7, 1.0, 2.0])),
        seed=data.draw(st.integers(0, 2**31)),
        max_tokens=data.draw(st.sampled_from([1, 3, 8, 40, 80])),
        presence_penalty=data.draw(st.sampled_from([0.0, 1.5])),
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.3])),
        logit_bias=data.draw(st.sampled_from([{}, {2: 50.0, END: -3.0}])),
        top_k=data.draw(st.sampled_from([0, 1, 3])),
        top_p=data.draw(st.sampled_from([1.0, 0.7])),
        min_p=data.draw(st.sampled_from([0.0, 0.2])),
        ignore_eos=data.draw(st.booleans()),
        grammar=grammar,
    )
    choice = data.draw(st.integers(0, 1))
    want = plain_text(params, vocab, choice)
    template = compile_grammar(grammar, vocab)
    binds_late = data.draw(st.booleans())
    got, _ = drafted_text(params, template, want.tokens, data.draw(st.integers(0, 99)), choice, binds_late=binds_late)
    assert got == want
    if want.tokens and len(want.tokens) < params.max_tokens:
        cut = data.draw(st.integers(1, len(want.tokens)))
        rest, _ = drafted_text(params, template, want.tokens, 1, choice, resumed=cut, binds_late=binds_late)
        assert rest == want


@pytest.mark.parametrize("temperature", [0.0, 1.0, *(pytest.param(t, marks=pytest.mark.slow) for t in (0.7, 2.0))])
@pytest.mark.parametrize("name", GRAMMARS)
def test_outputs_are_whole_texts_of_their_grammar(vocab: Vocabulary, name: str, temperature: float) -> None:
    grammar = GRAMMARS[name]
    template = compile_grammar(grammar, vocab)
    num_accepted = num_whole = 0
    for seed in range(12):
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=150, grammar=grammar)
        if temperature == 0:
            params = replace(params, logit_bias={5 + seed: 1.0})
        want = plain_text(params, vocab)
        got, accepted = drafted_text(params, template, want.tokens, seed)
        assert got == want
        num_accepted += accepted
        if got.finish is FinishReason.STOP:
            num_whole += 1
            assert_whole(name, text_of(got.tokens))
    assert num_whole >= 6, "too few outputs came to their end"
    assert num_accepted > 0


def assert_whole(name: str, text: str) -> None:
    grammar = GRAMMARS[name]
    if grammar.kind == "regex":
        assert re.fullmatch(grammar.text, text)
    elif name == "schema":
        Record.model_validate_json(text)
        # Nothing after the value, white space neither.
        assert text.endswith("}")
    else:
        values = json.loads(text)
        assert 1 <= len(values) <= 4 and all(value in ("a", "ab", 12, None, True) for value in values)
