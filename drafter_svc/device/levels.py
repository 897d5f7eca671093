"""The levels of draft trees on a GPU: from the roots' logits to finished trees, without the host.

All of it may be captured in a CUDA graph, together with the pass that computes the roots' logits.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from foretoken_kernels.cpu import draft_tree as kernel
from foretoken_kernels.gpu import draft_tree as gpu
from foretoken_kernels.gpu import draft_tree_state as column
from foretoken_kernels.gpu.draft_tree_state import (
    DraftBeams,
    DraftOutput,
    DraftTrees,
    OfferWorkspace,
    deepest_tree,
    new_draft_beams,
    new_draft_trees,
)
from numpy.typing import NDArray

from drafter_svc.trees.growth import MAX_BRANCHES, PassOutput, VocabularyOwner, vocabulary_of
from foretoken.drafting import DraftBatch, DraftRequest, TargetInfo
from foretoken.models.batch import ForwardBatch
from foretoken.models.device_batch import DeviceArrays
from foretoken.tree import Int32


class LaunchingModel(VocabularyOwner, Protocol):
    """A draft model on a GPU: DeviceDraftHead of foretoken.models, or a DeviceStandaloneModel."""

    num_depths: int
    hidden_size: int
    hidden_width: int

    def launch(
        self, arrays: DeviceArrays, hidden: torch.Tensor, sources: torch.Tensor, *, depth: int
    ) -> PassOutput: ...
    def extend(self, arrays: DeviceArrays, hidden: torch.Tensor) -> PassOutput: ...
    def upload(self, batch: ForwardBatch) -> DeviceArrays: ...
    def write_prompt(self, arrays: DeviceArrays, hidden: torch.Tensor) -> None: ...


class TreeShape(NamedTuple):
    """The shape that a graph is captured for.

    Attributes:
        trees: number of trees.
        branches: children of a node.
        depth: levels of a tree.
        nodes: nodes of a tree.
        blocks: blocks of a row's block table.
        filtered: whether any row has top-k, top-p or min-p.
    """

    trees: int
    branches: int
    depth: int
    nodes: int
    blocks: int
    filtered: bool

    @staticmethod
    def of(requested: kernel.Trees, rows: Int32, *, trees: int, nodes: int, blocks: int) -> TreeShape:
        """Return the smallest shape for the tree requests of ``rows``, as far as beams go."""
        shapes = requested.shapes[rows]
        wanted = max(int(shapes[:, kernel.MAX_BRANCHES].max()), 1)
        branches = min(1 << (wanted - 1).bit_length(), MAX_BRANCHES)
        depth = min(max(int(shapes[:, kernel.MAX_DEPTH].max()), 1), deepest_tree(branches))
        return TreeShape(trees, branches, depth, nodes, blocks, _is_filtered(requested, rows))


def _is_filtered(requested: kernel.Trees, rows: Int32) -> bool:
    """Return whether the logits of any row are cut, which needs a temperature."""
    filters, top_ks = requested.filters[rows], requested.shapes[rows, kernel.TOP_K]
    cut = (top_ks > 0) | (filters[:, kernel.TOP_P] < 1) | (filters[:, kernel.MIN_P] > 0)
    return bool((cut & (filters[:, kernel.TEMPERATURE] > 0)).any())


def write_requests(requests: Int32, requested: kernel.Trees, rows: Int32) -> None:
    """Write the tree requests of ``rows`` to the first ``requests``, and clear the others."""
    count = len(rows)
    requests[:] = 0
    for name, source in (
        (column.LENGTH, kernel.LENGTH),
        (column.MAX_NODES, kernel.MAX_NODES),
        (column.MAX_DEPTH, kernel.MAX_DEPTH),
        (column.MAX_BRANCHES, kernel.MAX_BRANCHES),
        (column.CHOICE_INDEX, kernel.CHOICE_INDEX),
        (column.TOP_K, kernel.TOP_K),
    ):
        requests[:count, name] = requested.shapes[rows, source]
    requests[:count, column.FIRST_KV_SLOT] = requested.counts[rows, kernel.FIRST_KV_SLOT]
    requests[:count, column.SEED_LOW : column.SEED_HIGH + 1] = requested.seeds[rows].view(np.int32).reshape(-1, 2)
    for name, source in (
        (column.TEMPERATURE, kernel.TEMPERATURE),
        (column.TOP_P, kernel.TOP_P),
        (column.MIN_P, kernel.MIN_P),
    ):
        requests[:count, name] = requested.filters[rows, source].view(np.int32)


class TreePlaces(NamedTuple):
    """Requests and cache positions of the trees of one shape, in device memory.

    Attributes:
        requests: int32 [trees, NUM_COLUMNS].
        block_tables: int32 [trees, blocks].
        tree_starts: int32 [trees].
        context_starts: int32 [modules, trees].
    """

    requests: torch.Tensor
    block_tables: torch.Tensor
    tree_starts: torch.Tensor
    context_starts: torch.Tensor


class LevelMemory:
    """The working memory of the levels of one shape."""

    def __init__(
        self,
        shape: TreeShape,
        places: TreePlaces,
        output: DraftOutput,
        workspace: OfferWorkspace,
        device: torch.device,
    ) -> None:
        trees, branches, depth, _, _, self.filtered = shape
        self.places, self.output = places, output
        self.trees: DraftTrees = new_draft_trees(trees, branches, depth, device)._replace(requests=places.requests)
        # For a multiple of four trees all arrays are aligned; otherwise Triton would compile the
        # kernels again.
        self.beams: DraftBeams = new_draft_beams(-(-trees // 4) * 4, branches, device).first(trees)
        self.workspace = workspace
        self.all_rows = torch.arange(trees * branches, dtype=torch.int32, device=device)

    def arrays(self, module: int) -> DeviceArrays:
        """Return the beams as the rows of a pass of one of the model's modules."""
        beams = self.beams
        return DeviceArrays(
            masks=beams.masks,
            token_ids=beams.token_ids,
            positions=beams.positions,
            kv_slots=beams.kv_slots,
            context_lens=beams.context_lens,
            logit_rows=self.all_rows,
            row_starts=beams.row_starts,
            tree_starts=self.places.tree_starts,
            context_starts=self.places.context_starts[module],
            block_tables=self.places.block_tables,
            # A single beam has ancestors too, which attention expects only of sequences with
            # several rows.
            max_seq_rows=max(self.trees.max_branches, 2),
        )


