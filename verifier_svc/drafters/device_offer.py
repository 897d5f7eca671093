"""What a verifier on a GPU offers to drafters that run there too: memory for steps whose results no host waits for."""

from __future__ import annotations

from typing import NamedTuple

import torch

from foretoken.drafter import Drafter, DraftsResident
from foretoken.drafting import DrafterNeeds, TargetInfo
from foretoken.errors import PreconditionError
from foretoken.models.backend import Backend, device_uuid
from foretoken.resident import ResidentLayout, ResidentMemory, StreamOrder


class ResidentOffer(NamedTuple):
    """
    Attributes:
        device: of the target.
        uuid: of it (foretoken.models.backend.device_uuid).
        tokens: that one step commits for one sequence at most: one more than the levels of a tree.
        hidden_dtype: of the target's hidden states.
    """

    device: torch.device
    uuid: str
    tokens: int
    hidden_dtype: torch.dtype

    @staticmethod
    def of_backend(backend: Backend, max_depth: int, hidden_dtype: torch.dtype) -> ResidentOffer | None:
        """None without GPU kernels."""
        uuid = device_uuid(backend)
        return ResidentOffer(backend.device, uuid, 1 + max_depth, hidden_dtype) if uuid else None

    def layout(self, target: TargetInfo, needs: DrafterNeeds) -> ResidentLayout | None:
        """Of the memory for a drafter with these needs; None for one that is not on this device, or wants none."""
        if not needs.resident or needs.device != self.uuid:
            return None
        width = len(needs.features) * target.hidden_size
        return ResidentLayout(target.max_slots, self.tokens, target.max_nodes, width, self.hidden_dtype)

    def in_process(self, drafter: Drafter, target: TargetInfo, needs: DrafterNeeds) -> ResidentMemory | None:
        """Memory for a drafter in this process, whose work shares the verifier's stream; the drafter has it already.

        Called behind its ``attach``. None as ``layout``. Raises PreconditionError for a drafter that names this device
        and takes no memory there.
        """
        layout = self.layout(target, needs)
        if layout is None:
            return None
        if not isinstance(drafter, DraftsResident):
            raise PreconditionError(f"a drafter of kind {drafter.algorithm} does not draft from device memory")
        raw = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=self.device)
        memory = ResidentMemory.over(raw, layout)
        drafter.set_resident(memory, StreamOrder())
        return memory
