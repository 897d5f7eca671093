"""Sample, then walk: literal trees; every tree's text is plain decode's, whatever the sampling."""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax

from foretoken.errors import InvalidRequestError, ModelOutputError
from foretoken.results import FinishReason, TokenLogprobs
from foretoken.sampling import SamplingParams
from foretoken.tree import DraftTree
from tests.references.logits import sample_reference
from verifier_svc.sampling.verify import SamplingState, WalkResult, sample_and_walk, token_logprobs, warm_up

GREEDY = SamplingParams(temperature=0.0, max_tokens=100)
NO_EOS: frozenset[int] = frozenset()


def peaks(*best: int, vocab_size: int = 8) -> np.ndarray:
    """Return float32 [rows, vocab]: one row for each given token, which is its best."""
    return np.eye(vocab_size, dtype=np.float32)[list(best)]


def tree_of(tokens: list[int], parents: list[int]) -> DraftTree:
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32))


def walk(
    logits: np.ndarray,
    tree: DraftTree,
    params: SamplingParams = GREEDY,
    *,
    eos_ids: frozenset[int] = NO_EOS,
    max_new_tokens: int = 100,
    source: int = 1,
) -> WalkResult:
    """Sample and walk one step after the prompt, whose one token is the root."""
    prompt = (int(tree.tokens[0]),)
    state = SamplingState(params, prompt, eos_ids=eos_ids, choice_index=0)
    return sample_and_walk(logits, tree, state, 1, 0, max_new_tokens, sources=[0] + [source] * (tree.num_nodes - 1))


# --- Literal walks.
#
#        0:t0            node:token
#       /    \
#     1:t3   2:t4
#    /   \      \
#  3:t5  4:t6   5:t7
TREE = tree_of([0, 3, 4, 5, 6, 7], [-1, 0, 0, 1, 1, 2])


def test_walk_follows_the_child_that_holds_the_sampled_token():
    result = walk(peaks(3, 6, 7, 1, 2, 1), TREE, source=4)
    assert result == WalkResult([3, 6, 2], [1, 4], [4, 4, 0], None, None, [], 3, [1, 4])


def test_walk_takes_the_other_branch():
    result = walk(peaks(4, 5, 7, 1, 2, 1), TREE)
    assert (result.tokens, result.accepted_nodes, result.sources) == ([4, 7, 1], [2, 5], [1, 1, 0])


def test_walk_stops_where_no_child_holds_the_token():
    # Token 7 is in the tree, but below node 2, not below node 1.
    result = walk(peaks(3, 7, 7, 1, 2, 1), TREE)
    assert (result.tokens, result.accepted_nodes, result.num_walked_tokens) == ([3, 7], [1], 2)


def test_everything_refused_still_gives_one_token():
    result = walk(peaks(1, 6, 7, 1, 2, 1), TREE)
    assert (result.tokens, result.accepted_nodes, result.sources) == ([1], [], [0])


def test_plain_decode_is_a_tree_with_only_a_root():
    result = walk(peaks(5), DraftTree.root_only(2))
    assert result == WalkResult([5], [], [0], None, None, [], 1, [])


def test_of_siblings_with_one_token_the_lowest_index_is_taken():
    result = walk(peaks(3, 1, 2), tree_of([0, 3, 3], [-1, 0, 0]))
    assert (result.tokens, result.accepted_nodes) == ([3, 1], [1])


def test_rows_off_the_path_are_never_looked_at():
    logits = peaks(4, 5, 7, 1, 2, 1)
    logits[[1, 3, 4]] = np.nan
    assert walk(logits, TREE).tokens == [4, 7, 1]


@pytest.mark.parametrize("fault", [np.nan, np.inf])
@pytest.mark.parametrize("params", [GREEDY, replace(GREEDY, temperature=0.5, logprobs=1)])
def test_a_broken_row_on_the_path_is_an_error_after_the_text(fault, params):
    logits = peaks(4, 5, 7, 1, 2, 1) * 100
    logits[2, 0] = fault
    result = walk(logits, TREE, params)
    assert (result.tokens, result.accepted_nodes, result.finish) == ([4], [2], None)
    assert isinstance(result.error, ModelOutputError) and "NaN" in result.error.message
    # Nothing is missing where the output ends before it.
    whole = walk(logits, TREE, params, max_new_tokens=1)
    assert (whole.tokens, whole.finish, whole.error) == ([4], FinishReason.LENGTH, None)


