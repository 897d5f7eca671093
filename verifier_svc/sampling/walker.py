"""Who samples and walks: the step's trees with their logits go in, what each sequence commits comes out."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple, Protocol

import torch

from foretoken.results import TokenLogprobs
from foretoken.sampling import SamplingParams
from foretoken.tree import DraftTree
from verifier_svc.sampling.verify import SamplingState, WalkResult, sample_and_walk, token_logprobs


class SampledSequence(Protocol):
    """What a walker reads of a sequence (verifier_svc.scheduling.sequence)."""

    sampling: SamplingParams
    sampler: SamplingState
    # Committed tokens, prompt first; the first ``num_prompt_tokens`` are the prompt.
    tokens: list[int]
    num_prompt_tokens: int
    # Its row of the device's sampling state, and how often that row was given out.
    slot: int
    generation: int

    @property
    def choice_index(self) -> int: ...

    @property
    def num_output_tokens(self) -> int: ...

    @property
    def max_new_tokens(self) -> int: ...


class Walk(NamedTuple):
    """One sequence's walk: row ``first_row + i`` of the step's logits follows node i of ``tree``.

    Attributes:
        sources: the number of each node's drafter; None: 1 for all.
    """

    sequence: SampledSequence
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
