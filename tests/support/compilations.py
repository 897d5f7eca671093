"""Prints the kernels that Triton would compile for a drafter's drafts, without a GPU.

A launch notes the kernel's specialization and does nothing. Run it without TRITON_INTERPRET; the
arguments are a folder to work in, the trees' levels and their branches. Each line is the phase
and the kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from drafter_svc.model.placement import ModelPlacement
from drafter_svc.trees.passes import scratch_batch
from foretoken.models.backend import Backend
from tests.support.overlap_play import Play, PlaySizes, Text
from tests.support.overlapped_drafters import make


class Compilations:
    """Stands in for Triton's launcher."""

    def __init__(self) -> None:
        self.phase = ""
        self._known: set[Hashable] = set()

    def launch(self, kernel: Any, *arguments: Any, grid: Any = None, warmup: bool = False, **options: Any) -> None:
        names = [parameter.name for parameter in kernel.params]
        given = dict(zip(names, arguments, strict=False)) | options
        key = (
            kernel.__name__,
            *(
                given[each.name] if each.is_constexpr else _specialized(each.name, given[each.name], kernel)
                for each in kernel.params
            ),
            *sorted((name, value) for name, value in options.items() if name not in names),
        )
        if key not in self._known:
            self._known.add(key)
            print(f"{self.phase}: {kernel.__name__}")


def _specialized(name: str, value: Any, kernel: Any) -> Hashable:
    """Return Triton's specialization of an argument that is not a constant."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.data_ptr() % 16 == 0
    if isinstance(value, tuple):
        return tuple(_specialized(name, part, kernel) for part in value)
    is_general = any(each.name == name and each.do_not_specialize for each in kernel.params)
    if isinstance(value, int) and not isinstance(value, bool) and not is_general:
        return value == 1, value % 16 == 0
    return type(value).__name__


def main(folder: Path, depth: int, branches: int) -> None:
    found = Compilations()
    JITFunction.run = lambda kernel, *arguments, **options: found.launch(kernel, *arguments, **options)
    nodes = 1 + depth * branches
    sizes = PlaySizes(tokens=depth + 1, nodes=nodes, batch_rows=16, prompt_rows=64, num_blocks=400)
    placement = ModelPlacement(Backend("gpu", torch.device("cpu")), torch.float32, graphs=False, warm=True)
    drafter, target, width = make("EAGLE3", folder, placement, sizes)
    found.phase = "attach"
    # Room for a block table as wide as long contexts need.
    drafter.attach(replace(target, max_model_len=1200), None)
    play = Play(drafter, "cpu", vocab=target.vocab_size, width=width, sizes=sizes)
    found.phase = "drafts"
    # Trees have fewer levels where sequences end.
    for levels in range(depth, 0, -1):
        shape = {"max_depth": levels, "max_branches": branches, "max_nodes": nodes}
        for count in (1, 2, 3, 6, 12, sizes.batch_rows):
            play.begin([Text(5, (1, 2), number, options=shape) for number in range(count)], count)
            play.prompts()
            play.send(0)
            drafter.draft(play.request(1, begins=True, is_last=False))
            play.order.calls.clear()
    model = play.overlapped._stages.levels.model
    for rows, seqs in ((1, 1), (3, 2), (7, 1), (27, 3), (33, 1), (64, 10)):
        batch = scratch_batch(rows, target, seqs=seqs, wants_logits=False)
        with torch.inference_mode():
            model.write_prompt(model.upload(batch), play.memory.prompt_hidden[1 : 1 + rows])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
