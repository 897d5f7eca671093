"""Muon: momentum whose update is orthogonalised, for the weight matrices of hidden layers.

After K. Jordan's Muon with the update scale of Moonlight (root mean square 0.2, so AdamW's learning
rates apply). Matrices of one shape are orthogonalised in one batch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

NEWTON_SCHULZ_STEPS = 5
UPDATE_RMS = 0.2


class Muon(torch.optim.Optimizer):
    """Orthogonalised Nesterov momentum with decoupled weight decay, for matrices only."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: defaultdict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for parameters in by_shape.values():
                self._update(parameters, group["lr"], group["momentum"], group["weight_decay"])

    def _update(self, parameters: list[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        buffers: list[Tensor] = []
        for parameter in parameters:
            state = self.state[parameter]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(parameter)
            buffers.append(state["momentum"])
        torch._foreach_lerp_(buffers, gradients, 1.0 - momentum)
        nesterov = torch._foreach_lerp(gradients, buffers, momentum)
        updates = orthogonalise(torch.stack(list(nesterov)))
        scale = UPDATE_RMS * math.sqrt(max(updates.shape[-2:]))
        weights: list[Tensor] = list(parameters)
        torch._foreach_mul_(weights, 1.0 - lr * weight_decay)
        torch._foreach_add_(weights, list(updates.to(parameters[0].dtype).unbind()), alpha=-lr * scale)


def orthogonalise(matrices: Tensor) -> Tensor:
    """Push the singular values of each matrix in [batch, rows, columns] towards 1, in bfloat16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x: Tensor = matrices.to(torch.bfloat16)
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x
