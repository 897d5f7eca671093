"""Draft heads on a GPU: passes over arrays that are on the device."""

from __future__ import annotations

from pathlib import Path

import torch

from foretoken.models.batch import ForwardBatch
from foretoken.models.device_batch import DeviceArrays
from foretoken.models.device_pass import DevicePass
from foretoken.models.device_program import DeviceProgram
from foretoken.models.device_sizes import PassSizes
from foretoken.models.draft_head import DraftHead, HeadOutput, LoadedHead


class DeviceDraftHead(DraftHead[DeviceProgram]):
    """A draft head whose weights and cache are on a GPU.

    ``launch`` and ``extend`` do not wait for the device, and a graph may capture them.
    """

    def __init__(self, head: LoadedHead, num_positions: int, sizes: PassSizes) -> None:
        """``num_positions``: rotary positions that may occur. ``sizes``: of the largest pass."""
        self._passes = DevicePass(head.config.body, head.cache, num_positions, sizes)
        super().__init__(head, self._passes)

    def tune(self, path: Path | None) -> None:
        """Time the matmuls and use the fastest from now on.

        ``path`` keeps the choices for the next start.
        """
        for depth in range(self.num_depths):
            self._program(depth, from_target=True)
            self._program(depth, from_target=False)
        self._entry_program()
        self._passes.tune(path)

    def launch(self, arrays: DeviceArrays, hidden: torch.Tensor, sources: torch.Tensor, *, depth: int) -> HeadOutput:
        """Launch a recurrent pass.

        Args:
            arrays: logits of all rows are wanted.
            hidden: [any, hidden_size] on the GPU; may be the result of the last pass.
            sources: int32 [rows]; the row of ``hidden`` that each row is fed.
        """
        self._passes.gather_given(hidden, sources)
        self._passes.launch(self._program(depth, from_target=False), arrays)
        return self._output(len(arrays.token_ids), len(arrays.token_ids))

    def extend(self, arrays: DeviceArrays, hidden: torch.Tensor) -> HeadOutput:
        """Launch the first module's pass over new tokens.

        It takes the target's hidden states, as ``forward`` does.

        ``hidden``: bfloat16, float16 or float32 [rows, hidden_width] on the GPU.
        """
        loaded = self._program(0, from_target=True)
        self._passes.gather_given(hidden)
        self._passes.launch(loaded, arrays)
        return self._output(len(arrays.logit_rows), len(arrays.token_ids))

    def upload(self, batch: ForwardBatch) -> DeviceArrays:
        """Upload as DevicePass.upload does."""
        return self._passes.upload(batch)

    def write_prompt(self, arrays: DeviceArrays, hidden: torch.Tensor) -> None:
        """Launch a pass that writes the first module's KV entries, and gives no logits.

        ``hidden``: as for ``extend``.
        """
        # Loading it may make room for what is given.
        loaded = self._entry_program()
        self._passes.gather_given(hidden)
        self._passes.launch(loaded, arrays)

    def _entry_program(self) -> DeviceProgram:
        return self._program(0, from_target=True) if self.write_kv_entries is None else self._kv_only_program()