def test_logprobs_of_a_broken_row_are_no_numbers():
    rows = np.zeros((4, 8), np.float32)
    rows[0, 3], rows[1, 3], rows[2] = np.nan, np.inf, -np.inf
    found = [entry.logprob for entry in token_logprobs(rows, [1, 1, 1, 1], 0)]
    assert np.isnan(found).tolist() == [True, True, True, False]


def test_a_stop_token_ends_the_output_and_is_not_in_it():
    for eos_ids, params in ((frozenset({6}), GREEDY), (NO_EOS, replace(GREEDY, stop_token_ids=(6,)))):
        result = walk(peaks(3, 6, 7, 1, 2, 1), TREE, params, eos_ids=eos_ids)
        # Node 4 held the stop token: a good draft, but nobody needs its KV entry.
        assert result == WalkResult([3], [1], [1], FinishReason.STOP, 6, [], 2, [1, 4])


def test_a_stop_token_from_the_target_alone_ends_the_output():
    result = walk(peaks(3, 6, 7, 1, 2, 1), TREE, eos_ids=frozenset({2}))
    assert result == WalkResult([3, 6], [1, 4], [1, 1], FinishReason.STOP, 2, [], 3, [1, 4])
    assert walk(peaks(5), DraftTree.root_only(2), eos_ids=frozenset({5})).tokens == []


def test_ignored_eos_is_emitted():
    result = walk(peaks(3, 6, 7, 1, 2, 1), TREE, replace(GREEDY, ignore_eos=True), eos_ids=frozenset({6}))
    assert (result.tokens, result.finish) == ([3, 6, 2], None)


@pytest.mark.parametrize(
    "max_new_tokens, tokens, accepted, finish",
    [
        (1, [3], [1], FinishReason.LENGTH),
        (2, [3, 6], [1, 4], FinishReason.LENGTH),
        (3, [3, 6, 2], [1, 4], FinishReason.LENGTH),
        (4, [3, 6, 2], [1, 4], None),
    ],
)
def test_the_lengths_end_cuts_the_walk(max_new_tokens, tokens, accepted, finish):
    result = walk(peaks(3, 6, 7, 1, 2, 1), TREE, max_new_tokens=max_new_tokens)
    assert (result.tokens, result.accepted_nodes, result.finish) == (tokens, accepted, finish)
    assert (result.num_walked_tokens, len(result.matched_nodes)) == (3, 2), "counted before trimming"
    assert result.sources == [1] * len(accepted) + [0] * (len(tokens) - len(accepted))


def test_length_wins_over_a_later_stop_token():
    cut = walk(peaks(3, 6, 7, 1, 2, 1), TREE, eos_ids=frozenset({2}), max_new_tokens=2)
    assert (cut.tokens, cut.finish, cut.stop_token_id) == ([3, 6], FinishReason.LENGTH, None)
    stopped = walk(peaks(3, 6, 7, 1, 2, 1), TREE, eos_ids=frozenset({6}), max_new_tokens=2)
    assert (stopped.tokens, stopped.finish, stopped.stop_token_id) == ([3], FinishReason.STOP, 6)


def test_min_tokens_counts_the_tokens_on_the_path():
    # EOS is best everywhere and 3 second best: the first two rows may not take it.
    logits = np.tile(np.array([0, 0, 0, 1, 0, 2], np.float32), (4, 1))
    params = replace(GREEDY, min_tokens=2)
    result = walk(logits, DraftTree.chain([0, 3, 3, 3]), params, eos_ids=frozenset({5}))
    assert (result.tokens, result.finish) == ([3, 3], FinishReason.STOP)


@pytest.mark.parametrize(
    "penalty", [{"presence_penalty": 1.0}, {"frequency_penalty": 1.0}, {"repetition_penalty": 2.0}], ids=str
)
def test_penalties_count_the_ancestors_in_the_tree(penalty):
    # The same row everywhere: token 1 is best until it was sampled once. Node 1 holds it, so
    # node 1's row is penalized.
    logits = np.tile(np.array([0, 2, 1.5, 0], np.float32), (3, 1))
    result = walk(logits, DraftTree.chain([0, 1, 1]), replace(GREEDY, **penalty))
    assert (result.tokens, result.accepted_nodes) == ([1, 2], [1])


