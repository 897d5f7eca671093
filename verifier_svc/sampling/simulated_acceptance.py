"""Simulate acceptance, for benchmarks only: measure a step's cost at a chosen acceptance length.

Forward pass, logit operations, sampling, commit and drafting run as usual. Only the committed
tokens are replaced: each step commits drafted tokens along the tree's deepest path, as many as
wanted, and then the token that the target sampled. The text has no meaning.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch

from foretoken.results import FinishReason, TokenLogprobs
from foretoken.tree import DraftTree
from verifier_svc.sampling.verify import WalkResult
from verifier_svc.sampling.walker import Walk, Walker


class SimulatedWalker:
    """A ``Walker`` that runs ``inner`` and gives its walks the simulator's lengths."""

    def __init__(self, inner: Walker, simulator: AcceptanceSimulator) -> None:
        self._inner, self._simulator = inner, simulator

    def walk(self, walks: Items[Walk], logits: torch.Tensor) -> list[WalkResult]:
        results = self._inner.walk(walks, logits)
        return [self._replaced(walk, result) for walk, result in zip(walks, results, strict=True)]

    def logprobs(self, logits: torch.Tensor, token_ids: Items[int], top_k: int) -> list[TokenLogprobs]:
        return self._inner.logprobs(logits, token_ids, top_k)

    def _replaced(self, walk: Walk, result: WalkResult) -> WalkResult:
        sequence = walk.sequence
        replaced = self._simulator.replace(result, walk.tree, sequence.max_new_tokens, walk.sources)
        # A host sampler has counted the tokens that it sampled: correct its count.
        sequence.sampler.num_output_tokens = sequence.num_output_tokens + len(replaced.tokens)
        return replaced


class AcceptanceSimulator:
    """Choose the length of each walk. Only one thread uses it.

    Args:
        mean_length: mean tokens of a step with a draft, including the target's own; at least 1. If
            it is not a whole number, steps alternate between the two nearest ones to give this
            mean.
    """

    def __init__(self, mean_length: float) -> None:
        self._mean = mean_length
        # Fraction of a token that the steps so far still owe.
        self._owed = 0.0

    def next_length(self, longest: int) -> int:
        """Return the next step's tokens, at most ``longest``. A shortfall is not made up later."""
        self._owed += self._mean
        length = int(self._owed)
        self._owed -= length
        return max(1, min(length, longest))

    def replace(
        self, result: WalkResult, tree: DraftTree, max_new_tokens: int, sources: Items[int] | None = None
    ) -> WalkResult:
        """Return the walk to commit in place of ``result``.

        The arguments are those that ``sample_and_walk`` got to make ``result``. The result stays as
        it is if the tree is only a root, or if the sequence cannot go on. A replaced walk ends an
        output only by length, and has no logprobs.
        """
        if tree.num_nodes == 1 or result.error is not None:
            return result
        deepest = deepest_path(tree)
        length = self.next_length(len(deepest) + 1)
        matched = deepest[: length - 1]
        sampled = result.tokens[-1] if result.tokens else result.stop_token_id
        assert sampled is not None, "a walk has at least one token"
        tokens = [*(int(tree.tokens[node]) for node in matched), sampled][:max_new_tokens]
        accepted = matched[: len(tokens)]
        return WalkResult(
            tokens=tokens,
            accepted_nodes=accepted,
            sources=[1 if sources is None else int(sources[node]) for node in accepted]
            + [0] * (len(tokens) - len(accepted)),
            finish=FinishReason.LENGTH if len(tokens) == max_new_tokens else None,
            stop_token_id=None,
            logprobs=[],
            num_walked_tokens=length,
            matched_nodes=matched,
        )


def deepest_path(tree: DraftTree) -> list[int]:
    """Return the nodes of the path from below the root to the first deepest node."""
    parents = tree.parents.tolist()
    levels, deepest = [0] * len(parents), 0
    for node in range(1, len(parents)):
        level = levels[node] = levels[parents[node]] + 1
        if level > levels[deepest]:
            deepest = node
    path: list[int] = []
    while deepest > 0:
        path.append(deepest)
        deepest = parents[deepest]
    return path[::-1]
