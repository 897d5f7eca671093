"""Draft requests: their rows, and the shapes of the trees they ask for.

Some kinds need their own CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from foretoken.drafting import ROW_DTYPE, DraftRequest, starts_of
from foretoken.errors import InvalidRequestError
from foretoken.models.device_batch import bucket, seq_bucket
from foretoken.sampling import MIN_TEMPERATURE, DraftShape, SamplingParams
from verifier_svc.config import VerifierSettings
from verifier_svc.scheduling.hidden_states import HiddenSlice, joined
from verifier_svc.scheduling.sequence import Sequence

# Where the flags are silent: levels of a tree at most, and children of a node.
DEFAULT_STEPS = 7
DEFAULT_BRANCHES = 4
_NO_HIDDEN = np.zeros((0, 0), np.float32)


class Shape(NamedTuple):
    """The most that one row's tree may have, and how many rows of a step verify it.

    Attributes:
        nodes: with the root.
        depth: edges from the root.
        branches: children of one node.
        budget: rows that each sequence of the batch has on average; the best nodes of the whole
            batch get them. 0: every node has a row.
    """

    nodes: int
    depth: int
    branches: int
    budget: int = 0

    @property
    def rows(self) -> int:
        """Return the rows of a step for each sequence, on average."""
        return self.budget or self.nodes

    @property
    def name(self) -> str:
        """Return levels, children and nodes, as flags write them, and the budget."""
        return f"{self.depth}-{self.branches}-{self.nodes}" + (f"/{self.budget}" if self.budget else "")


NO_DRAFT = Shape(1, 1, 1)


@dataclass(frozen=True, slots=True)
class TreeBounds:
    """Bounds of all trees, or of one request's.

    The policy chooses by a row's *reach*, a number from 1 up: for a look-up drafter the drafted
    tokens, for a drafter with a model the levels of the tree.

    Attributes:
        max_nodes: nodes of one tree, including the root.
        num_steps: levels; 0 means as many as pay, up to DEFAULT_STEPS.
        branches: children of one node.
    """

    max_nodes: int
    num_steps: int = 0
    branches: int = DEFAULT_BRANCHES

    @staticmethod
    def of(settings: VerifierSettings) -> TreeBounds:
        """Return the bounds that the settings give."""
        return TreeBounds(
            settings.speculative_num_draft_tokens, settings.speculative_num_steps, settings.speculative_eagle_topk
        )

    def check(self, shape: DraftShape) -> None:
        """Raise InvalidRequestError for a request's shape that exceeds these bounds."""
        for name, value, most, flag in (
            ("num_steps", shape.num_steps, self.max_depth, "steps"),
            ("topk", shape.topk, self.branches, "eagle-topk"),
            ("num_draft_tokens", shape.num_draft_tokens, self.max_nodes, "draft-tokens"),
        ):
            if value > most:
                why = f"--speculative-{'' if name == 'topk' else 'num-'}{flag} bounds it"
                if name == "num_steps" and not self.num_steps:
                    why = f"trees have at most {DEFAULT_STEPS} levels, and fewer than --speculative-num-draft-tokens"
                field = f"speculative.shape.{name}"
                raise InvalidRequestError(
                    f"{field} must be at most {most} on this server, got {value}: {why}", field=field
                )

    def of_request(self, shape: DraftShape | None) -> TreeBounds:
        """Return the bounds of a request that asks for this shape; None: these.

        A resumed request's shape may exceed these bounds, because another verifier
        admitted it. It is cut to them.
        """
        if shape is None:
            return self
        return replace(
            self,
            max_nodes=min(shape.num_draft_tokens, self.max_nodes),
            num_steps=min(shape.num_steps, self.max_depth),
            branches=min(shape.topk, self.branches),
        )

    @property
    def is_fixed(self) -> bool:
        """Return whether trees have exactly this shape, even if a smaller tree or none would be faster."""
        return self.num_steps > 0

    @property
    def max_depth(self) -> int:
        """The most levels of a tree, for drafters with a model."""
        return min(self.num_steps or DEFAULT_STEPS, self.max_nodes - 1)

    def describe(self, has_model: bool) -> str:
        """Return the bounds as text.

        ``has_model``: whether a drafter with a model has trees to bound.
        """
        nodes = f"nodes: up to {self.max_nodes}, with the root"
        if not has_model:
            return nodes
        levels = str(self.max_depth) if self.is_fixed else f"up to {self.max_depth}"
        return f"levels: {levels}; children of a node: up to {self.branches}; {nodes}"

    def most_reach(self, has_model: bool) -> int:
        """Return the largest useful reach: beyond it no more tokens can be accepted."""
        return self.max_depth if has_model else self.max_nodes - 1

    def of_row(self, has_model: bool, reach: int, most: int) -> Shape:
        """Return the shape of one row's tree with at most ``most`` drafted tokens."""
        if not has_model:
            return Shape(1 + min(reach, most), min(reach, most), self.max_nodes)
        depth = self.max_depth if self.is_fixed else min(reach, self.max_depth)
        nodes = self.max_nodes if self.is_fixed else min(self.max_nodes, 1 + depth * min(self.branches, 2))
        return Shape(min(nodes, 1 + most), min(depth, most), self.branches)