def test_penalties_do_not_count_what_was_drafted_beside_the_path():
    # Siblings 1 and 2: token 2 was drafted, not sampled, and must not be penalized.
    logits = np.tile(np.array([0, 2, 1.5, 1.4], np.float32), (3, 1))
    result = walk(logits, tree_of([0, 1, 2], [-1, 0, 0]), replace(GREEDY, presence_penalty=1.0))
    assert result.tokens == [1, 2]


# --- Noise: its key.


FLAT = np.zeros(64, np.float32)


def sampled_text(*, choice_index: int = 0, seed: int = 5, prompt: tuple[int, ...] = (0,), steps: int = 40) -> list[int]:
    state = SamplingState(SamplingParams(seed=seed), prompt, eos_ids=NO_EOS, choice_index=choice_index)
    output: list[int] = []
    for _ in range(steps):
        root = DraftTree.root_only(0)
        output += sample_and_walk(FLAT[None], root, state, len(prompt), len(output), 99).tokens
    return output


def test_two_choices_never_share_noise():
    texts = [sampled_text(choice_index=choice) for choice in range(4)]
    for first in range(4):
        for second in range(first):
            shared = sum(a == b for a, b in zip(texts[first], texts[second], strict=True))
            assert shared < 5, "64 equal tokens meet by chance once in 64"


def test_noise_is_keyed_by_position_not_by_step():
    plain = sampled_text(steps=12)
    state = SamplingState(SamplingParams(seed=5), (0,), eos_ids=NO_EOS, choice_index=0)
    output: list[int] = []
    sizes = []
    # Right drafts of three, none, and six tokens: the steps differ, the text does not.
    for num_drafted in (3, 0, 6):
        drafts = plain[len(output) : len(output) + num_drafted]
        tree = DraftTree.chain([output[-1] if output else 0, *drafts])
        result = sample_and_walk(np.tile(FLAT, (1 + num_drafted, 1)), tree, state, 1, len(output), 99)
        output += result.tokens
        sizes.append(len(result.tokens))
    assert sizes == [4, 1, 7]
    assert output == plain


def test_noise_is_keyed_by_the_position_in_prompt_and_output():
    whole = sampled_text(steps=20)
    # Ten tokens of prompt more, ten of output less: the same positions.
    assert sampled_text(prompt=(0, *whole[:10]), steps=10) == whole[10:]


def test_noise_changes_with_the_seed():
    assert sampled_text(seed=6) != sampled_text(seed=5)


@pytest.mark.parametrize("masks", [{}, {"bad_token_ids": ((3, 5), (0, 1, 2), (7, 6, 5, 1), (2,))}])
def test_a_resumed_sequence_goes_on_as_if_nothing_had_happened(masks):
    params = SamplingParams(seed=3, presence_penalty=0.7, repetition_penalty=1.3, frequency_penalty=0.2, min_tokens=8)
    params = replace(params, **masks)
    prompt, eos_ids = (1, 2), frozenset({4})

    def run(state: SamplingState, output: list[int], until: int) -> list[int]:
        output = list(output)
        while len(output) < until:
            logits = fake_logits((*prompt, *output))[None]
            output += sample_and_walk(
                logits, DraftTree.root_only(output[-1] if output else 2), state, 2, len(output), 9
            ).tokens
        return output

    whole = run(SamplingState(params, prompt, eos_ids=eos_ids, choice_index=1), [], 8)
    for kept in range(8):
        resumed = SamplingState(params, prompt, whole[:kept], eos_ids=eos_ids, choice_index=1)
        assert run(resumed, whole[:kept], 8) == whole


def test_a_bad_sequence_depends_on_the_tokens_of_its_path():
    # Token 6 would complete 3 6 after node 1, but not after node 2.
    params = replace(GREEDY, bad_token_ids=((3, 6),))
    rows = peaks(3, 6, 6, 7, 1, 1) + 0.5 * peaks(4, 5, 5, 1, 2, 2)
    assert walk(rows, TREE, params).tokens == [3, 5, 7]
    assert walk(np.concatenate([peaks(4), rows[1:]]), TREE, params).tokens == [4, 6]


