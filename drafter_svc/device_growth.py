"""Growth of draft trees on a GPU: all levels, the head's passes among them, are one CUDA graph.

Between a request's arrival and its trees the host waits for the device once, for the trees.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from foretoken_kernels.cpu import draft_tree as kernel
from foretoken_kernels.cpu.draft_levels import Places
from foretoken_kernels.gpu import draft_tree as gpu
from foretoken_kernels.gpu import draft_tree_state as column
from foretoken_kernels.gpu.draft_tree_state import (
    MAX_BEAM_NODES,
    NUM_COLUMNS,
    DraftBeams,
    DraftOutput,
    DraftTrees,
    OfferWorkspace,
    new_draft_beams,
    new_draft_trees,
)

from drafter_svc.growth import (
    MAX_BRANCHES,
    ROWS_PER_SLOT,
    PassOutput,
    VocabularyOwner,
    vocabulary_of,
)
from foretoken.drafting import DraftBatch, DraftRequest, TargetInfo
from foretoken.models.device_batch import DeviceArrays, bucket, table_bucket
from foretoken.models.device_graph import DeviceGraphs
from foretoken.models.device_twins import DeviceTwins
from foretoken.tree import Int32


class LaunchingModel(VocabularyOwner, Protocol):
    """A draft model on a GPU: foretoken.models.draft_head.DraftHead, or a StandaloneModel."""

    num_depths: int
    hidden_size: int

    def launch(
        self, arrays: DeviceArrays, hidden: torch.Tensor, sources: torch.Tensor, *, depth: int
    ) -> PassOutput: ...


class _Shape(NamedTuple):
    """What a graph is captured for: trees, branches of a node, levels, nodes of a tree, blocks of a row's table, and
    whether any row has top-k, top-p or min-p."""

    trees: int
    branches: int
    depth: int
    nodes: int
    blocks: int
    filtered: bool


class _Stage:
    """The memory of one shape's graph: what the host says, the trees, and what the host learns."""

    def __init__(self, shape: _Shape, num_modules: int, draft_vocab_size: int, device: torch.device) -> None:
        trees, branches, depth, nodes, num_blocks, self.filtered = shape
        self.asked = DeviceTwins(
            {
                "requests": ((trees, NUM_COLUMNS), torch.int32),
                "block_tables": ((trees, num_blocks), torch.int32),
                "tree_starts": ((trees,), torch.int32),
                "context_starts": ((num_modules, trees), torch.int32),
            },
            device,
        )
        self.found = DeviceTwins(
            {
                "tokens": ((trees, nodes), torch.int32),
                "parents": ((trees, nodes), torch.int32),
                "scores": ((trees, nodes), torch.float32),
                "num_nodes": ((trees,), torch.int32),
            },
            device,
        )
        self.trees: DraftTrees = new_draft_trees(trees, branches, depth, device)._replace(
            requests=self.asked.device["requests"]
        )
        self.output = DraftOutput(**self.found.device)
        self.beams: DraftBeams = new_draft_beams(trees, branches, device)
        self.workspace: OfferWorkspace = gpu.offer_workspace(trees, branches, draft_vocab_size, device)
        self.all_rows = torch.arange(trees * branches, dtype=torch.int32, device=device)

    def arrays(self, module: int) -> DeviceArrays:
        """The beams as the rows of a pass of one of the model's modules."""
        asked, beams = self.asked.device, self.beams
        return DeviceArrays(
            masks=beams.masks,
            token_ids=beams.token_ids,
            positions=beams.positions,
            slot_mapping=beams.slot_mapping,
            context_lens=beams.context_lens,
            logit_rows=self.all_rows,
            row_starts=beams.row_starts,
            tree_starts=asked["tree_starts"],
            context_starts=asked["context_starts"][module],
            block_tables=asked["block_tables"],
            max_seq_rows=self.trees.max_branches,
        )


