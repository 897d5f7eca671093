"""The options of one training run.

The fields are the flags of ``foretoken train``, declared only here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from foretoken.errors import ConfigError

Algorithm = Literal["eagle3", "eagle2", "standalone"]
ALGORITHMS: tuple[str, ...] = get_args(Algorithm)


def _about(help_text: str, *only: str) -> dict[str, object]:
    """Return a field's metadata; ``only``: the algorithms that it applies to; default: all."""
    return {"help": help_text, "only": only or ALGORITHMS}


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """The options of one run.

    Exactly one of ``steps`` and ``minutes`` is set; see the help texts for other None.
    """

    algorithm: Algorithm
    target: Path
    data: Path
    output: Path
    held_out: Path | None = field(
        default=None, metadata=_about("text folder or token file to measure on (default: a part of --data)")
    )
    glob: tuple[str, ...] = field(
        default=("*.py", "*.txt"), metadata=_about("names of the text files in a folder; may be given several times")
    )
    self_text: Path | None = field(
        default=None, metadata=_about("token file of text that the target wrote (foretoken train self-text)")
    )
    self_text_share: float = field(default=0.5, metadata=_about("share of each batch from --self-text"))
    steps: int | None = field(default=None, metadata=_about("optimizer steps"))
    minutes: float | None = field(
        default=None, metadata=_about("minutes of the schedule, from the end of the first step")
    )
    batch_size: int = field(default=64, metadata=_about("windows per step"))
    context_length: int = field(default=512, metadata=_about("tokens per window at which drafts start"))
    num_draft_steps: int = field(default=6, metadata=_about("draft steps to unroll, train (EAGLE3) and measure"))
    matrix_lr: float = field(default=5e-3, metadata=_about("peak learning rate of matrices (Muon)"))
    embedding_lr: float = field(
        default=2e-3, metadata=_about("peak learning rate of embeddings, heads, norms and biases (AdamW)")
    )
    weight_decay: float = field(default=0.05, metadata=_about("decoupled weight decay of matrices"))
    intermediate_size: int | None = field(
        default=None, metadata=_about("width of the feed-forward part (default: twice the hidden size)")
    )
    num_heads: int | None = field(
        default=None, metadata=_about("query heads (default: as many heads of the target's size as fit)")
    )
    num_kv_heads: int | None = field(default=None, metadata=_about("key and value heads (default: the target's ratio)"))
    draft_vocab_size: int = field(
        default=2048,
        metadata=_about(
            "most frequent tokens of the data that the head can draft; 0: all, with the target's output head",
            "eagle3",
        ),
    )
    feature_layers: tuple[int, ...] | None = field(
        default=None,
        metadata=_about(
            "layers of the target, counted from 0, whose inputs the head reads (default: 2, N / 2 and N - 3 of N)",
            "eagle3",
        ),
    )
    step_decay: float = field(
        default=0.8, metadata=_about("weight of each draft step relative to the step before", "eagle3")
    )
    hidden_size: int = field(default=192, metadata=_about("width of the draft model", "standalone"))
    num_layers: int = field(default=3, metadata=_about("layers of the draft model", "standalone"))
    distillation: float = field(
        default=0.5,
        metadata=_about("share of the loss from the target's soft labels; the rest is from the text", "standalone"),
    )
    held_out_sequences: int = field(
        default=128, metadata=_about("held-out prompts that the target continues, to measure acceptance")
    )
    evaluate_every: int = field(default=500, metadata=_about("steps between measurements"))
    log_every: int = field(default=20, metadata=_about("steps between progress lines"))
    checkpoint_every: int | None = field(default=None, metadata=_about("steps between checkpoints (default: by time)"))
    checkpoint_minutes: float = field(
        default=10.0, metadata=_about("minutes between checkpoints, without --checkpoint-every")
    )
    resume: bool = field(default=False, metadata=_about("continue from the checkpoint in --output"))
    seed: int = field(default=0, metadata=_about("seed of the weights, the order of the data and the noise"))
    device: str = field(default="auto", metadata=_about("cpu, cuda or cuda:N; auto: the GPU if there is one"))
    compile: bool | None = field(
        default=None, metadata=_about("torch.compile of the training step (default: on a GPU)")
    )

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise ConfigError("give exactly one of --steps and --minutes")
        for name in ("steps", "minutes", "batch_size", "num_draft_steps", "checkpoint_every", "checkpoint_minutes"):
            self._check(name, 0, inclusive=False)
        for name in ("evaluate_every", "log_every", "held_out_sequences", "hidden_size", "num_layers"):
            self._check(name, 0, inclusive=False)
        for name in ("intermediate_size", "num_heads", "num_kv_heads", "matrix_lr", "embedding_lr"):
            self._check(name, 0, inclusive=False)
        self._check("context_length", 8)
        self._check("draft_vocab_size", 0)
        self._check("weight_decay", 0)
        self._check("step_decay", 0, 1, inclusive=False)
        self._check("distillation", 0, 1)
        self._check("self_text_share", 0, 1)

    def _check(self, name: str, low: float, high: float | None = None, *, inclusive: bool = True) -> None:
        value = getattr(self, name)
        if value is None:
            return
        flag = "--" + name.replace("_", "-")
        if value < low or (value == low and not inclusive) or (high is not None and value > high):
            bounds = f"{'at least' if inclusive else 'more than'} {low}" + (f" and at most {high}" if high else "")
            raise ConfigError(f"{flag}: expected {bounds}, got {value}")

    def identity(self) -> dict[str, Any]:
        """Return what a resumed run must have in common with this one.

        It is everything that a step depends on.
        """
        free = {"output", "resume", "device", "compile", "log_every", "checkpoint_every", "checkpoint_minutes"}
        return {
            name: [str(each) for each in value] if isinstance(value, tuple) else str(value)
            for name in self.__dataclass_fields__
            if name not in free and (value := getattr(self, name)) is not None
        }