def test_the_prompt_is_no_part_of_a_bad_sequence():
    rows = peaks(3, 3)
    assert walk(rows, tree_of([5, 3], [-1, 0]), replace(GREEDY, bad_token_ids=((5, 3),))).tokens == [3, 3]


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (replace(GREEDY, allowed_token_ids=(6,), min_tokens=3), "allowed_token_ids"),
        (replace(GREEDY, bad_token_ids=tuple((token,) for token in range(8))), "bad_words"),
    ],
)
def test_masks_that_leave_no_token_end_the_output_with_the_field(params, field):
    result = walk(peaks(3), DraftTree.root_only(0), params, eos_ids=frozenset({6}))
    assert isinstance(result.error, InvalidRequestError) and result.error.field == field
    assert result.tokens == [] and result.finish is None


def test_a_state_that_missed_output_is_refused():
    state = SamplingState(GREEDY, (0,), eos_ids=NO_EOS, choice_index=0)
    with pytest.raises(AssertionError, match="has not seen"):
        sample_and_walk(FLAT[None], DraftTree.root_only(1), state, 1, 1, 9)


# --- Logprobs.


def test_logprobs_are_of_the_raw_logits_and_one_per_emitted_token():
    params = replace(GREEDY, logprobs=2, logit_bias={5: 50.0}, stop_token_ids=(6,))
    logits = np.log(np.array([[0.5, 0.25, 0.125, 0.0625, 0.03, 0.0325, 1e-9, 1e-9]], np.float32)).repeat(2, 0)
    logits[1, 6] = 90.0
    result = walk(logits, DraftTree.chain([0, 5]), params)
    assert (result.tokens, result.finish) == ([5], FinishReason.STOP)
    (logprob,) = result.logprobs
    assert (logprob.token_id, logprob.rank) == (5, 5)
    assert logprob.logprob == pytest.approx(np.log(0.0325), abs=1e-6)
    assert [token for token, _ in logprob.top] == [0, 1]
    assert [value for _, value in logprob.top] == pytest.approx(np.log([0.5, 0.25]), abs=1e-6)


def test_of_equal_logits_the_lower_id_ranks_first():
    (logprob,) = token_logprobs(np.array([[1, 3, 3, 2, 3]], np.float32), [4], 4)
    assert logprob.rank == 3
    assert [token for token, _ in logprob.top] == [1, 2, 4, 3]


def test_logprobs_of_none_and_of_more_than_there_are():
    row = np.array([[0, 1]], np.float32)
    assert walk(row, DraftTree.root_only(0)).logprobs == []
    assert token_logprobs(row, [0], 0)[0].top == ()
    assert [token for token, _ in token_logprobs(row, [0], 20)[0].top] == [1, 0]


@settings(max_examples=200)
@given(
    st.lists(st.lists(st.floats(-50, 50, width=32), min_size=5, max_size=5), min_size=1, max_size=4),
    st.integers(0, 5),
    st.integers(0, 4),
)
def test_logprobs_are_those_of_a_log_softmax(rows, top_k, token_id):
    logits = np.array(rows, np.float32)
    results = token_logprobs(logits, [token_id] * len(rows), top_k)
    for row, result in zip(logits, results, strict=True):
        expected = log_softmax(row.astype(np.float64))
        order = sorted(range(5), key=lambda i: (-row[i], i))
        assert result.logprob == pytest.approx(expected[token_id], abs=1e-9)
        assert order[result.rank - 1] == token_id
        assert [token for token, _ in result.top] == order[:top_k]
        assert [value for _, value in result.top] == pytest.approx(expected[order[:top_k]], abs=1e-9)


def test_a_rows_logprobs_do_not_depend_on_the_rows_beside_it():
    logits = np.random.default_rng(0).standard_normal((16, 1000)).astype(np.float32)
    together = token_logprobs(logits, list(range(16)), 3)
    for index in range(16):
        assert token_logprobs(logits[index : index + 1], [index], 3) == [together[index]]


# --- Every tree's text is that of plain decode.


VOCAB = 10
VOCAB_LIMIT = 9
EOS = 4


