"""Decide which tokens a verified tree commits: sample, then walk. Knows no tensors and no cache.

The plain sampler samples a node's row with noise keyed by position. The walk then goes to the child
that holds the sampled token, until no child does. So the tokens equal plain decode's, whatever was
drafted. The sampler runs only on the path's rows, since the walk cannot reach the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from foretoken_kernels.cpu.sample import NO_SAMPLE, RowRules, greedy_row, logprob_and_rank, sample_row, top_ids
from numpy.typing import NDArray

from foretoken.errors import ForetokenError, InvalidRequestError, ModelOutputError
from foretoken.results import FinishReason, TokenLogprobs
from foretoken.sampling import TOKEN_STREAM, SamplingParams, is_greedy, noise_key, stop_token_ids
from foretoken.tree import DraftTree
from verifier_svc.sampling.allowed_tokens import AllowedTokens, TreeMasks
from verifier_svc.sampling.grammar import Bits, Matcher

Float32 = NDArray[np.float32]
Int32 = NDArray[np.int32]

NO_GRAMMAR: Bits = np.empty(0, np.uint8)


class WalkResult(NamedTuple):
    """The tokens that one step commits for one sequence.

    Attributes:
        tokens: tokens to append to the output. A stop token is not part of the output.
        accepted_nodes: the path's nodes, without the root, whose tokens are committed: the first
            tokens, which were drafted. Keep their KV entries.
        sources: for each token, the drafter's number if it was drafted, 0 if only the target
            sampled it.
        finish: why the sequence ends here, or None. STOP only if a stop token comes before the
            length limit, or if the last token completes the grammar.
        stop_token_id: the stop token that ended the sequence, or None.
        logprobs: one entry for each token if the request asked for them.
        num_walked_tokens: tokens of this step before trimming, including the stop token and tokens
            past ``max_new_tokens``.
        matched_nodes: the nodes that hold the first of the walked tokens.
        error: why the sequence cannot go on after ``tokens``, or None.
    """

    tokens: list[int]
    accepted_nodes: list[int]
    sources: list[int]
    finish: FinishReason | None
    stop_token_id: int | None
    logprobs: list[TokenLogprobs]
    num_walked_tokens: int
    matched_nodes: list[int]
    error: ForetokenError | None = None


class _Path(NamedTuple):
    """A walk: the row of ``nodes[i]`` gave ``tokens[i]``; ``matched`` hold the first tokens."""

    tokens: list[int]
    nodes: list[int]
    matched: list[int]
    stopped: bool


class SamplingState:
    """One sequence's sampler: its compiled rules and the token counts of its penalties.

    It depends only on parameters, prompt and the output so far, so a resumed sequence continues
    exactly. ``sample_and_walk`` advances it by the sampled tokens. After a finish it cannot be
    used.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int] = (),
        *,
        eos_ids: frozenset[int],
        choice_index: int,
        vocab_limit: int | None = None,
        matcher: Matcher | None = None,
    ) -> None:
        """
        Args:
            vocab_limit: ids below this one may be sampled. None: all ids of a row.
            matcher: the grammar's state after the output so far. The sampler owns it.
        """
        self.params = params
        self.stop_ids = stop_token_ids(params, eos_ids)
        self.num_output_tokens = len(output_ids)
        self._prompt_ids = prompt_ids
        self._output_ids = list(output_ids)
        self._choice_index = choice_index
        self._vocab_limit = vocab_limit
        self._penalized = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)
        self._rules: RowRules | None = None
        # [vocab] once the first row is sampled, if there are penalties.
        self._output_counts = np.empty(0, np.int32)
        self._seen = np.empty(0, np.bool_)
        self._allowed: AllowedTokens | None = None
        self._row_error: ForetokenError | None = None
        if matcher is not None or vocab_limit is not None:
            self._allowed = AllowedTokens.of(params, output_ids, self.stop_ids, vocab_limit or 0, matcher)

    @property
    def is_complete(self) -> bool:
        """Return whether the output completes the grammar, and nothing may follow."""
        return self._allowed is not None and self._allowed.is_complete

    @property
    def error(self) -> ForetokenError | None:
        """Return why the output cannot go on; None if it can."""
        return self._row_error or (self._allowed.error if self._allowed is not None else None)

    @property
    def has_ended(self) -> bool:
        """Return whether sampling has ended: the grammar is complete, or cannot go on."""
        return self.is_complete or self.error is not None

    def sample(self, logits: Float32, position: int) -> int | None:
        """Sample the token at ``position`` from its raw logits [vocab], and count it as output.

        Returns None and sets ``error`` if the row holds NaN or +inf, or if no allowed token has a
        logit above -inf.

        ``position``: index in prompt + output.
        """
        if self._rules is None:
            self._rules = self._prepare(len(logits))
        rules = self._rules
        mask_stops = self.num_output_tokens < self.params.min_tokens and len(rules.stop_ids) > 0
        allowed = NO_GRAMMAR if self._allowed is None else self._allowed.bits
        if rules.temperature == 0 and not (mask_stops or self._penalized or len(rules.bias_ids) or len(allowed)):
            token = int(greedy_row(logits, rules.vocab_limit))
        else:
            token = int(sample_row(logits, rules, self._output_counts, self._seen, allowed, mask_stops, position))
        if token == NO_SAMPLE:
            self._row_error = self._no_sample_error(logits[: rules.vocab_limit])
            return None
        self._count(token)
        return token

    def follow(self, token_ids: Sequence[int]) -> int:
        """Count tokens as output that were sampled elsewhere, on a GPU.

        Returns how many of them plain decode would have written: sampling may end before the last.
        """
        for count, token in enumerate(token_ids, 1):
            self._count(token)
            if self.has_ended:
                return count
        return len(token_ids)

    def tree_masks(self, tokens: Int32, parents: Int32) -> TreeMasks:
        """Return what may follow each node of a draft tree; see AllowedTokens.of_tree.

        The request must have a grammar or token masks, and ``vocab_limit`` must be known.
        """
        assert self._allowed is not None
        return self._allowed.of_tree(tokens, parents, self.num_output_tokens)

    def _count(self, token: int) -> None:
        self.num_output_tokens += 1
        if self._allowed is not None:
            self._allowed.advance(token, self.num_output_tokens)
        if self._rules is None:
            self._output_ids.append(token)
        elif self._penalized:
            self._output_counts[token] += 1
            self._seen[token] = True

    def no_token_error(self) -> ForetokenError:
        """Return the error for sound logits in which no allowed token has one above -inf."""
        assert self._allowed is not None
        return self._allowed.no_token_error()

    def _no_sample_error(self, logits: Float32) -> ForetokenError:
        if self._allowed is None or not (logits < np.inf).all() or not (logits > -np.inf).any():
            return broken_logits()
        return self.no_token_error()

    def _prepare(self, vocab_size: int) -> RowRules:
        """Build the rules and counts, once the width of a row is known."""
        params = self.params
        vocab_limit = vocab_size if self._vocab_limit is None else min(self._vocab_limit, vocab_size)
        if self._penalized:
            self._output_counts = np.bincount(self._output_ids, minlength=vocab_size).astype(np.int32)
            self._seen = self._output_counts > 0
            self._seen[list(self._prompt_ids)] = True
        if self._allowed is None:
            self._allowed = AllowedTokens.of(params, self._output_ids, self.stop_ids, vocab_limit, None)
        self._prompt_ids, self._output_ids = (), []
        bias = {token_id: value for token_id, value in params.logit_bias.items() if token_id < vocab_limit}
        key_low, key_high = noise_key(params.seed)
        return RowRules(
            vocab_limit=vocab_limit,
            bias_ids=np.array(list(bias), np.int32),
            bias_values=np.array(list(bias.values()), np.float32),
            stop_ids=np.array(sorted(token_id for token_id in self.stop_ids if token_id < vocab_limit), np.int32),
            repetition=np.float32(params.repetition_penalty),
            frequency=np.float32(params.frequency_penalty),
            presence=np.float32(params.presence_penalty),
            temperature=np.float32(0 if is_greedy(params) else params.temperature),
            top_k=max(params.top_k, 0),
            top_p=float(params.top_p),
            min_p=float(params.min_p),
            key_low=np.uint64(key_low),
            key_high=np.uint64(key_high),
            choice_index=self._choice_index,
            stream=TOKEN_STREAM,
        )


