"""Who samples and walks: the step's trees with their logits go in, what each sequence commits comes out."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple, Protocol

import torch

from foretoken.results import TokenLogprobs
from foretoken.tree import DraftTree
from verifier_svc.sampling.verify import WalkResult, sample_and_walk, token_logprobs
from verifier_svc.scheduling.sequence import Sequence


class Walk(NamedTuple):
    """One sequence's walk: row ``first_row + i`` of the step's logits follows node i of ``tree``.

    ``sources``: per node the number of the drafter that it is from; None: 1.
    """

    sequence: Sequence
    tree: DraftTree
    first_row: int
    sources: Items[int] | None


class Walker(Protocol):
    def walk(self, walks: Items[Walk], logits: torch.Tensor) -> list[WalkResult]:
        """Sample along each tree and say what it commits; advances the sequences' samplers.

        ``logits``: [rows, vocab], raw, as the runner returned them.
        """
        ...

    def logprobs(self, logits: torch.Tensor, token_ids: Items[int], top_k: int) -> list[TokenLogprobs]:
        """Of a token a row, and of the ``top_k`` best ones. ``logits``: [rows, vocab], some of what the runner
        returned."""
        ...


class HostWalker:
    """Row by row on the CPU, along the path alone: rows off it cannot be reached."""

    def walk(self, walks: Items[Walk], logits: torch.Tensor) -> list[WalkResult]:
        return [walk_on_host(walk, logits) for walk in walks]

    def logprobs(self, logits: torch.Tensor, token_ids: Items[int], top_k: int) -> list[TokenLogprobs]:
        return token_logprobs(logits.numpy(), token_ids, top_k)


def walk_on_host(walk: Walk, logits: torch.Tensor) -> WalkResult:
    """``logits`` are on the CPU, or this sequence's rows are fetched."""
    sequence = walk.sequence
    rows = logits[walk.first_row : walk.first_row + walk.tree.num_nodes].cpu().numpy()
    return sample_and_walk(
        rows,
        walk.tree,
        sequence.sampler,
        sequence.num_prompt_tokens,
        sequence.tokens[sequence.num_prompt_tokens :],
        sequence.max_new_tokens,
        sources=walk.sources,
    )