@lru_cache(maxsize=200_000)
def fake_logits(tokens: tuple[int, ...]) -> np.ndarray:
    """Return float32 [VOCAB] that depends on every token before, and on nothing else."""
    rng = np.random.default_rng(zlib.crc32(bytes(tokens)))
    logits = (2.0 * rng.standard_normal(VOCAB)).astype(np.float32)
    # A padded head: the last id is not the tokenizer's and would often win.
    logits[VOCAB_LIMIT:] += 2.0
    return logits


@dataclass
class Text:
    """The text as a client would get it."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_token_id: int | None = None


def plain_text(params: SamplingParams, prompt: tuple[int, ...], choice_index: int, context: int) -> Text:
    """Decode token by token with the reference sampler and separate rules for the output's end."""
    text = Text()
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    while text.finish is None:
        logits = fake_logits((*prompt, *text.tokens))
        token = sample_reference(
            logits,
            params,
            prompt_ids=prompt,
            output_ids=text.tokens,
            eos_ids=frozenset({EOS}),
            choice_index=choice_index,
            vocab_limit=VOCAB_LIMIT,
        )
        if token in stops:
            text.finish, text.stop_token_id = FinishReason.STOP, token
            break
        text.tokens.append(token)
        if params.logprobs is not None:
            text.logprobs += token_logprobs(logits[None], [token], params.logprobs)
        if len(text.tokens) == params.max_tokens or len(prompt) + len(text.tokens) == context:
            text.finish = FinishReason.LENGTH
    return text


def random_tree(rng: np.random.Generator, root: int, ahead: list[int]) -> DraftTree:
    """Return a tree of right, wrong, doubled and stop tokens; ``ahead`` is plain decode's text."""
    tokens, parents, depth = [root], [-1], [0]
    for _ in range(int(rng.integers(0, 9))):
        parent = len(tokens) - 1 if rng.random() < 0.6 else int(rng.integers(0, len(tokens)))
        right = depth[parent] < len(ahead) and rng.random() < 0.8
        tokens.append(ahead[depth[parent]] if right else int(rng.integers(0, VOCAB)))
        parents.append(parent)
        depth.append(depth[parent] + 1)
    return tree_of(tokens, parents)


def tree_logits(prefix: tuple[int, ...], tree: DraftTree) -> np.ndarray:
    """Return the fake model's float32 [num_nodes, VOCAB]; ``prefix`` ends with the root."""
    paths = [prefix]
    for node in range(1, tree.num_nodes):
        paths.append((*paths[tree.parents[node]], int(tree.tokens[node])))
    return np.stack([fake_logits(path) for path in paths])


def speculative_text(
    params: SamplingParams,
    prompt: tuple[int, ...],
    choice_index: int,
    context: int,
    *,
    rng: np.random.Generator,
    oracle: Text,
    seen: Counter[str],
) -> Text:
    text = Text()
    end = [] if oracle.stop_token_id is None else [oracle.stop_token_id]
    state = SamplingState(params, prompt, eos_ids=frozenset({EOS}), choice_index=choice_index, vocab_limit=VOCAB_LIMIT)
    while text.finish is None:
        known = (*prompt, *text.tokens)
        tree = random_tree(rng, known[-1], [*oracle.tokens, *end][len(text.tokens) :])
        left = min(params.max_tokens - len(text.tokens), context - len(known))
        result = sample_and_walk(tree_logits(known, tree), tree, state, len(prompt), len(text.tokens), left)
        assert [int(tree.tokens[node]) for node in result.accepted_nodes] == result.tokens[: len(result.accepted_nodes)]
        assert result.sources == [int(i < len(result.accepted_nodes)) for i in range(len(result.tokens))]
        seen["accepted run"] += len(result.accepted_nodes) >= 2
        seen["refused"] += len(result.matched_nodes) < tree.num_speculative_tokens
        seen["drafted stop"] += result.finish is FinishReason.STOP and len(result.matched_nodes) > len(result.tokens)
        seen["cut"] += result.finish is FinishReason.LENGTH and result.num_walked_tokens > len(result.tokens)
        text.tokens += result.tokens
        text.logprobs += result.logprobs
        text.finish, text.stop_token_id = result.finish, result.stop_token_id
    return text


