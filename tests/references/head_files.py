"""Tiny random targets and draft heads on disk, in other projects' layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

HIDDEN, MIDDLE, HEADS, KV_HEADS, DIM, VOCAB = 64, 96, 4, 2, 16, 101
NUM_LAYERS = 8
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": MIDDLE,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 256,
}
# A head's layers as its config.json has them.
HEAD_CONFIG: dict[str, Any] = {
    **SIZES,
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 20000.0,
}

Tensors = dict[str, torch.Tensor]


def random_target(folder: Path, kind: str = "llama", tied: bool = False, vocab_size: int = VOCAB) -> PreTrainedModel:
    """Save a target of 8 layers with random norms and biases to ``folder``."""
    torch.manual_seed(11)
    sizes = SIZES | {"tie_word_embeddings": tied, "vocab_size": vocab_size}
    model: PreTrainedModel
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    elif kind == "mistral":
        model = MistralForCausalLM(MistralConfig(**sizes, sliding_window=None))
    elif kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=DIM))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fill(name, parameter)
    model.eval().save_pretrained(folder)
    return model


def fill(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with random values: norms around one, the rest small."""
    if "norm" in name:
        return tensor.uniform_(0.5, 1.5)
    return tensor.normal_(std=0.4 if name.endswith("bias") else 0.12)


def shape_layer(
    prefix: str, width: int, *, bias: bool = False, head_norm: bool = False, hidden: int = HIDDEN
) -> dict[str, tuple[int, ...]]:
    """Return one layer's names and shapes without its entry norms; q, k and v take ``width``."""
    attention = f"{prefix}.self_attn"
    shapes: dict[str, tuple[int, ...]] = {}
    for name, out in (("q", HEADS * DIM), ("k", KV_HEADS * DIM), ("v", KV_HEADS * DIM)):
        shapes[f"{attention}.{name}_proj.weight"] = (out, width)
        if bias:
            shapes[f"{attention}.{name}_proj.bias"] = (out,)
    if head_norm:
        shapes |= {f"{attention}.{name}_norm.weight": (DIM,) for name in "qk"}
    shapes[f"{attention}.o_proj.weight"] = (hidden, HEADS * DIM)
    shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    for name in ("gate", "up"):
        shapes[f"{prefix}.mlp.{name}_proj.weight"] = (MIDDLE, hidden)
    shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, MIDDLE)
    return shapes


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 5) -> Tensors:
    torch.manual_seed(seed)
    return {name: fill(name, torch.empty(shape)) for name, shape in shapes.items()}


def write_folder(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def eagle_files(bias: bool = True, qkv_bias: bool = False, num_layers: int = 1) -> tuple[dict[str, Any], Tensors]:
    """Return a common EAGLE head: called a Llama, with unused embedding and head in the file."""
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, 2 * HIDDEN)}
    if bias:
        shapes["fc.bias"] = (HIDDEN,)
    for index in range(num_layers):
        shapes |= shape_layer(f"layers.{index}", HIDDEN, bias=qkv_bias)
        if index:
            shapes[f"layers.{index}.input_layernorm.weight"] = (HIDDEN,)
    shapes |= {"embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    config = HEAD_CONFIG | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": num_layers}
    return config, random_tensors(shapes)


DRAFT_VOCAB = 40


def eagle3_files(  # noqa: PLR0913 - layouts that others write
    *,
    layer: str = "midlayer",
    prefix: str = "",
    hidden: int = HIDDEN,
    num_layers: int = 1,
    later_norm: str = "hidden_norm",
    fc_bias: bool = False,
    extra: tuple[str, ...] = (),
    head: bool = True,
    embedding: bool = False,
    **config: Any,
) -> tuple[dict[str, Any], Tensors]:
    """Return an EAGLE-3 head; ``extra`` names norms over hidden states, ``config`` adds fields."""
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 3 * HIDDEN), "norm.weight": (hidden,)}
    if fc_bias:
        shapes["fc.bias"] = (hidden,)
    for index in range(num_layers):
        name = layer if index == 0 else f"layers.{index}"
        shapes |= shape_layer(name, 2 * hidden if index == 0 else hidden, hidden=hidden)
        norms = ("input_layernorm", "hidden_norm") if index == 0 else (later_norm,)
        shapes |= {f"{name}.{norm}.weight": (hidden,) for norm in norms}
    shapes |= {f"{name}.weight": (3 * HIDDEN if name == "input_norm" else HIDDEN,) for name in extra}
    if head:
        shapes["lm_head.weight"] = (DRAFT_VOCAB, hidden)
    if embedding:
        shapes["embed_tokens.weight"] = (VOCAB, hidden)
    tensors = {prefix + name: tensor for name, tensor in random_tensors(shapes).items()}
    if head:
        ids = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
        tensors["d2t"] = ids - torch.arange(DRAFT_VOCAB)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    fields = {
        **HEAD_CONFIG,
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": hidden,
        "head_dim": DIM,
        "num_hidden_layers": num_layers,
        "draft_vocab_size": DRAFT_VOCAB if head else None,
    }
    return fields | config, tensors


def speculators_config(config: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return the head's config in vLLM's dialect: the layer's own fields one level down."""
    layer = {name: config[name] for name in (*HEAD_CONFIG, "head_dim")}
    return {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"architectures": ["LlamaForCausalLM"]}},
        "transformer_layer_config": layer,
        "draft_vocab_size": config["draft_vocab_size"],
        "target_hidden_size": None,
        "norm_before_residual": True,
        **fields,
    }


def add_tensors(folder: Path, tensors: Tensors, **config: Any) -> None:
    """Put MTP layers into a target's file and change its config.json."""
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))


def mimo_target(folder: Path, num_depths: int = 1, vocab_size: int = VOCAB) -> PreTrainedModel:
    """Save Qwen2's body under MiMo's name, with its MTP layers."""
    model = random_target(folder, "qwen2", vocab_size=vocab_size)
    shapes: dict[str, tuple[int, ...]] = {}
    for depth in range(num_depths):
        prefix = f"model.mtp_layers.{depth}"
        shapes |= shape_layer(prefix, HIDDEN, bias=True)
        norms = ("input_layernorm", "token_layernorm", "hidden_layernorm", "final_layernorm")
        shapes |= {f"{prefix}.{name}.weight": (HIDDEN,) for name in norms}
        shapes[f"{prefix}.input_proj.weight"] = (HIDDEN, 2 * HIDDEN)
    auto_map = {"AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM"}
    architectures = ["MiMoForCausalLM"]
    add_tensors(
        folder,
        random_tensors(shapes),
        model_type="mimo",
        attention_bias=True,
        num_nextn_predict_layers=num_depths,
        auto_map=auto_map,
        architectures=architectures,
    )
    return model


def qwen3_mtp_target(folder: Path, num_depths: int = 1, tied: bool = False, vocab_size: int = VOCAB) -> PreTrainedModel:
    """Save a Qwen3 target with MTP layers in Qwen3-Next's names."""
    model = random_target(folder, "qwen3", tied, vocab_size)
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    shapes: dict[str, tuple[int, ...]] = {f"mtp.{name}.weight": (HIDDEN,) for name in norms}
    shapes["mtp.fc.weight"] = (HIDDEN, 2 * HIDDEN)
    for depth in range(num_depths):
        shapes |= shape_layer(f"mtp.layers.{depth}", HIDDEN, head_norm=True)
        shapes[f"mtp.layers.{depth}.input_layernorm.weight"] = (HIDDEN,)
    add_tensors(folder, random_tensors(shapes))
    return model