class DeviceLevels:
    """Grows the trees of one model.

    Args:
        scale: scale of the coupled score, in logits; 0: without the sampler's noise.
        num_kv_slots: KV slots of the model's cache. The last one is scratch, in no tree.
        dtype: type of the model's hidden states.
    """

    def __init__(
        self,
        model: LaunchingModel,
        target: TargetInfo,
        scale: float,
        *,
        num_kv_slots: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.model, self.num_kv_slots, self.device, self.dtype = model, num_kv_slots, device, dtype
        self.block_size = target.block_size
        self.vocabulary = vocabulary_of(model, target)
        self._scale = scale
        ids = self.vocabulary.target_ids
        # By rows. All shapes share a workspace, because one growth runs at a time. With a large
        # vocabulary, workspaces are most of the levels' memory.
        self._workspaces: dict[int, OfferWorkspace] = {}
        self._target_ids = torch.from_numpy(ids).to(device) if len(ids) else None

    def memory(self, shape: TreeShape, places: TreePlaces, output: DraftOutput) -> LevelMemory:
        """Allocate the working memory of one shape."""
        rows = shape.trees * shape.branches
        if rows not in self._workspaces:
            self._workspaces[rows] = gpu.offer_workspace(rows, 1, self.vocabulary.size, self.device)
        return LevelMemory(shape, places, output, self._workspaces[rows], self.device)

    def launch(self, memory: LevelMemory, logits: torch.Tensor, hidden: torch.Tensor) -> None:
        """Grow trees from the roots on and write them to the memory's output.

        Args:
            logits: float32 [trees, draft vocabulary]; the roots' logits; may be the model's own
                buffer.
            hidden: [trees, hidden_size]; the roots' hidden states, in a buffer that the model does
                not use.
        """
        model, trees, beams = self.model, memory.trees, memory.beams
        num_modules = model.num_depths
        self._offer(memory, logits, 0)
        for level in range(1, trees.max_depth):
            module = min(level, num_modules - 1)
            gpu.choose_beams(
                trees,
                level,
                memory.places.block_tables,
                self.block_size,
                beams,
                num_kv_slots=self.num_kv_slots,
                scratch_kv_slot=self.num_kv_slots - 1,
                first_depth=module if num_modules > 1 else 0,
            )
            output = model.launch(memory.arrays(module), hidden, beams.sources, depth=module)
            self._offer(memory, output.logits, level)
            hidden = output.hidden
        gpu.emit_trees(trees, memory.output)

    def _offer(self, memory: LevelMemory, logits: torch.Tensor, level: int) -> None:
        gpu.offer_children(
            memory.trees,
            logits,
            level,
            memory.workspace,
            vocab_limit=self.vocabulary.limit,
            target_ids=self._target_ids,
            scale=self._scale,
            filtered=memory.filtered,
        )


class FoundTrees(NamedTuple):
    """A DraftOutput on the host."""

    tokens: Int32
    parents: Int32
    scores: NDArray[np.float32]
    num_nodes: Int32


def batch_of(request: DraftRequest, roots: Int32, rows: Int32, found: FoundTrees | None) -> DraftBatch:
    """Return the reply to a request.

    Row ``rows[i]`` gets tree i of ``found``; other rows get only their root.
    """
    counts = np.ones(request.num_rows, np.int32)
    if found is not None:
        counts[rows] = np.maximum(np.minimum(found.num_nodes[: len(rows)], found.tokens.shape[1]), 1)
    node_starts = np.zeros(request.num_rows + 1, np.int32)
    np.cumsum(counts, out=node_starts[1:])
    total = int(node_starts[-1])
    tokens, parents = np.zeros(total, np.int32), np.full(total, -1, np.int32)
    scores = np.zeros(total, np.float32)
    tokens[node_starts[:-1]] = roots
    if found is not None:
        pairs = [(tokens, found.tokens), (parents, found.parents), (scores, found.scores)]
        lows, ends = node_starts[rows].tolist(), node_starts[rows + 1].tolist()
        for tree, (low, end) in enumerate(zip(lows, ends, strict=True)):
            for values, trees in pairs:
                values[low + 1 : end] = trees[tree, 1 : end - low]
    return DraftBatch(request.epoch, request.step_id, node_starts, tokens, parents, scores)