class DraftRow(NamedTuple):
    """One row of a request.

    It keeps all it says: its sequence may have ended or moved when the reply comes.
    """

    sequence: Sequence
    batch_slot: int
    generation: int
    length: int
    new_tokens: list[int]
    hidden: list[HiddenSlice]
    block_ids: list[int]
    prediction: tuple[int, ...]
    shape: Shape
    # Whether the step waits for the answer.
    awaited: bool
    # How many of the last new tokens have a hidden state in device memory
    # (foretoken.drafting.DeviceStep).
    device_hidden: int = 0

    @property
    def root(self) -> int:
        return self.new_tokens[-1]

    @property
    def has_ended(self) -> bool:
        """Return whether the sequence has given its batch slot back."""
        return (self.sequence.batch_slot, self.sequence.generation) != (self.batch_slot, self.generation)


def request_of(epoch: int, step_id: int, rows: Items[DraftRow]) -> DraftRequest:
    """Return the request with these rows."""
    hidden = [part.values() for row in rows for part in row.hidden]
    return DraftRequest(
        epoch,
        step_id,
        rows=np.array([record_of(row) for row in rows], ROW_DTYPE),
        starts=starts_of(
            [len(row.new_tokens) for row in rows],
            [sum(map(len, row.hidden)) for row in rows],
            [len(row.block_ids) for row in rows],
            [len(row.prediction) for row in rows],
        ),
        new_tokens=np.array([token for row in rows for token in row.new_tokens], np.int32),
        hidden=joined(hidden) if hidden else _NO_HIDDEN,
        block_ids=np.array([block for row in rows for block in row.block_ids], np.int32),
        prediction=np.array([token for row in rows for token in row.prediction], np.int32),
    )


def record_of(row: DraftRow) -> tuple[float, ...]:
    """Return the values of ROW_DTYPE in its order."""
    sequence, shape = row.sequence, row.shape
    params = sequence.sampling
    return (
        sequence.salt_digest,
        params.seed % 2**64,
        row.batch_slot,
        row.generation,
        row.length,
        sequence.num_prompt_tokens,
        shape.nodes,
        shape.depth,
        shape.branches,
        sequence.choice_index,
        max(params.top_k, 0),
        params.temperature if params.temperature >= MIN_TEMPERATURE else 0.0,
        params.top_p,
        params.min_p,
        row.device_hidden,
    )


class RequestKind(NamedTuple):
    """Decide which CUDA graphs a request needs.

    The first request of a kind waits until they are captured.

    Sizes are rounded as they are for capture, so that there are few kinds.

    Attributes:
        rows: all rows of the request.
        trees: rows that want more than their root.
        tokens, longest: new tokens of all rows, and of the longest row.
        depth, branches: of the largest tree.
        is_filtered: whether a tree's candidates are cut by top-k, top-p or min-p.
        in_device_memory: whether the tokens were in device memory.
    """

    rows: int
    trees: int
    tokens: int
    longest: int
    depth: int
    branches: int
    is_filtered: bool
    in_device_memory: bool

    @staticmethod
    def of(rows: Items[DraftRow], *, in_device_memory: bool) -> RequestKind:
        # In device memory each row has room for the most of a step.
        counts = [] if in_device_memory else [len(row.new_tokens) for row in rows]
        shapes = [row.shape for row in rows if row.shape.nodes > 1]
        return RequestKind(
            seq_bucket(len(rows)),
            bucket(len(shapes)),
            bucket(sum(counts)),
            seq_bucket(max(counts, default=0)),
            max((shape.depth for shape in shapes), default=0),
            max((seq_bucket(shape.branches) for shape in shapes), default=0),
            any(_is_filtered(row.sequence.sampling) for row in rows if row.shape.nodes > 1),
            in_device_memory,
        )


def _is_filtered(sampling: SamplingParams) -> bool:
    has_cut = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    return has_cut and sampling.temperature > 0
