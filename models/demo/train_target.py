"""Train the demo target model on the arrays that ``build_data`` wrote.

    python -m models.demo.train_target --data DATA --output TARGET --minutes 7

The schedule follows the clock (or ``--steps``): warm-up, constant, then a linear decay to zero that
always finishes. It writes the checkpoint into ``--output`` and ``loss.csv`` (training and held-out
loss) beside it.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from models.demo.checkpoint import save_checkpoint
from models.demo.llama import Llama, LlamaShape
from models.demo.muon import Muon

WARM_UP_STEPS = 150
DECAY_SHARE = 0.45
MAX_GRADIENT_NORM = 1.0
LOG_EVERY_STEPS = 20


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """The training options. Exactly one of ``minutes`` and ``steps`` is set."""

    batch_size: int = 128
    context_length: int = 2_048
    minutes: float | None = None
    steps: int | None = None
    matrix_lr: float = 1e-2
    embedding_lr: float = 6e-3
    weight_decay: float = 0.1
    evaluate_every_steps: int = 200
    held_out_sequences: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.minutes is None) == (self.steps is None):
            raise ValueError("set exactly one of minutes and steps")


@dataclass(frozen=True, slots=True)
class LossRow:
    """One line of the loss log. Losses are nats a token; ``held_out`` is set only if measured."""

    step: int
    tokens: int
    seconds: float
    learning_rate_share: float
    train: float
    held_out: float | None


def learning_rate_share(step: int, progress: float) -> float:
    """Return the factor on all learning rates.

    It warms up linearly by step, stays constant, and decays linearly by progress (0 to 1).
    """
    warm_up = min(1.0, (step + 1) / WARM_UP_STEPS)
    return min(warm_up, max(0.0, (1.0 - progress) / DECAY_SHARE))


def training_windows(tokens: Tensor, plan: TrainingPlan, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield endless batches [batch_size, context_length + 1].

    An epoch has every window once. Each epoch is shifted at random.
    """
    length = plan.context_length + 1
    if len(tokens) < 2 * length:
        raise ValueError(f"{len(tokens)} training tokens are too few for windows of {length}")
    span = torch.arange(length, device=tokens.device)
    pending = torch.empty(0, dtype=torch.int64)
    while True:
        while len(pending) < plan.batch_size:
            shift = int(torch.randint(plan.context_length, (1,), generator=generator))
            starts = torch.arange(shift, len(tokens) - length + 1, plan.context_length)
            pending = torch.cat([pending, starts[torch.randperm(len(starts), generator=generator)]])
        chosen, pending = pending[: plan.batch_size], pending[plan.batch_size :]
        yield tokens[chosen.to(tokens.device)[:, None] + span].long()


