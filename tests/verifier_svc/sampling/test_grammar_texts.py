"""Grammars in the sampler: which tokens may follow, where an output ends, text with any tree."""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from foretoken import limits
from foretoken.errors import InvalidRequestError, ModelOutputError
from foretoken.logits import sample_reference
from foretoken.results import FinishReason
from foretoken.sampling import Grammar, SamplingParams
from foretoken.tree import DraftTree
from tests.support.given_masks import give
from tests.support.grammars import END, VOCAB, ids_of, regex, schema, text_of, vocabulary
from verifier_svc.sampling.allowed_tokens import ENDED
from verifier_svc.sampling.grammar import Matcher, Vocabulary, bits_of, compile_grammar
from verifier_svc.sampling.verify import SamplingState, WalkResult, followed, sample_and_walk

EOS = frozenset({END})
PROMPT = (3, 1, 4)


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    x: bool
    y: int = Field(ge=0, le=999)


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    a: int = Field(ge=-99, le=99)
    b: list[Inner] = Field(max_length=2)
    c: str = Field(pattern="^[a-f]{1,4}$")


RECORD = schema(Record.model_json_schema())
GRAMMARS = {
    "schema": RECORD,
    "array": schema({"type": "array", "items": {"enum": ["a", "ab", 12, None, True]}, "minItems": 1, "maxItems": 4}),
    "regex": regex(r"(ab|cd){2,3}(1[0-9]*)?"),
    "open end": regex(r"[a-f]+"),
    "alternatives": regex("true|false|null|xyz"),
}


@pytest.fixture(scope="module")
def vocab(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return vocabulary(tmp_path_factory.mktemp("vocabulary"))


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
    return sample_and_walk(logits, tree or DraftTree.root_only(1), state, 1, (), max_new_tokens)


def chain(*texts: str) -> DraftTree:
    tokens = ids_of(*texts)
    return DraftTree(np.array([1, *tokens], np.int32), np.arange(-1, len(tokens), dtype=np.int32))


# --- Where an output ends.


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
        result = sample_and_walk(peaks(best[len(output)]), root, state, 1, output, room - len(output))
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


# --- The same text, whatever was drafted.


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
                walk = sample_and_walk(logits, give(other, tree, masks), other, len(PROMPT), text.tokens, room)
            result = followed(state, walk)
        else:
            result = sample_and_walk(logits, tree, state, len(PROMPT), text.tokens, room)
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


# --- The mask's place among the operations.


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


# --- Vocabularies.


EBNF = """
# Three pairs at most.
root ::= pair{1,3} ("12" | tail)
pair ::= "ab" | "cd"
tail ::= [0-9]+ "x"?
"""


@pytest.mark.parametrize(
    "text", [EBNF, 'start: PAIR{1,3} ("12" | TAIL)\nPAIR: "ab" | "cd"\nTAIL: /[0-9]+x?/\n'], ids=["EBNF", "Lark"]
)
def test_a_grammar_may_be_ebnf_or_lark(vocab: Vocabulary, text: str) -> None:
    for tokens, ends in ((("ab", "cd", "12"), True), (("a", "b", "9", "x"), True), (("ab", "cd"), False)):
        matcher = compile_grammar(Grammar("lark", text), vocab)
        assert matcher.advance(ids_of(*tokens)) and matcher.is_accepting is ends
    for tokens in (("c", "c"), ("12",), ("ab", "ab", "ab", "ab")):
        assert not compile_grammar(Grammar("lark", text), vocab).advance(ids_of(*tokens))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('rule ::= "a"', "No 'root' rule"),
        ("root ::= other", "'other' not found"),
        ('root ::= "a', "end of input"),
        ("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "nested too deeply"),
        ('root ::= "' + "a" * limits.MAX_EBNF_BYTES + '"', "at most"),
        ("nothing", "cannot be used"),
    ],
)
def test_an_unusable_grammar_is_refused_with_the_reason(vocab: Vocabulary, text: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(reason)) as caught:
        compile_grammar(Grammar("lark", text), vocab)
    assert caught.value.field == "lark"


