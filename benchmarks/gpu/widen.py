"""Widen the trained demo target and its EAGLE-3 head: the same function at a large model's cost.

    python -m benchmarks.gpu.widen --output DIR [--shape llama-3.1-8b]

It writes DIR/target and DIR/eagle3. Text, acceptance and drafts are the demo's; bytes and
operations are the larger shape's. So a measured speed-up is that of a real head on a model of this
size. How each part keeps its function:

- *Hidden state.* The wide state holds the small state x COPIES times, then zeros. An RMS norm over
  it gives ``x / sqrt(COPIES sum(x^2) / W' + eps')``. With ``eps' = eps s^2`` this is the small
  norm's output divided by ``s = sqrt(COPIES W / W')``. So norm weights stay as they are, and the
  matrix after the norm is multiplied by s.
- *Matrices after a norm* read all copies. ``s`` times a bfloat16 number is not a bfloat16 number,
  so the product is split: the first copy gets its rounding, the second the rounding of the
  remainder, and so on. Three terms carry 24 bits, as float32 does, though every stored number is a
  bfloat16.
- *Matrices that write the hidden state* repeat their rows for each copy. This is exact.
- *Heads.* The rotary embedding rotates the pair of dimensions (i, i + d / 2) in both models. With
  the base ``theta' = theta^(d' / d)`` pair i of the wide head rotates as fast as pair i of the
  small one. The scores' scale is ``d'^-0.5``, so queries are multiplied by ``sqrt(d' / d)``, split
  as above.
- *Layers.* Zeros multiply the output of an added layer. Added layers are placed so that the three
  hidden states that the head reads enter the layers that engines take by default: 2, n / 2, n - 3.
- *Vocabulary.* Added rows of the output head repeat the row of RESERVED_ID, which training never
  emits. So an engine that samples among all rows writes the same text.

Weights that no output depends on are random, not zero: with zeros a GPU draws less power and runs
faster.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.checkpoint import (
    DEMO,
    DRAFT_VOCAB_SIZE,
    SHAPES,
    TOKENIZER_FILES,
    ModelSizes,
    best_device,
    head_specs,
    random_matrix,
)
from benchmarks.gpu.sharded import TensorSpec, write_checkpoint
from foretoken.models.config import ModelConfig, load_config, read_config_file
from foretoken.models.draft_config import head_captured_layers, head_config
from foretoken.models.tensor_shapes import tensor_shapes
from foretoken.models.weights import Checkpoint

COPIES = 3
# The reserved id of the demo whose logit stays farthest below the best one: by 10.66 over 40
# held-out prompts (benchmarks.gpu.widen_check.reserved_margins).
RESERVED_ID = 9


class WidenError(Exception):
    """The shape cannot hold the small model, or a part of the model cannot be widened."""


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """The sizes of one decoder layer, small or wide."""

    hidden: int
    middle: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class Widening:
    """Widens tensors to another model's sizes. Each method returns a wide bfloat16 tensor.

    ``free`` arguments are random [rows, columns]; the random values that remain meet only zeros.
    """

    small: LayerSizes
    wide: LayerSizes

    def __post_init__(self) -> None:
        small, wide = self.small, self.wide
        if COPIES * small.hidden > wide.hidden:
            raise WidenError(f"a hidden size of {wide.hidden} does not hold {COPIES} times {small.hidden}")
        for name in ("middle", "kv_heads", "group", "head_dim"):
            if getattr(small, name) > getattr(wide, name):
                raise WidenError(f"{name} {getattr(wide, name)} is less than the small model's {getattr(small, name)}")

    @property
    def norm_scale(self) -> float:
        """The divisor of a norm's output in the wide model. Its square is the factor of eps."""
        return math.sqrt(COPIES * self.small.hidden / self.wide.hidden)

    def norm(self, weight: torch.Tensor) -> torch.Tensor:
        """Widen a norm's weights [hidden]. After the copies there is nothing to scale."""
        out = torch.ones(self.wide.hidden, dtype=torch.bfloat16)
        out[: COPIES * self.small.hidden] = weight.repeat(COPIES)
        return out

    def embedding(self, table: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Widen the embedding [vocab, hidden]. Added rows and columns are zeros."""
        out = torch.zeros(vocab_size, self.wide.hidden, dtype=torch.bfloat16)
        out[: len(table), : COPIES * self.small.hidden] = table.repeat(1, COPIES)
        return out

    def output_head(self, rows: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Widen the output head [vocab, hidden]. Added rows repeat the row of RESERVED_ID."""
        read = self._read(rows, torch.zeros(len(rows), self.wide.hidden, dtype=torch.bfloat16))
        out = read[RESERVED_ID].repeat(vocab_size, 1)
        out[: len(rows)] = read
        return out

    def queries(self, matrix: torch.Tensor, free: torch.Tensor, inputs: int = 1) -> torch.Tensor:
        """Widen the query matrix [heads * head_dim, inputs * hidden].

        Added dimensions of a head are zero, so keys may hold anything there. ``inputs``: the number
        of normed states, side by side, that the matrix reads (two in an EAGLE-3 layer).
        """
        small, wide = self.small, self.wide
        read = self._read(matrix, free[: len(matrix)], inputs, math.sqrt(wide.head_dim / small.head_dim))
        out = free.clone().view(wide.kv_heads, wide.group, wide.head_dim, -1)
        out[: small.kv_heads, : small.group] = 0
        out[: small.kv_heads, : small.group, self._rotary_dims()] = read.view(
            small.kv_heads, small.group, small.head_dim, -1
        )
        return out.view(wide.heads * wide.head_dim, -1)

    def keys(self, matrix: torch.Tensor, free: torch.Tensor, inputs: int = 1) -> torch.Tensor:
        """Widen the key matrix [kv_heads * head_dim, inputs * hidden]."""
        small, wide = self.small, self.wide
        out = free.clone().view(wide.kv_heads, wide.head_dim, -1)
        read = self._read(matrix, free[: len(matrix)], inputs)
        out[: small.kv_heads, self._rotary_dims()] = read.view(small.kv_heads, small.head_dim, -1)
        return out.view(wide.kv_heads * wide.head_dim, -1)

    def values(self, matrix: torch.Tensor, free: torch.Tensor, inputs: int = 1) -> torch.Tensor:
        """Widen the value matrix [kv_heads * head_dim, inputs * hidden].

        The small head's dimensions come first in the wide head.
        """
        small, wide = self.small, self.wide
        out = free.clone().view(wide.kv_heads, wide.head_dim, -1)
        read = self._read(matrix, free[: len(matrix)], inputs)
        out[: small.kv_heads, : small.head_dim] = read.view(small.kv_heads, small.head_dim, -1)
        return out.view(wide.kv_heads * wide.head_dim, -1)

    def attention_output(self, matrix: torch.Tensor) -> torch.Tensor:
        """Widen the output matrix of attention [hidden, heads * head_dim].

        Added heads and dimensions get zeros.
        """
        small, wide = self.small, self.wide
        out = torch.zeros(wide.hidden, wide.kv_heads, wide.group, wide.head_dim, dtype=torch.bfloat16)
        columns = self.written(matrix).view(COPIES * small.hidden, small.kv_heads, small.group, small.head_dim)
        out[: COPIES * small.hidden, : small.kv_heads, : small.group, : small.head_dim] = columns
        return out.view(wide.hidden, -1)

    def gate_or_up(self, matrix: torch.Tensor, free: torch.Tensor) -> torch.Tensor:
        """Widen the gate or up matrix [middle, hidden]."""
        out = free.clone()
        out[: self.small.middle] = self._read(matrix, free[: self.small.middle])
        return out

    def down(self, matrix: torch.Tensor) -> torch.Tensor:
        """Widen the down matrix [hidden, middle]. Added columns are zeros."""
        out = torch.zeros(self.wide.hidden, self.wide.middle, dtype=torch.bfloat16)
        out[: COPIES * self.small.hidden, : self.small.middle] = self.written(matrix)
        return out

    def head_input(self, matrix: torch.Tensor, free: torch.Tensor) -> torch.Tensor:
        """Widen the first matrix of an EAGLE-3 head [hidden, layers * hidden].

        No norm scales the hidden states that it reads, so it reads only the first copy of each.
        """
        size, wide = self.small.hidden, self.wide.hidden
        out = torch.zeros_like(free)
        columns = free[: COPIES * size].clone().view(COPIES * size, -1, wide)
        columns[..., : COPIES * size] = 0
        columns[..., :size] = self.written(matrix).view(COPIES * size, -1, size)
        out[: COPIES * size] = columns.view(COPIES * size, -1)
        return out

    def written(self, matrix: torch.Tensor) -> torch.Tensor:
        """Repeat the rows for each copy."""
        return matrix.repeat(COPIES, 1)

    def _rotary_dims(self) -> torch.Tensor:
        """Return the small head's dimensions in the wide head: each half starts a wide half."""
        half = torch.arange(self.small.head_dim // 2)
        return torch.cat([half, half + self.wide.head_dim // 2])

    def _read(self, matrix: torch.Tensor, free: torch.Tensor, inputs: int = 1, factor: float = 1.0) -> torch.Tensor:
        """Return [rows, inputs * hidden] times ``factor`` and norm scale, split by copy."""
        size, rows = self.small.hidden, len(matrix)
        terms = split(matrix.to(torch.float64) * (factor * self.norm_scale))
        out = free.clone().view(rows, inputs, self.wide.hidden)
        for i, term in enumerate(terms):
            out[:, :, i * size : (i + 1) * size] = term.view(rows, inputs, size)
        return out.view(rows, -1)


def split(values: torch.Tensor) -> list[torch.Tensor]:
    """Return COPIES bfloat16 tensors whose sum is ``values`` (float64). Each adds about 8 bits."""
    terms = []
    for _ in range(COPIES):
        term = values.to(torch.bfloat16)
        terms.append(term)
        values = values - term.to(torch.float64)
    return terms


def place_layers(
    num_small: int, num_wide: int, small_captured: Sequence[int], wide_captured: Sequence[int]
) -> list[int]:
    """Return the wide layer for each small one.

    The state that enters small layer ``small_captured[i]`` enters wide layer ``wide_captured[i]``.

    Raises:
        WidenError: there are too few wide layers between two of ``wide_captured``.
    """
    places: list[int] = []
    edges = zip((0, *small_captured), (0, *wide_captured), strict=True)
    ends = zip((*small_captured, num_small), (*wide_captured, num_wide), strict=True)
    for (small_start, wide_start), (small_end, wide_end) in zip(edges, ends, strict=True):
        if small_end - small_start > wide_end - wide_start:
            raise WidenError(f"layers {small_start} to {small_end} do not fit between {wide_start} and {wide_end}")
        places += range(wide_start, wide_start + small_end - small_start)
    return places


def widen(
    small: Path, small_head: Path, output: Path, shape: ModelSizes, *, draft_vocab_size: int = DRAFT_VOCAB_SIZE
) -> None:
    """Write ``output``/target and ``output``/eagle3.

    Raises:
        WidenError: the shape cannot hold the model.
    """
    target = load_config(small)
    wanted = head_captured_layers(head_config(small_head), target.num_layers)
    captured = (2, shape.num_layers // 2, shape.num_layers - 3)
    places = place_layers(target.num_layers, shape.num_layers, wanted, captured)
    widen_target(small, output / "target", shape, places)
    widen_head(small_head, small, output / "eagle3", shape, captured, draft_vocab_size=draft_vocab_size)


def widen_target(small: Path, output: Path, shape: ModelSizes, places: Sequence[int]) -> None:
    """Widen the target in the folder ``small``. Its layer i becomes layer ``places[i]``."""
    raw, config = read_config_file(small), load_config(small)
    _check(config)
    if config.vocab_size > shape.vocab_size:
        raise WidenError(f"a vocabulary of {shape.vocab_size} is less than the small model's {config.vocab_size}")
    widening = Widening(_sizes(config), _wide_sizes(shape, shape.intermediate_size))
    wide_raw = raw | _changed_fields(config, shape, widening)
    wide_raw |= {"num_hidden_layers": shape.num_layers, "intermediate_size": shape.intermediate_size}
    output.mkdir(parents=True, exist_ok=True)
    (output / "config.json").write_text(json.dumps(wide_raw))
    for name in TOKENIZER_FILES:
        shutil.copyfile(small / name, output / name)
    specs = {name: TensorSpec(size) for name, size in tensor_shapes(load_config(output)).items()}
    with Checkpoint(small) as checkpoint:
        maker = _TargetMaker(checkpoint, config, widening, specs, {wide: i for i, wide in enumerate(places)})
        write_checkpoint(output, wide_raw, specs, maker)


def widen_head(
    small: Path,
    small_target: Path,
    output: Path,
    shape: ModelSizes,
    captured: Sequence[int],
    *,
    draft_vocab_size: int = DRAFT_VOCAB_SIZE,
) -> None:
    """Widen the EAGLE-3 head in the folder ``small``, which drafts with its target's output head.

    The wide head has the public layout with its own output head: the first ``draft_vocab_size``
    rows of the wide target's. ``captured``: the layers of the wide target whose inputs it reads.
    """
    raw, parsed, target = read_config_file(small), head_config(small), load_config(small_target)
    body = parsed.body
    _check(body)
    draft_vocab_size = min(draft_vocab_size, shape.vocab_size)
    if parsed.family != "eagle3" or parsed.draft_vocab_size is not None or body.num_layers != 1:
        raise WidenError(f"{small}: not an EAGLE-3 head of one layer that uses the target's output head")
    if body.hidden_size != target.hidden_size or draft_vocab_size < target.vocab_size:
        raise WidenError(f"{small}: the head has another width than its target, or there are too few draft ids")
    widening = Widening(_sizes(body), _wide_sizes(shape, shape.intermediate_size))
    wide_raw = raw | _changed_fields(body, shape, widening)
    wide_raw |= {"intermediate_size": shape.intermediate_size, "draft_vocab_size": draft_vocab_size}
    wide_raw["eagle_config"] = {
        # The config names hidden states by the layer that outputs them.
        "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in captured],
        "use_aux_hidden_state": True,
    }
    specs = head_specs(wide_raw, shape.hidden_size, len(captured))
    with Checkpoint(small) as checkpoint, Checkpoint(small_target) as target_checkpoint:
        maker = _HeadMaker(checkpoint, target_checkpoint, body, target, widening, specs)
        write_checkpoint(output, wide_raw, specs, maker)


class _Maker:
    """Makes the tensors of both models from small tensors and random values without effect."""

    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, widening: Widening, specs: dict[str, TensorSpec]
    ) -> None:
        self._checkpoint, self._config, self._widening, self._specs = checkpoint, config, widening, specs
        self._device = best_device()

    def _small(self, name: str) -> torch.Tensor:
        return self._checkpoint.read(name, self._checkpoint.shape(name)).to(torch.bfloat16)

    def _free(self, name: str) -> torch.Tensor:
        return random_matrix(self._specs[name].shape, name, self._device).cpu()

    def _of_layer(self, small: str, name: str, inputs: int = 1) -> torch.Tensor:
        """Return a tensor of a decoder layer, made from the small tensor of the same name."""
        widening, kind = self._widening, name.split(".")[-2]
        matrix = self._small(small)
        if kind == "q_proj":
            return widening.queries(matrix, self._free(name), inputs)
        if kind == "k_proj":
            return widening.keys(matrix, self._free(name), inputs)
        if kind == "v_proj":
            return widening.values(matrix, self._free(name), inputs)
        if kind == "o_proj":
            return widening.attention_output(matrix)
        if kind == "down_proj":
            return widening.down(matrix)
        if kind in ("gate_proj", "up_proj"):
            return widening.gate_or_up(matrix, self._free(name))
        return widening.norm(matrix)


class _TargetMaker(_Maker):
    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        widening: Widening,
        specs: dict[str, TensorSpec],
        small_layers: dict[int, int],
    ) -> None:
        super().__init__(checkpoint, config, widening, specs)
        self._small_layers = small_layers

    def __call__(self, name: str) -> torch.Tensor:
        shape = self._specs[name].shape
        if name == "model.embed_tokens.weight":
            return self._widening.embedding(self._small(name), shape[0])
        if name == "lm_head.weight":
            return self._widening.output_head(output_rows(self._checkpoint, self._config), shape[0])
        if name == "model.norm.weight":
            return self._widening.norm(self._small(name))
        _, _, layer, rest = name.split(".", 3)
        if int(layer) in self._small_layers:
            return self._of_layer(f"model.layers.{self._small_layers[int(layer)]}.{rest}", name)
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        # This layer does not change the hidden state, at the cost of any other layer.
        return torch.zeros(shape, dtype=torch.bfloat16) if "o_proj" in name or "down_proj" in name else self._free(name)


class _HeadMaker(_Maker):
    def __init__(
        self,
        checkpoint: Checkpoint,
        target_checkpoint: Checkpoint,
        config: ModelConfig,
        target: ModelConfig,
        widening: Widening,
        specs: dict[str, TensorSpec],
    ) -> None:
        super().__init__(checkpoint, config, widening, specs)
        self._target_checkpoint, self._target = target_checkpoint, target

    def __call__(self, name: str) -> torch.Tensor:
        shape = self._specs[name].shape
        if name == "d2t":
            return torch.zeros(shape, dtype=torch.int64)
        if name == "t2d":
            return torch.arange(shape[0]) < self._specs["d2t"].shape[0]
        if name == "lm_head.weight":
            return self._widening.output_head(output_rows(self._target_checkpoint, self._target), shape[0])
        if name == "fc.weight":
            return self._widening.head_input(self._small(name), self._free(name))
        return self._of_layer(name, name, inputs=2)


def output_rows(checkpoint: Checkpoint, config: ModelConfig) -> torch.Tensor:
    """Return a target's output head, bfloat16 [vocab, hidden]."""
    name = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return checkpoint.read(name, (config.vocab_size, config.hidden_size)).to(torch.bfloat16)


def _check(config: ModelConfig) -> None:
    if config.model_type != "llama" or config.rope.kind != "default":
        raise WidenError(f"only a Llama without scaled positions can be widened, not {config.model_type}")


def _sizes(config: ModelConfig) -> LayerSizes:
    return LayerSizes(
        config.hidden_size, config.intermediate_size, config.num_heads, config.num_kv_heads, config.head_dim
    )


def _wide_sizes(shape: ModelSizes, middle: int) -> LayerSizes:
    return LayerSizes(shape.hidden_size, middle, shape.num_heads, shape.num_kv_heads, shape.head_dim)


def _changed_fields(config: ModelConfig, shape: ModelSizes, widening: Widening) -> dict[str, Any]:
    """Return the changed fields of config.json that target and head share."""
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": config.rms_norm_eps * widening.norm_scale**2,
        "rope_theta": config.rope.theta ** (shape.head_dim / config.head_dim),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.widen", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="a folder to write target/ and eagle3/ into")
    parser.add_argument("--shape", choices=sorted(set(SHAPES) - {"tiny"}), default="llama-3.1-8b")
    options = parser.parse_args()
    widen(DEMO / "target", DEMO / "eagle3", options.output, SHAPES[options.shape])


if __name__ == "__main__":
    main()
