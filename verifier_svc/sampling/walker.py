"""Declare the walker interface, from trees and logits to committed tokens, and walk on the CPU."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple, Protocol

import torch

from foretoken.results import TokenLogprobs
from foretoken.sampling import SamplingParams
from foretoken.tree import DraftTree
from verifier_svc.sampling.verify import Float32, SamplingState, WalkResult, sample_and_walk, token_logprobs


class SampledSequence(Protocol):
    """The part of a sequence (verifier_svc.scheduling.sequence) that a walker reads."""

    sampling: SamplingParams
    sampler: SamplingState
    # Committed tokens, prompt first; the first ``num_prompt_tokens`` are the prompt.
    tokens: list[int]
    num_prompt_tokens: int
    # The batch slot, and how many sequences it has had.
    batch_slot: int
    generation: int

    @property
    def choice_index(self) -> int: ...

    @property
    def num_output_tokens(self) -> int: ...

    @property
    def max_new_tokens(self) -> int: ...


class Walk(NamedTuple):
    """One sequence's walk. Row ``first_row + i`` of the logits follows node ``i`` of ``tree``.

    Attributes:
        sources: the drafter's number for each node. None: 1 for all.
    """

    sequence: SampledSequence
    tree: DraftTree
    first_row: int
    sources: Items[int] | None


class Walker(Protocol):
    """Samples and walks the trees of a step."""

    def walk(self, walks: Items[Walk], logits: torch.Tensor) -> list[WalkResult]:
        """Sample along each tree, advance the sequences' samplers, and return the tokens to commit.

        ``logits``: raw logits [rows, vocab] from the runner.
        """
        ...

    def logprobs(self, logits: torch.Tensor, token_ids: Items[int], top_k: int) -> list[TokenLogprobs]:
        """Return the logprobs of one token in each row, and of the row's ``top_k`` best tokens.

        ``logits``: [rows, vocab], rows of the runner's logits.
        """
        ...


class HostWalker:
    """Walk on the CPU. Sample only the rows on the path, since no walk reaches the others."""

    def walk(self, walks: Items[Walk], logits: torch.Tensor) -> list[WalkResult]:
        rows = logits.cpu().numpy()
        return [_walk(walk, rows[walk.first_row : walk.first_row + walk.tree.num_nodes]) for walk in walks]

    def logprobs(self, logits: torch.Tensor, token_ids: Items[int], top_k: int) -> list[TokenLogprobs]:
        return token_logprobs(logits.numpy(), token_ids, top_k)


def walk_on_host(walk: Walk, logits: torch.Tensor) -> WalkResult:
    """Walk one sequence on the host. Fetches its rows first if ``logits`` are on a GPU."""
    return _walk(walk, logits[walk.first_row : walk.first_row + walk.tree.num_nodes].cpu().numpy())


def _walk(walk: Walk, rows: Float32) -> WalkResult:
    sequence = walk.sequence
    return sample_and_walk(
        rows,
        walk.tree,
        sequence.sampler,
        sequence.num_prompt_tokens,
        sequence.num_output_tokens,
        sequence.max_new_tokens,
        sources=walk.sources,
    )
