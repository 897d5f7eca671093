"""Drafters of each kind with small models, for overlapped drafts on a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from drafter_svc.model.head import HeadDrafter
from drafter_svc.model.placement import ModelPlacement
from drafter_svc.model.standalone import StandaloneDrafter
from foretoken.drafting import TargetInfo
from foretoken.models.backend import Backend
from tests.references.head_files import (
    HIDDEN,
    NUM_LAYERS,
    VOCAB,
    eagle3_files,
    eagle_files,
    mimo_target,
    random_target,
    write_folder,
)
from tests.support.overlap_play import SIZES, PlaySizes
from tests.support.paged_draft import target_info
from tests.support.tiny_checkpoint import save_llama

KINDS = ["EAGLE", "EAGLE3", "MTP", "STANDALONE"]


def make(
    kind: str, folder: Path, placement: ModelPlacement, sizes: PlaySizes = SIZES
) -> tuple[HeadDrafter | StandaloneDrafter, TargetInfo, int]:
    """Return a drafter, its target, and the width of its hidden states."""
    target = folder / "target"
    info: dict[str, Any] = {
        "max_batch_slots": sizes.batch_rows + 2,
        "max_nodes": sizes.nodes,
        "num_blocks": sizes.num_blocks,
    }
    info |= {"checkpoint": str(target), "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_layers": NUM_LAYERS}
    if kind == "STANDALONE":
        save_llama(target, vocab_size=64)
        return StandaloneDrafter(target, placement=placement), target_info(**(info | {"vocab_size": 64})), 0
    if kind.startswith("MTP"):
        mimo_target(target, int(kind[3:] or 1))
        return HeadDrafter("MTP", None, placement=placement), target_info(**info), HIDDEN
    random_target(target)
    is_eagle3 = kind == "EAGLE3"
    write_folder(folder / "head", *(eagle3_files() if is_eagle3 else eagle_files()))
    drafter = HeadDrafter("EAGLE3" if is_eagle3 else "EAGLE", folder / "head", placement=placement)
    return drafter, target_info(**info), 3 * HIDDEN if is_eagle3 else HIDDEN


def on(device: str) -> ModelPlacement:
    """Return the placement; the interpreter needs no compilation."""
    return ModelPlacement(
        Backend("gpu", torch.device(device)), torch.float32, graphs=device == "cuda", warm=device == "cuda"
    )
