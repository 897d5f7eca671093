"""An EAGLE drafter as a process of its own, also with GPU kernels on a CPU.

Arguments: address, folders of target and head, kernels, device, element type.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import uvloop

from drafter_svc.config import DrafterSettings
from drafter_svc.model.head import HeadDrafter
from drafter_svc.model.placement import ModelPlacement
from drafter_svc.server import serve
from foretoken.models.backend import CPU, Backend

if __name__ == "__main__":
    address, target, head, kernels, device, dtype = sys.argv[1:]
    backend = CPU if kernels == "cpu" else Backend("gpu", torch.device(device))
    placement = ModelPlacement(backend, getattr(torch, dtype), graphs=False, warm=device == "cuda")
    drafter = HeadDrafter("EAGLE", Path(head), target=Path(target), placement=placement)
    uvloop.run(serve(DrafterSettings(name="eagle", address=address), lambda: drafter))
