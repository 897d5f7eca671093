"""One training run: schedule, optimizers, progress, checkpoints.

It only knows algorithms as ``Recipe``.
"""

from __future__ import annotations

import dataclasses
import json
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.errors import CheckpointError, ConfigError
from foretoken.train.data import MixedWindows, load_split, load_tokens
from foretoken.train.device import pick_device
from foretoken.train.eagle import Eagle2Recipe, Eagle3Recipe
from foretoken.train.evaluate import Acceptance, held_out_texts, measure
from foretoken.train.options import TrainOptions
from foretoken.train.recipe import Recipe
from foretoken.train.standalone import StandaloneRecipe
from foretoken.train.target import FrozenTarget

WARM_UP_STEPS = 100
DECAY_SHARE = 0.5
MAX_GRADIENT_NORM = 1.0
CHECKPOINT_FILE = "training.pt"


def train(options: TrainOptions) -> Acceptance:
    """Train from the start or from a checkpoint.

    Write the drafter and ``train.json`` to ``options.output``.

    Raises ConfigError or CheckpointError for errors that the user can fix.
    """
    if not options.resume and (options.output / "config.json").exists():
        raise ConfigError(f"--output {options.output} holds a checkpoint; choose another folder, or remove that one")
    device = pick_device(options.device)
    if options.compile is None:
        options = dataclasses.replace(options, compile=device.type == "cuda")
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    target = FrozenTarget(options.target, device)
    split = load_split(
        options.data, options.held_out, options.glob, options.target, target.separator, target.config.vocab_size
    )
    train_tokens, held_out = split.train.to(device), split.held_out.to(device)
    self_text: Tensor | None = None
    if options.self_text is not None:
        self_text = load_tokens(options.self_text, (), options.target, target.separator, target.config.vocab_size)
    recipe = _recipe(target, options, device, train_tokens)
    length = options.context_length + options.num_draft_steps + 1
    texts = held_out_texts(target, held_out, options.held_out_sequences, length, options.batch_size)
    size = sum(each.numel() for each in recipe.module.parameters())
    _say(f"{options.algorithm.upper()}: {size:,} parameters, {len(train_tokens):,} training tokens, {device}")
    streams = [train_tokens] if self_text is None else [train_tokens, self_text.to(device)]
    return Trainer(options, recipe, streams, texts, device).run()


def learning_rate_share(step: int, progress: float, warm_up_steps: int) -> float:
    """Return the factor of all learning rates.

    It warms up linearly by step, stays constant, then decays linearly by ``progress`` (0 to 1).
    """
    return min(1.0, (step + 1) / warm_up_steps, max(0.0, (1.0 - progress) / DECAY_SHARE))


@dataclass(slots=True)
class Progress:
    """The progress of a run, kept in its checkpoints.

    ``seconds`` exclude the first step, which compiles.
    """

    step: int = 0
    seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)