def sample_and_walk(
    logits: Float32,
    tree: DraftTree,
    state: SamplingState,
    num_prompt_tokens: int,
    num_output_tokens: int,
    max_new_tokens: int,
    *,
    sources: Sequence[int] | None = None,
) -> WalkResult:
    """Sample along a verified tree, advance ``state``, and return the tokens to commit.

    Args:
        logits: raw logits, float32 [num_nodes, vocab]. Row ``i`` follows node ``i`` and is
            contiguous.
        tree: a valid tree whose root is the last token of prompt + output.
        state: the sequence's sampler.
        num_prompt_tokens, num_output_tokens: tokens of the prompt, and of the output so far.
        max_new_tokens: most tokens that may still follow, by length and context; at least 1.
        sources: the drafter's number for each node. None: 1 for all.
    """
    assert state.num_output_tokens == num_output_tokens, "the state has not seen this output"
    assert len(logits) == tree.num_nodes and max_new_tokens >= 1
    path = _walk(logits, tree, state, num_prompt_tokens + num_output_tokens)
    tokens = path.tokens[:-1] if path.stopped else path.tokens
    finish, stop_token_id = None, None
    if len(tokens) >= max_new_tokens:
        tokens, finish = tokens[:max_new_tokens], FinishReason.LENGTH
    elif path.stopped:
        finish, stop_token_id = FinishReason.STOP, path.tokens[-1]
    if state.is_complete and len(path.tokens) == len(tokens):
        # STOP wins if the length limit ends with the same token, because the output is complete.
        finish = FinishReason.STOP
    top_k = state.params.logprobs
    rows = [logits[node] for node in path.nodes[: len(tokens)]]
    accepted = path.matched[: len(tokens)]
    return WalkResult(
        tokens=tokens,
        accepted_nodes=accepted,
        sources=[1 if sources is None else int(sources[node]) for node in accepted]
        + [0] * (len(tokens) - len(accepted)),
        finish=finish,
        stop_token_id=stop_token_id,
        logprobs=[] if top_k is None else token_logprobs(rows, tokens, top_k),
        num_walked_tokens=len(path.tokens),
        matched_nodes=path.matched,
        error=state.error if finish is None else None,
    )