@pytest.mark.parametrize(
    ("schema", "reason"), [('{"type": "foo"}', "Invalid type: foo"), ('{"pattern": "("}', "unclosed group")]
)
def test_a_bad_schema_in_a_grammar_is_named_by_its_place_alone(vocab: Vocabulary, schema: str, reason: str) -> None:
    text = f'start: "a" value\nvalue: %json {schema}\nMORE: "b"\n'
    with pytest.raises(InvalidRequestError) as caught:
        compile_grammar(Grammar("lark", text), vocab)
    assert re.fullmatch(
        rf"the grammar cannot be used: at 2\(\d+\): failed to compile JSON schema: {reason}", caught.value.message
    )


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
        output += sample_and_walk(row, DraftTree.root_only(1), state, len(PROMPT), output, 9).tokens
    assert text_of(output) == expected and state.is_complete and state.error is None


def test_masks_that_leave_nothing_of_a_grammar_name_it(vocab: Vocabulary) -> None:
    params = SamplingParams(temperature=0.0, allowed_token_ids=tuple(ids_of("12")), grammar=regex("(ab|cd){3}"))
    assert params.grammar is not None
    matcher = compile_grammar(params.grammar, vocab)
    state = SamplingState(params, PROMPT, eos_ids=EOS, choice_index=0, matcher=matcher)
    assert isinstance(state.error, InvalidRequestError) and "the other fields" in state.error.message


def test_special_tokens_are_no_text(vocab: Vocabulary) -> None:
    allowed = np.unpackbits(compile_grammar(regex("(?s).*"), vocab).allowed, bitorder="little")
    assert allowed.sum() == VOCAB - 1 and not allowed[END]


def test_ids_from_the_limit_on_are_never_allowed(tmp_path: Path, vocab: Vocabulary) -> None:
    short = Vocabulary(vocab.path.parent, vocab_limit=43, eos_ids=frozenset({END, 45}))
    allowed = np.unpackbits(compile_grammar(regex("(?s).*"), short).allowed, bitorder="little")
    assert len(allowed) == 48 and allowed.sum() == 42 and not allowed[43:].any()


def test_byte_fallback_tokens_are_bytes(tmp_path: Path) -> None:
    """SentencePiece writes U+2581 for spaces, and byte names for text without a token."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁ab", "ab", "é"]
    backend = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    model = Vocabulary(tmp_path, vocab_limit=len(pieces), eos_ids=frozenset({1}))
    matcher = compile_grammar(regex("x( ab|é)?"), model)
    allowed = np.flatnonzero(np.unpackbits(matcher.allowed, bitorder="little"))
    assert allowed.tolist() == [2 + ord("x")]
    assert matcher.advance((2 + ord("x"),)) and matcher.is_accepting
    allowed = np.flatnonzero(np.unpackbits(matcher.allowed, bitorder="little"))
    assert [pieces[token_id] for token_id in allowed] == ["<0x20>", "<0xC3>", "▁", "▁ab", "é"]
    assert matcher.advance((2 + 0xC3, 2 + 0xA9)) and matcher.is_accepting and not matcher.allowed.any()


def test_a_model_without_a_usable_tokenizer_serves_no_grammar(tmp_path: Path, vocab: Vocabulary) -> None:
    with pytest.raises(InvalidRequestError, match="needs a tokenizer"):
        Vocabulary(tmp_path, vocab_limit=8, eos_ids=EOS)
    with pytest.raises(InvalidRequestError, match="knows all"):
        Vocabulary(vocab.path.parent, vocab_limit=VOCAB + 1, eos_ids=EOS)
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InvalidRequestError, match="cannot use"):
        Vocabulary(tmp_path, vocab_limit=8, eos_ids=EOS)
