"""The kernels of an overlapped step before and after the target's pass.

The kernels before the pass lay out its rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items

import torch
from foretoken_kernels.gpu.forced_walk import force_walk
from foretoken_kernels.gpu.kv_commit import kv_commit
from foretoken_kernels.gpu.overlap_results import advance_batch, finish_step, gather_hidden
from foretoken_kernels.gpu.overlap_rows import lay_out_rows
from foretoken_kernels.gpu.shared_rows import share_rows
from foretoken_kernels.overlap_state import BatchState, DraftedTrees, StepResults

from foretoken.models.pinned_buffers import PinnedBuffers
from foretoken.overlap_memory import OverlapMemory
from verifier_svc.model.device_runner import DeviceRunner
from verifier_svc.overlap.stage import Stage
from verifier_svc.sampling.device_logprobs import LogprobNumbers, logprob_numbers
from verifier_svc.sampling.device_masks import SentMasks
from verifier_svc.sampling.device_walker import DeviceWalker
from verifier_svc.scheduling.draft import Draft


class OverlapKernels:
    """Launch the kernels of steps over one memory.

    Args:
        state: the batch rows in device memory.
        simulated: mean tokens of a step with a tree, for benchmarks only. None: the target decides.
    """

    def __init__(
        self,
        runner: DeviceRunner,
        walker: DeviceWalker,
        memory: OverlapMemory,
        state: BatchState,
        simulated: float | None,
    ) -> None:
        self._runner, self._walker, self._memory, self._state = runner, walker, memory, state
        self._simulated = simulated
        device, batch_rows, nodes = state.batch_slots.device, memory.layout.batch_rows, memory.layout.nodes
        self._owed = torch.zeros(batch_rows, dtype=torch.float32, device=device)
        self._drafted = DraftedTrees(memory.draft_stamp, memory.num_nodes, memory.draft_tokens, memory.draft_parents)
        sizes = {
            "stamp": (1,),
            "num_nodes": (batch_rows,),
            "tokens": (batch_rows, nodes),
            "parents": (batch_rows, nodes),
        }
        self._found = PinnedBuffers({name: (size, torch.int32) for name, size in sizes.items()}, device)
        self._outcome = StepResults(
            memory.stamp, memory.counts, memory.lengths, memory.num_left, memory.new_tokens, memory.hidden
        )

    def send_found(self, found: Mapping[int, Draft], number: int) -> None:
        """Send trees from the host, by batch row, for the step after step ``number``."""
        self._found.wait()
        host = self._found.host
        host["stamp"][0] = number
        host["num_nodes"][:] = 0
        for index, draft in found.items():
            num_nodes = draft.tree.num_nodes
            host["num_nodes"][index] = num_nodes
            host["tokens"][index, :num_nodes] = draft.tree.tokens
            host["parents"][index, :num_nodes] = draft.tree.parents
        self._found.send()

    def share_out(self, stage: Stage, num_rows: int) -> None:
        """Divide ``num_rows`` rows among the batch rows by their trees' scores; lay them out."""
        share_rows(
            self._state,
            self._drafted,
            DraftedTrees(**self._found.device),
            self._memory.draft_scores,
            stage.widths.device["widths"],
            stage.rows.row_starts,
            stage.walk.asked.device["row_starts"],
            num_rows=num_rows,
            max_width=stage.size.max_width,
        )
        self.lay_out(stage)

    def lay_out(self, stage: Stage) -> None:
        """Fill the pass's rows with the batch rows' trees."""
        lay_out_rows(
            self._state,
            self._drafted,
            DraftedTrees(**self._found.device),
            stage.target_pass.batch.arrays.block_tables,
            stage.rows,
            block_size=self._runner.block_size,
            num_kv_slots=self._runner.num_blocks * self._runner.block_size,
            vocab_size=self._runner.config.vocab_size,
            max_width=stage.size.max_width,
            max_depth=self._memory.layout.tokens - 1,
        )

    def conclude(self, stage: Stage, masks: SentMasks | None = None) -> None:
        """Sample, walk the trees, and bring batch rows, cache and results up to date."""
        walk, max_width = stage.walk.result, stage.size.max_width
        self._walker.sample_and_walk(stage.walk, stage.target_pass.logits, masks)
        if self._simulated is not None:
            force_walk(stage.rows, walk, self._owed, self._simulated, max_width)
        advance_batch(self._state, stage.rows, walk, self._outcome)
        if max_width > 1:
            kv_commit(
                self._runner.planes,
                walk.accepted,
                walk.num_accepted,
                stage.rows.tree_starts,
                stage.target_pass.batch.arrays.block_tables,
                self._runner.block_size,
            )
        if stage.target_pass.hidden_states is not None and self._memory.layout.hidden_width:
            gather_hidden(stage.target_pass.hidden_states, stage.rows, walk, self._outcome)
        self.finish()

    def finish(self) -> None:
        """End the step; all that an empty one does."""
        finish_step(self._state, self._outcome)

    def logprobs(self, stage: Stage, batch_rows: Items[int], depth: int, most: int) -> LogprobNumbers:
        """Launch the logprobs of ``depth`` tokens of each of these batch rows, real or not.

        The next pass overwrites the logits. Which tokens are real is known with the results.

        Args:
            most: alternatives of a token.
        """
        device, walk, logits = self._state.batch_slots.device, stage.walk.result, stage.target_pass.logits
        on_host = torch.tensor(batch_rows, dtype=torch.int64)
        at = (on_host.pin_memory() if device.type == "cuda" else on_host).to(device, non_blocking=True)
        rows = stage.rows.row_starts[at, None] + walk.nodes[at, :depth]
        tokens = walk.tokens[at, :depth]
        numbers = logprob_numbers(
            logits,
            rows.long().clamp(0, len(logits) - 1).flatten(),
            tokens.long().clamp(0, logits.shape[1] - 1).flatten(),
            most,
        )
        return numbers.to_host()