class DeviceGrowth:
    """A ``drafter_svc.growth.Growth``.

    Args:
        num_slots: of the model's cache. The last one is scratch: no tree has it.
        graphs: whether growth is captured.
        scale: of the coupled score, in logits; 0: without the sampler's noise.
    """

    def __init__(
        self,
        model: LaunchingModel,
        target: TargetInfo,
        scale: float,
        *,
        max_blocks: int,
        num_slots: int,
        device: torch.device,
        dtype: torch.dtype,
        graphs: bool,
    ) -> None:
        """``max_blocks``: of a row's block table; ``dtype``: of the model's hidden states."""
        self._model, self._target, self._scale = model, target, scale
        self._max_blocks, self._num_slots, self._device = max_blocks, num_slots, device
        self._vocabulary = vocabulary_of(model, target)
        ids = self._vocabulary.target_ids
        self._target_ids = torch.from_numpy(ids).to(device) if len(ids) else None
        # What the rows want, in the form that the CPU's growth takes too; no tree stands in it.
        self.trees = kernel.new_trees(ROWS_PER_SLOT * target.max_slots, 2, 1)
        self._root_logits = torch.zeros((target.max_slots, model.draft_vocab_size), dtype=torch.float32, device=device)
        self._root_hidden = torch.zeros((target.max_slots, max(model.hidden_size, 1)), dtype=dtype, device=device)
        self._ends = DeviceTwins({"ends": ((target.max_slots,), torch.int32)}, device)
        self._stages: dict[_Shape, _Stage] = {}
        self._graphs = DeviceGraphs(graphs and device.type == "cuda")
        # Of the request of the moment: its drafted rows, and the stage that holds their trees.
        self._rows = np.empty(0, np.int32)
        self._stage: _Stage | None = None

    @torch.inference_mode()
    def offer_roots(self, output: PassOutput, rows: Int32, ends: list[int], first: int) -> None:
        """Keep what the roots' children come from: the next pass writes over it."""
        last = first + len(rows)
        self._root_logits[first:last].copy_(output.logits[: len(rows)])
        if self._model.hidden_size:
            self._ends.wait()
            self._ends.host["ends"][: len(ends)] = ends
            self._ends.send()
            device_ends = self._ends.device["ends"][: len(ends)]
            torch.index_select(output.hidden, 0, device_ends, out=self._root_hidden[first:last])

    @torch.inference_mode()
    def grow(self, rows: Int32, places: Places) -> None:
        trees = self.trees
        shapes = trees.shapes[rows]
        longest = int(places.tree_starts[rows].max()) + MAX_BEAM_NODES
        shape = _Shape(
            min(bucket(len(rows)), self._target.max_slots),
            _branches(int(shapes[:, kernel.MAX_BRANCHES].max())),
            max(int(shapes[:, kernel.MAX_DEPTH].max()), 1),
            self._target.max_nodes,
            min(table_bucket(-(-longest // places.block_size)), self._max_blocks),
            self._is_filtered(rows),
        )
        if shape not in self._stages:
            self._stages[shape] = _Stage(shape, self._model.num_depths, self._vocabulary.size, self._device)
        stage = self._stages[shape]
        self._ask(stage, rows, places)
        self._graphs.run(shape, lambda: self._launch(stage, places.block_size))
        self._rows, self._stage = rows, stage

    def emit(self, request: DraftRequest, roots: Int32) -> DraftBatch:
        counts = np.ones(request.num_rows, np.int32)
        found = None
        if self._stage is not None:
            found = self._stage.found.receive()
            sizes = found["num_nodes"][: len(self._rows)]
            counts[self._rows] = np.maximum(np.minimum(sizes, found["tokens"].shape[1]), 1)
        node_starts = np.zeros(request.num_rows + 1, np.int32)
        np.cumsum(counts, out=node_starts[1:])
        total = int(node_starts[-1])
        tokens, parents = np.zeros(total, np.int32), np.full(total, -1, np.int32)
        scores = np.zeros(total, np.float32)
        tokens[node_starts[:-1]] = roots
        if found is not None:
            pairs = [(tokens, found["tokens"]), (parents, found["parents"]), (scores, found["scores"])]
            lows, ends = node_starts[self._rows].tolist(), node_starts[self._rows + 1].tolist()
            for tree, (low, end) in enumerate(zip(lows, ends, strict=True)):
                for values, trees in pairs:
                    values[low + 1 : end] = trees[tree, 1 : end - low]
        self._stage, self._rows = None, np.empty(0, np.int32)
        return DraftBatch(request.epoch, request.step_id, node_starts, tokens, parents, scores)

    def warm_up(self, output: PassOutput, scratch_block: int, block_size: int) -> None:
        """Compile the kernels of all shapes of trees, so that no request waits for a compiler.

        Args:
            output: of a pass of one row.
            scratch_block: of the cache; written to.
        """
        trees, row = self.trees, np.zeros(1, np.int32)
        tables = np.full((1, self._max_blocks), scratch_block, np.int32)
        places = Places(tables, row.copy(), np.ones((self._model.num_depths, 1), np.int32), block_size)
        branches = 1
        while branches <= min(MAX_BRANCHES, max(self._target.max_nodes - 1, 1)):
            trees.shapes[0] = 0
            trees.shapes[0, [kernel.LENGTH, kernel.MAX_NODES]] = 1, self._target.max_nodes
            # Three levels run all kinds of launches: roots, the first level, a later one.
            trees.shapes[0, [kernel.MAX_DEPTH, kernel.MAX_BRANCHES]] = 3, branches
            self.offer_roots(output, row, [0], 0)
            self.grow(row, places)
            branches *= 2
        self._stage, self._rows = None, np.empty(0, np.int32)

    def _ask(self, stage: _Stage, rows: Int32, places: Places) -> None:
        """Bring over what the rows want; trees that only fill up the shape want nothing."""
        trees, count = self.trees, len(rows)
        stage.asked.wait()
        host = stage.asked.host
        requests = host["requests"]
        requests[count:] = 0
        for name, source in (
            (column.LENGTH, kernel.LENGTH),
            (column.MAX_NODES, kernel.MAX_NODES),
            (column.MAX_DEPTH, kernel.MAX_DEPTH),
            (column.MAX_BRANCHES, kernel.MAX_BRANCHES),
            (column.CHOICE_INDEX, kernel.CHOICE_INDEX),
            (column.TOP_K, kernel.TOP_K),
        ):
            requests[:count, name] = trees.shapes[rows, source]
        requests[:count, column.FIRST_SLOT] = trees.counts[rows, kernel.FIRST_SLOT]
        requests[:count, column.SEED_LOW : column.SEED_HIGH + 1] = trees.seeds[rows].view(np.int32).reshape(-1, 2)
        for name, source in (
            (column.TEMPERATURE, kernel.TEMPERATURE),
            (column.TOP_P, kernel.TOP_P),
            (column.MIN_P, kernel.MIN_P),
        ):
            requests[:count, name] = trees.filters[rows, source].view(np.int32)
        tables = host["block_tables"]
        tables[:count] = places.block_tables[rows, : tables.shape[1]]
        host["tree_starts"][:count] = places.tree_starts[rows]
        host["context_starts"][:, :count] = places.context_starts[:, rows]
        stage.asked.send()

    def _launch(self, stage: _Stage, block_size: int) -> None:
        """The whole of one growth; captured."""
        model, trees, beams = self._model, stage.trees, stage.beams
        num_modules = self._model.num_depths
        num_trees = len(trees.requests)
        self._offer(stage, self._root_logits[:num_trees], 0)
        hidden = self._root_hidden[:num_trees]
        for level in range(1, trees.max_depth):
            if (level - 1) * trees.max_branches >= MAX_BEAM_NODES:
                break
            module = min(level, num_modules - 1)
            gpu.choose_beams(
                trees,
                level,
                stage.asked.device["block_tables"],
                block_size,
                beams,
                num_slots=self._num_slots,
                scratch_slot=self._num_slots - 1,
                first_depth=module if num_modules > 1 else 0,
            )
            output = model.launch(stage.arrays(module), hidden, beams.sources, depth=module)
            self._offer(stage, output.logits, level)
            hidden = output.hidden
        gpu.emit_trees(trees, stage.output)

    def _offer(self, stage: _Stage, logits: torch.Tensor, level: int) -> None:
        gpu.offer_children(
            stage.trees,
            logits,
            level,
            stage.workspace,
            vocab_limit=self._vocabulary.limit,
            target_ids=self._target_ids,
            scale=self._scale,
            filtered=stage.filtered,
        )

    def _is_filtered(self, rows: Int32) -> bool:
        """Whether logits are to be cut: only where there is a temperature."""
        filters, top_ks = self.trees.filters[rows], self.trees.shapes[rows, kernel.TOP_K]
        cut = (top_ks > 0) | (filters[:, kernel.TOP_P] < 1) | (filters[:, kernel.MIN_P] > 0)
        return bool((cut & (filters[:, kernel.TEMPERATURE] > 0)).any())


def _branches(wanted: int) -> int:
    """A power of two that holds them."""
    return min(1 << (max(wanted, 1) - 1).bit_length(), MAX_BRANCHES)
