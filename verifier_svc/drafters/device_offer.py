"""Offer a GPU verifier's device memory to drafters on the same GPU.

Steps overlap through it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from foretoken.drafter import Drafter, DraftsOverlapped
from foretoken.drafting import DrafterNeeds, TargetInfo
from foretoken.errors import PreconditionError
from foretoken.models.backend import Backend, device_uuid
from foretoken.overlap_memory import OverlapLayout, OverlapMemory, StreamOrder


class DeviceOffer(NamedTuple):
    """What is offered.

    Attributes:
        device: the target's device.
        uuid: names that device (foretoken.models.backend.device_uuid).
        tokens: the most tokens that one step commits for one sequence: one
            more than the levels of a tree.
        hidden_dtype: the element type of the target's hidden states.
        prompt_rows: rows of hidden states that one step's prompts leave at most.
    """

    device: torch.device
    uuid: str
    tokens: int
    hidden_dtype: torch.dtype
    prompt_rows: int

    @staticmethod
    def of_backend(backend: Backend, max_depth: int, hidden_dtype: torch.dtype, prompt_rows: int) -> DeviceOffer | None:
        """Return the offer of a target on this backend; None without GPU kernels."""
        uuid = device_uuid(backend)
        return DeviceOffer(backend.device, uuid, 1 + max_depth, hidden_dtype, prompt_rows) if uuid else None

    def layout(self, target: TargetInfo, needs: DrafterNeeds) -> OverlapLayout | None:
        """Return the layout of the memory for a drafter.

        It is None if the drafter is on another device or wants no memory.
        """
        if not needs.overlaps or needs.device != self.uuid:
            return None
        width = len(needs.captured_layers) * target.hidden_size
        return OverlapLayout(
            target.max_batch_slots, self.tokens, target.max_nodes, width, self.hidden_dtype, self.prompt_rows
        )

    def in_process(self, drafter: Drafter, target: TargetInfo, needs: DrafterNeeds) -> OverlapMemory | None:
        """Give memory to a drafter in this process, and return it.

        The drafter's work shares the verifier's stream.

        Called after the drafter's ``attach``. Returns None as ``layout`` does. Raises
        PreconditionError if the drafter names this device and takes no memory there.
        """
        layout = self.layout(target, needs)
        if layout is None:
            return None
        if not isinstance(drafter, DraftsOverlapped):
            raise PreconditionError(f"a drafter of kind {drafter.algorithm} does not draft from device memory")
        raw = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=self.device)
        memory = OverlapMemory.over(raw, layout)
        drafter.set_overlap_memory(memory, StreamOrder())
        return memory