class Trainer:
    """The loop of one run. Muon optimizes matrices, AdamW everything else."""

    def __init__(
        self, options: TrainOptions, recipe: Recipe, streams: list[Tensor], texts: Tensor, device: torch.device
    ) -> None:
        """``streams``: tokens of the data, then tokens of the target's own text, if any."""
        self.options = options
        self.recipe = recipe
        self.device = device
        self.progress = Progress()
        self._texts = texts
        self._windows = MixedWindows(
            streams,
            options.self_text_share if len(streams) > 1 else 0.0,
            recipe.window,
            options.context_length,
            options.batch_size,
            options.seed,
        )
        self._optimizers = _optimizers(recipe.module, options, device)
        self._peaks = [[group["lr"] for group in each.param_groups] for each in self._optimizers]
        self._warm_up_steps = max(1, min(WARM_UP_STEPS, (options.steps or 10 * WARM_UP_STEPS) // 10))
        self._recent: list[Tensor] = []
        self._logged = (0, 0.0)
        # The last measurement, by its step.
        self._measured: dict[int, Acceptance] = {}
        if options.resume:
            self._load()

    def run(self) -> Acceptance:
        """Train to the schedule's end, measure, save."""
        progress = self.progress
        clock = time.monotonic() - progress.seconds
        saved_at = progress.seconds
        is_first = True
        while (share := self._share_done()) < 1.0:
            self._recent.append(self._train_step(share))
            progress.step += 1
            if is_first:
                # The schedule's time excludes compilation.
                self._synchronize()
                clock, is_first = time.monotonic() - progress.seconds, False
                self._logged = (progress.step, progress.seconds)
            progress.seconds = time.monotonic() - clock
            if progress.step % self.options.log_every == 0:
                self._log()
            if progress.step % self.options.evaluate_every == 0:
                paused = time.monotonic()
                self._measure()
                clock += time.monotonic() - paused
            if self._is_checkpoint_due(progress.seconds - saved_at):
                self._save()
                saved_at = progress.seconds
        if self._recent:
            self._log()
        acceptance = self._measured.get(progress.step) or self._measure()
        self._finish(acceptance)
        return acceptance

    def _train_step(self, share: float) -> Tensor:
        rate = learning_rate_share(self.progress.step, share, self._warm_up_steps)
        with self._autocast():
            loss = self.recipe.loss(self._windows.batch(self.progress.step), self.progress.step)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.recipe.module.parameters(), MAX_GRADIENT_NORM)
        for optimizer, peaks in zip(self._optimizers, self._peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _share_done(self) -> float:
        if self.options.steps is not None:
            return self.progress.step / self.options.steps
        assert self.options.minutes is not None
        return self.progress.seconds / (60.0 * self.options.minutes)

    def _is_checkpoint_due(self, seconds: float) -> bool:
        if self.options.checkpoint_every is not None:
            return self.progress.step % self.options.checkpoint_every == 0
        return seconds >= 60.0 * self.options.checkpoint_minutes

    def _log(self) -> None:
        progress = self.progress
        loss = float(torch.stack(self._recent).mean())
        self._recent = []
        since_step, since = self._logged
        tokens = (progress.step - since_step) * self.options.batch_size * self.options.context_length
        speed = tokens / max(progress.seconds - since, 1e-9)
        self._logged = (progress.step, progress.seconds)
        progress.history.append({"step": progress.step, "seconds": round(progress.seconds, 2), "loss": round(loss, 5)})
        done = f"{progress.seconds:.1f} s  {100 * min(1.0, self._share_done()):.0f} %"
        _say(f"step {progress.step}  {done}  loss {loss:.4f}  {speed:,.0f} tokens/s")

    def _measure(self) -> Acceptance:
        with self._autocast():
            acceptance = measure(self.recipe, self._texts, self.options.batch_size)
        self.progress.history.append(
            {"step": self.progress.step, "acceptance": [round(each, 4) for each in acceptance.per_step]}
        )
        self._measured = {self.progress.step: acceptance}
        _say(f"step {self.progress.step}  {acceptance}")
        return acceptance

    def _save(self) -> None:
        """Write a checkpoint to a temporary file and rename it.

        So a kill leaves the last one whole.
        """
        self.options.output.mkdir(parents=True, exist_ok=True)
        file = self.options.output / CHECKPOINT_FILE
        state = {
            "identity": self.options.identity(),
            "progress": dataclasses.asdict(self.progress),
            "recent": self._recent,
            "module": self.recipe.module.state_dict(),
            "optimizers": [each.state_dict() for each in self._optimizers],
        }
        torch.save(state, file.with_suffix(".part"))
        file.with_suffix(".part").replace(file)
        _say(f"step {self.progress.step}  checkpoint written: {file}")

    def _load(self) -> None:
        file = self.options.output / CHECKPOINT_FILE
        if not file.is_file():
            raise CheckpointError(f"--resume: there is no {file}")
        state = torch.load(file, map_location=self.device, weights_only=True)
        now, then = self.options.identity(), state["identity"]
        for name in sorted(now.keys() | then.keys()):
            if now.get(name) != then.get(name):
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"--resume: {flag} was {then.get(name)} and is {now.get(name)}")
        self.progress = Progress(**state["progress"])
        self._recent = state["recent"]
        self.recipe.module.load_state_dict(state["module"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    def _finish(self, acceptance: Acceptance) -> None:
        options, progress = self.options, self.progress
        self.recipe.save(options.output)
        report = {
            "algorithm": options.algorithm,
            "num_parameters": sum(each.numel() for each in self.recipe.module.parameters()),
            "num_steps": progress.step,
            "num_tokens": progress.step * options.batch_size * options.context_length,
            "seconds": round(progress.seconds, 1),
            "acceptance_per_step": [round(each, 4) for each in acceptance.per_step],
            "tokens_per_step": round(acceptance.tokens_per_step, 4),
            "num_chains": acceptance.num_chains,
            "options": {name: value for name, value in options.identity().items() if not _is_path(options, name)},
            "history": progress.history,
        }
        (options.output / "train.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        (options.output / CHECKPOINT_FILE).unlink(missing_ok=True)
        _say(f"written: {options.output}")
        if acceptance.is_useless:
            _say(
                f"WARNING: a step with this drafter writes {acceptance.tokens_per_step:.2f} tokens, and 1 without, so "
                f"drafts are not worth their cost. Train for more than {progress.step} steps (--steps, --minutes), on "
                "more text like your requests (--data), or on text of the target's own (--self-text)"
            )

    def _autocast(self) -> AbstractContextManager[object]:
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _recipe(target: FrozenTarget, options: TrainOptions, device: torch.device, tokens: Tensor) -> Recipe:
    if options.algorithm == "eagle3":
        return Eagle3Recipe(target, options, device, tokens)
    if options.algorithm == "eagle2":
        return Eagle2Recipe(target, options, device)
    return StandaloneRecipe(target, options, device)


def _optimizers(module: nn.Module, options: TrainOptions, device: torch.device) -> list[torch.optim.Optimizer]:
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        is_table = name.endswith(("embed_tokens.weight", "lm_head.weight"))
        (matrices if parameter.ndim == 2 and not is_table else others).append(parameter)
    return [
        torch.optim.Muon(
            matrices, lr=options.matrix_lr, weight_decay=options.weight_decay, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(
            others, lr=options.embedding_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=device.type == "cuda"
        ),
    ]


def _is_path(options: TrainOptions, name: str) -> bool:
    return isinstance(getattr(options, name), Path)


def _say(line: str) -> None:
    print(line, flush=True)