class Trainer:
    """One training run: the model, two optimisers, the clock and the log."""

    def __init__(self, shape: LlamaShape, plan: TrainingPlan, device: torch.device) -> None:
        torch.manual_seed(plan.seed)
        torch.set_float32_matmul_precision("high")
        self.plan = plan
        self.device = device
        self.model = Llama(shape).to(device)
        matrices = [each for each in self.model.model.layers.parameters() if each.ndim == 2]
        embedding = self.model.model.embed_tokens.weight
        scales = [each for each in self.model.parameters() if each.ndim == 1]
        self.optimizers: list[torch.optim.Optimizer] = [
            Muon(matrices, lr=plan.matrix_lr, weight_decay=plan.weight_decay),
            torch.optim.AdamW(
                [{"params": [embedding], "weight_decay": plan.weight_decay}, {"params": scales, "weight_decay": 0.0}],
                lr=plan.embedding_lr,
                betas=(0.9, 0.95),
                fused=device.type == "cuda",
            ),
        ]
        self._peak_rates = [[group["lr"] for group in each.param_groups] for each in self.optimizers]
        self.rows: list[LossRow] = []
        self._loss = self._compiled_loss()

    def train(self, train_tokens: Tensor, held_out_tokens: Tensor) -> None:
        """Run the whole plan. Both token arrays are int32 [num_tokens] on the device."""
        generator = torch.Generator().manual_seed(self.plan.seed)
        windows = training_windows(train_tokens, self.plan, generator)
        recent: list[Tensor] = []
        started = time.monotonic()
        step = 0
        while (progress := self._progress(step, time.monotonic() - started)) < 1.0:
            rate = learning_rate_share(step, progress)
            recent.append(self._step(next(windows), rate))
            step += 1
            if step == 1:
                self._synchronize()  # The clock of the schedule starts after compilation.
                started = time.monotonic()
            if step % LOG_EVERY_STEPS == 0:
                self._log(step, time.monotonic() - started, rate, recent, held_out_tokens)
                recent = []
        self._log(step, time.monotonic() - started, 0.0, recent, held_out_tokens, is_last=True)

    def held_out_loss(self, tokens: Tensor) -> float:
        """Return the mean loss in nats a token over evenly spread windows of held-out tokens."""
        length = self.plan.context_length + 1
        count = min(self.plan.held_out_sequences, max(1, (len(tokens) - 1) // self.plan.context_length))
        starts = torch.linspace(0, max(0, len(tokens) - length), count).long().to(tokens.device)
        span = torch.arange(min(length, len(tokens)), device=tokens.device)
        losses: list[Tensor] = []
        with torch.no_grad(), self._autocast():
            for chosen in torch.split(starts, self.plan.batch_size):
                losses.append(self.model(tokens[chosen[:, None] + span].long()) * len(chosen))
        return float(torch.stack(losses).sum()) / len(starts)

    def _step(self, batch: Tensor, rate: float) -> Tensor:
        with self._autocast():
            loss = self._loss(batch)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRADIENT_NORM, foreach=True)
        for optimizer, peaks in zip(self.optimizers, self._peak_rates, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _log(
        self, step: int, seconds: float, rate: float, recent: list[Tensor], held_out: Tensor, is_last: bool = False
    ) -> None:
        tokens = step * self.plan.batch_size * self.plan.context_length
        train_loss = float(torch.stack(recent).mean()) if recent else math.nan
        is_due = is_last or step % self.plan.evaluate_every_steps == 0
        row = LossRow(step, tokens, seconds, rate, train_loss, self.held_out_loss(held_out) if is_due else None)
        self.rows.append(row)
        held_out_text = "" if row.held_out is None else f"  held-out {row.held_out:.4f}"
        speed = tokens / max(seconds, 1e-9) / 1e6
        print(
            f"step {step:6d}  {seconds:6.1f} s  {tokens / 1e6:8.1f} M tokens  {speed:.2f} M/s  rate {rate:.3f}"
            f"  train {train_loss:.4f}{held_out_text}",
            flush=True,
        )

    def _progress(self, step: int, seconds: float) -> float:
        if self.plan.steps is not None:
            return step / self.plan.steps
        assert self.plan.minutes is not None
        return 0.0 if step == 0 else seconds / (60.0 * self.plan.minutes)

    def _compiled_loss(self) -> Callable[[Tensor], Tensor]:
        if self.device.type != "cuda":
            return self.model
        compiled: Callable[[Tensor], Tensor] = torch.compile(self.model, dynamic=False)
        return compiled

    def _autocast(self) -> AbstractContextManager[object]:
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def write_log(rows: list[LossRow], file: Path) -> None:
    """Write one CSV line for each logged step. ``held_out`` is empty if it was not measured."""
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(LossRow.__slots__)
        for row in rows:
            held_out = "" if row.held_out is None else f"{row.held_out:.5f}"
            writer.writerow(
                [
                    row.step,
                    row.tokens,
                    f"{row.seconds:.1f}",
                    f"{row.learning_rate_share:.4f}",
                    f"{row.train:.5f}",
                    held_out,
                ]
            )


def parse_shape(text: str) -> LlamaShape:
    """Return a shape from JSON with ``LlamaShape``'s fields. Missing fields get their defaults."""
    return LlamaShape(**json.loads(text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = TrainingPlan(steps=1)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch-size", type=int, default=defaults.batch_size)
    parser.add_argument("--context-length", type=int, default=defaults.context_length)
    parser.add_argument("--matrix-lr", type=float, default=defaults.matrix_lr)
    parser.add_argument("--embedding-lr", type=float, default=defaults.embedding_lr)
    parser.add_argument("--shape", type=parse_shape, default=LlamaShape(), help="JSON with LlamaShape's fields")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    plan = TrainingPlan(
        batch_size=options.batch_size,
        context_length=options.context_length,
        minutes=options.minutes,
        steps=options.steps,
        matrix_lr=options.matrix_lr,
        embedding_lr=options.embedding_lr,
    )
    device = torch.device(options.device)
    train, held_out = (
        torch.from_numpy(np.load(options.data / f"{side}.npy").astype(np.int32)).to(device)
        for side in ("train", "held_out")
    )
    trainer = Trainer(options.shape, plan, device)
    print(f"{trainer.model.num_parameters} parameters, {len(train)} training tokens", flush=True)
    trainer.train(train, held_out)
    save_checkpoint(trainer.model, options.data / "tokenizer", options.output)
    write_log(trainer.rows, options.output.with_name("loss.csv"))


if __name__ == "__main__":
    main()
