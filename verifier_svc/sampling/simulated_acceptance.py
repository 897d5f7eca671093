"""For benchmarks only: a walk whose outcome is given, so that a step's cost can be measured at a wanted acceptance.

Forward pass, logit operations, sampling, commit and drafting run as ever. What is replaced is which tokens a step
commits: so many drafted ones along the tree's deepest path, and then the token that the target sampled. Nothing of the
text means anything.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch

from foretoken.results import FinishReason, TokenLogprobs
from foretoken.tree import DraftTree
from verifier_svc.sampling.verify import WalkResult
from verifier_svc.sampling.walker import Walk, Walker


class SimulatedWalker:
    """A ``Walker`` whose walks have the lengths of a simulator; ``inner`` does the work."""

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
        # A sampler on the host has counted the tokens that it sampled.
        sequence.sampler.num_output_tokens = sequence.num_output_tokens + len(replaced.tokens)
        return replaced


class AcceptanceSimulator:
    """Gives walks a length. One thread calls it.

    Args:
        mean_length: tokens of one step that had a draft, the target's own counted; at least 1. Where it is no whole
            number, steps are as long as the next lower or next higher one, in turns such that the mean comes out.
    """

    def __init__(self, mean_length: float) -> None:
        self._mean = mean_length
        # What steps so far were short of, less than one token.
        self._owed = 0.0

    def next_length(self, longest: int) -> int:
        """Tokens of the next step, where ``longest`` can be had. What a small tree cannot give is not made up for."""
        self._owed += self._mean
        length = int(self._owed)
        self._owed -= length
        return max(1, min(length, longest))

    def replace(
        self, result: WalkResult, tree: DraftTree, max_new_tokens: int, sources: Items[int] | None = None
    ) -> WalkResult:
        """The walk that is committed in place of ``result``.

        Arguments as of ``sample_and_walk``, which made ``result``. A tree of its root alone, and a sequence that cannot
        go on, are left as they are. The output ends by its length only, and has no logprobs.
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
    """The nodes from below the root to the first of the deepest ones."""
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