def followed(state: SamplingState, walk: WalkResult) -> WalkResult:
    """Advance ``state`` by a walk on a GPU, whose masks were ``state.tree_masks``.

    Return what to commit.

    The output's own matcher decides: where it ends, by the grammar's end or by one of its limits,
    the walk ends too.
    """
    count = state.follow(walk.tokens)
    if state.has_ended and (count < walk.num_walked_tokens or count == 0):
        walk = WalkResult(
            walk.tokens[:count],
            walk.accepted_nodes[:count],
            walk.sources[:count],
            None,
            None,
            walk.logprobs[:count],
            count,
            walk.matched_nodes[:count],
        )
    finish = FinishReason.STOP if state.is_complete else walk.finish
    error = state.no_token_error() if isinstance(walk.error, InvalidRequestError) else walk.error
    return walk._replace(finish=finish, error=(state.error or error) if finish is None else None)


def _walk(logits: Float32, tree: DraftTree, state: SamplingState, position: int) -> _Path:
    """Sample from the root until a stop token, the grammar's end or a token that no child holds.

    ``position``: the first sampled token's index in prompt + output.
    """
    children = _children(tree)
    tokens: list[int] = []
    nodes: list[int] = []
    matched: list[int] = []
    node: int | None = 0
    while node is not None and not state.has_ended:
        token = state.sample(logits[node], position + len(tokens))
        if token is None:
            break
        tokens.append(token)
        nodes.append(node)
        node = children.get((node, token))
        if node is not None:
            matched.append(node)
        if token in state.stop_ids:
            return _Path(tokens, nodes, matched, stopped=True)
    return _Path(tokens, nodes, matched, stopped=False)


def _children(tree: DraftTree) -> dict[tuple[int, int], int]:
    """Return the nodes by (parent, token); of siblings with the same token, the lowest index."""
    children: dict[tuple[int, int], int] = {}
    if tree.num_nodes > 1:
        parents, tokens = tree.parents.tolist(), tree.tokens.tolist()
        for node in range(1, tree.num_nodes):
            children.setdefault((parents[node], tokens[node]), node)
    return children


def broken_logits() -> ModelOutputError:
    """Return the error for logits that are NaN or infinite, and so give no token."""
    return ModelOutputError(
        "the model's logits are NaN or infinite: its weights or the hardware are faulty, or its numbers are too large "
        "for float16 (--dtype bfloat16)"
    )


def token_logprobs(logits: Iterable[Float32], token_ids: Sequence[int], top_k: int) -> list[TokenLogprobs]:
    """Return the logprobs of one token in each row, and of the row's ``top_k`` best tokens.

    Args:
        logits: raw logits, float32 [rows, vocab]. Each row is contiguous.
        token_ids: one token for each row.
    """
    return [_row_logprobs(row, token_id, top_k) for row, token_id in zip(logits, token_ids, strict=True)]


def _row_logprobs(row: Float32, token_id: int, top_k: int) -> TokenLogprobs:
    log_sum, logprob, rank = logprob_and_rank(row, token_id)
    best = top_ids(row, min(top_k, len(row))).tolist() if top_k else []
    return TokenLogprobs(token_id, logprob, rank, tuple((other, float(row[other]) - log_sum) for other in best))


def warm_up() -> None:
    """Compile this module's kernels, or load them from numba's cache, before the first request."""
    row = np.linspace(0, 1, 8, dtype=np.float32)
    penalized = SamplingParams(temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, presence_penalty=1.0, logprobs=1)
    for params in (SamplingParams(temperature=0.0), SamplingParams(), penalized):
        state = SamplingState(params, (1,), eos_ids=frozenset({7}), choice_index=0)
        sample_and_walk(row[None], DraftTree.root_only(1), state, 1, 0, 1)