REQUESTS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=12),
    "sampled": SamplingParams(max_tokens=12),
    "cool": SamplingParams(temperature=0.7, max_tokens=12),
    "greedy with penalties": SamplingParams(
        temperature=0.0, max_tokens=16, presence_penalty=0.8, frequency_penalty=0.4, repetition_penalty=1.2
    ),
    "filters": SamplingParams(max_tokens=12, top_k=5, top_p=0.8, min_p=0.05),
    "logprobs": SamplingParams(max_tokens=12, logprobs=3),
    "min tokens": SamplingParams(max_tokens=12, min_tokens=6, stop_token_ids=(2, 7)),
    "ignored eos": SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=(7,)),
    "bias": SamplingParams(max_tokens=12, logit_bias={1: 2.0, 3: -100.0, VOCAB_LIMIT: 100.0}),
    "allowed tokens": SamplingParams(max_tokens=12, allowed_token_ids=(0, 1, 2, 3, EOS, 6)),
    "bad words": SamplingParams(
        max_tokens=12,
        temperature=0.4,
        bad_token_ids=((3,), (1, 2), (1, 6), (2, 0, 2), (7, 7), *((token, 8) for token in range(9))),
    ),
    "masks and penalties": SamplingParams(
        max_tokens=12,
        min_tokens=4,
        temperature=0.0,
        frequency_penalty=0.3,
        allowed_token_ids=(0, 1, 2, 3, EOS, 6),
        bad_token_ids=((0, 1), (1, 0), (6, 6, 6)),
    ),
    "one token": SamplingParams(max_tokens=1),
    "everything": SamplingParams(
        temperature=0.9,
        top_p=0.95,
        top_k=7,
        min_p=0.01,
        presence_penalty=0.5,
        frequency_penalty=-0.3,
        repetition_penalty=0.9,
        logit_bias={EOS: 1.0},
        max_tokens=14,
        min_tokens=3,
        stop_token_ids=(0,),
        logprobs=0,
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_speculative_text_is_plain_text(name):
    seen: Counter[str] = Counter()
    for seed in range(60):
        rng = np.random.default_rng(seed)
        params = replace(REQUESTS[name], seed=seed * 7919)
        prompt = tuple(int(token) for token in rng.integers(0, VOCAB_LIMIT, rng.integers(1, 5)))
        choice_index, context = seed % 3, int(rng.choice([9, 40]))
        plain = plain_text(params, prompt, choice_index, context)
        drafted = speculative_text(params, prompt, choice_index, context, rng=rng, oracle=plain, seen=seen)
        assert drafted == plain
        seen[str(plain.finish)] += 1
    assert seen["refused"] and seen["cut"] and seen[str(FinishReason.LENGTH)]
    if params.max_tokens > 1:
        assert seen["accepted run"] and seen["drafted stop"] and seen[str(FinishReason.STOP)]


@settings(max_examples=150)
@given(st.integers(0, 2**32), st.sampled_from(sorted(REQUESTS)))
def test_walking_lazily_is_sampling_every_node(seed, name):
    rng = np.random.default_rng(seed)
    params = replace(REQUESTS[name], seed=seed, max_tokens=100, min_tokens=0)
    prompt, eos_ids = (1, 2, 3), frozenset({EOS})
    oracle = plain_text(params, prompt, 0, 12)
    tree = random_tree(rng, 3, oracle.tokens)
    logits = tree_logits(prompt, tree)

    paths: list[list[int]] = [[]]
    for node in range(1, tree.num_nodes):
        paths.append([*paths[tree.parents[node]], int(tree.tokens[node])])
    everywhere = [
        sample_reference(
            logits[node], params, prompt_ids=prompt, output_ids=path, eos_ids=eos_ids, vocab_limit=VOCAB_LIMIT
        )
        for node, path in enumerate(paths)
    ]
    node, tokens = 0, []
    while True:
        token = everywhere[node]
        if (token == EOS and not params.ignore_eos) or token in params.stop_token_ids:
            break
        tokens.append(token)
        matching = [i for i in range(tree.num_nodes) if tree.parents[i] == node and tree.tokens[i] == token]
        if not matching:
            break
        node = matching[0]

    state = SamplingState(params, prompt, eos_ids=eos_ids, choice_index=0, vocab_limit=VOCAB_LIMIT)
    assert sample_and_walk(logits, tree, state, len(prompt), 0, 100).tokens == tokens


def test_warm_up_compiles_without_touching_anything():
    warm_up()
