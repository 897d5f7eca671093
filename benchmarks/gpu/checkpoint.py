"""Make checkpoints of any shape with random weights. Step times do not depend on the weights.

    python -m benchmarks.gpu.checkpoint --output DIR [--shape llama-3.1-8b]

It writes DIR/target and DIR/eagle3. If there is a GPU, it makes the random numbers: seconds for 8B.
"""

from __future__ import annotations

import argparse
import json
import shutil
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import environment
from benchmarks.gpu.sharded import TensorSpec, write_checkpoint
from foretoken.models.config import load_config, read_config_file
from foretoken.models.tensor_shapes import tensor_shapes

DEMO = environment.ROOT / "models" / "demo"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
# Standard deviation of the matrices. At a width of 4,096, logits then have one of about 1.
STD = 0.02
# Standard deviation of an embedding. The layers add less, so the token still matters at the end.
EMBEDDING_STD = 1.0
DRAFT_VOCAB_SIZE = 32_000
# Standard deviation of a head's logits. With a flat distribution the best nodes of a tree would all
# be children of the root; a trained head is sure enough to go deep.
DRAFT_LOGIT_STD = 10.0
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of a Llama model. ``rope_scaling`` is the field of config.json."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rope_theta: float = 500_000.0
    rope_scaling: dict[str, Any] | None = field(default_factory=lambda: dict(LLAMA3_ROPE))
    max_position_embeddings: int = 131_072

    def config(self, **changes: Any) -> dict[str, Any]:
        """Return config.json of an untied Llama in bfloat16, with the demo tokenizer's ids."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rope_theta": self.rope_theta,
            "rope_scaling": self.rope_scaling,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": self.max_position_embeddings,
            "initializer_range": STD,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": 0,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            **changes,
        }


LLAMA_3_1_8B = ModelSizes(
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128_256,
)
SHAPES = {
    "llama-3.1-8b": LLAMA_3_1_8B,
    # The same structure in a size that a CPU can serve, for trying commands. It is deep: a draft
    # then costs less than it can save, so the verifier waits for it.
    "tiny": ModelSizes(
        hidden_size=128,
        intermediate_size=384,
        num_layers=12,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        vocab_size=8256,
        max_position_embeddings=2048,
    ),
}


def random_target(folder: Path, shape: ModelSizes, *, seed: int = 0) -> None:
    """Write a target with random weights, and a tokenizer with as many ids as the vocabulary.

    Its text has no meaning. The same seed and kind of device give the same text.

    Raises:
        ValueError: the vocabulary is smaller than the demo tokenizer's.
    """
    config = shape.config()
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, shape.vocab_size)
    (folder / "config.json").write_text(json.dumps(config))
    specs = {name: TensorSpec(size) for name, size in tensor_shapes(load_config(folder)).items()}
    random = RandomTensors(specs, seed)
    # As in GPT-2's initialization: the sum that all layers add does not depend on their number.
    factors = {"o_proj": (2 * shape.num_layers) ** -0.5, "down_proj": (2 * shape.num_layers) ** -0.5}
    factors["embed_tokens"] = EMBEDDING_STD / STD
    write_checkpoint(folder, config, specs, lambda name: random(name).mul_(factors.get(name.split(".")[-2], 1.0)))


def random_eagle3(
    folder: Path, target: Path, *, draft_vocab_size: int = DRAFT_VOCAB_SIZE, seed: int = 1, **changes: Any
) -> None:
    """Write an EAGLE-3 head with random weights for the target in ``target``, in the public layout.

    The head has one layer of the target's sizes. It reads the hidden states of the usual low,
    middle and high layer, so its config names none. Its own output head has ``draft_vocab_size``
    ids, spread evenly over the target's vocabulary; ``d2t`` maps them. ``changes`` replaces fields
    of config.json, sizes included.
    """
    raw = read_config_file(target)
    vocab_size = int(raw["vocab_size"])
    draft_vocab_size = min(draft_vocab_size, vocab_size)
    config = raw | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": draft_vocab_size,
        "tie_word_embeddings": False,
        **changes,
    }
    specs = head_specs(config, int(raw["hidden_size"]))
    ids = torch.arange(draft_vocab_size) * vocab_size // draft_vocab_size
    tables = {"d2t": ids - torch.arange(draft_vocab_size), "t2d": torch.zeros(vocab_size, dtype=torch.bool)}
    tables["t2d"][ids] = True
    random = RandomTensors(specs, seed)

    def make(name: str) -> torch.Tensor:
        if name in tables:
            return tables[name]
        tensor = random(name)
        if name == "lm_head.weight":
            # After the last norm, elements are about 1.
            tensor.mul_(DRAFT_LOGIT_STD / STD / config["hidden_size"] ** 0.5)
        return tensor

    write_checkpoint(folder, config, specs, make)


def head_specs(config: dict[str, Any], target_hidden_size: int, num_states: int = 3) -> dict[str, TensorSpec]:
    """Return the tensors of an EAGLE-3 head with its own output head, from config.json."""
    size, middle, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, num_states * target_hidden_size),
        "midlayer.hidden_norm.weight": (size,),
        "midlayer.input_layernorm.weight": (size,),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * size),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * size),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * size),
        "midlayer.self_attn.o_proj.weight": (size, queries),
        "midlayer.post_attention_layernorm.weight": (size,),
        "midlayer.mlp.gate_proj.weight": (middle, size),
        "midlayer.mlp.up_proj.weight": (middle, size),
        "midlayer.mlp.down_proj.weight": (size, middle),
        "norm.weight": (size,),
        "lm_head.weight": (config["draft_vocab_size"], size),
    }
    specs = {name: TensorSpec(shape) for name, shape in shapes.items()}
    specs["d2t"] = TensorSpec((config["draft_vocab_size"],), torch.int64)
    specs["t2d"] = TensorSpec((config["vocab_size"],), torch.bool)
    return specs


class RandomTensors:
    """Makes the tensors of ``specs`` one by one.

    Matrices are normal with standard deviation STD. Vectors belong to norms and are ones. A tensor
    depends only on the seed, its name and the kind of device.
    """

    def __init__(self, specs: dict[str, TensorSpec], seed: int) -> None:
        self._specs = specs
        self._seed = seed
        self._device = best_device()

    def __call__(self, name: str) -> torch.Tensor:
        shape = self._specs[name].shape
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        return random_matrix(shape, f"{self._seed} {name}", self._device)


def random_matrix(shape: tuple[int, ...], key: str, device: torch.device) -> torch.Tensor:
    """Return a normal bfloat16 matrix (STD) that depends only on ``key`` and the kind of device."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(key.encode()))
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=STD, generator=generator)


def best_device() -> torch.device:
    """Return the device that makes the random numbers."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write the demo's tokenizer, with ids added up to ``vocab_size`` that no text encodes to.

    With fewer ids than rows of the output head, the sampler would skip rows; a real model's sampler
    reads all of them.

    Raises:
        ValueError: the demo's tokenizer has more ids.
    """
    for name in TOKENIZER_FILES:
        shutil.copyfile(DEMO / "target" / name, folder / name)
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    used = {*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    if max(used) >= vocab_size:
        raise ValueError(f"the demo's tokenizer has ids up to {max(used)}, the vocabulary {vocab_size}")
    for token_id in range(vocab_size):
        if token_id not in used:
            vocabulary[f"<|unused-{token_id}|>"] = token_id
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu.checkpoint", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="a folder to write target/ and eagle3/ into")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    options = parser.parse_args()
    random_target(options.output / "target", SHAPES[options.shape])
    random_eagle3(options.output / "eagle3", options.output / "target")


if __name__ == "__main__":
    main()
