"""The keys of config.json that are not read: which are harmless, and which change the numbers.

A model or draft head whose config has a key that changes the numbers, and that no code here reads,
would be served wrongly without an error. Such keys are refused by name, unless their value asks for
nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from foretoken.errors import ConfigError

# Keys of other architectures that change the numbers; their values that change nothing, besides
# null, false, and an empty text, list or object.
REFUSED: dict[str, tuple[object, ...]] = {
    "attention_multiplier": (),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "scale_emb": (1,),
    "scale_depth": (),
    "dim_model_base": (),
    "query_pre_attn_scalar": (),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "clip_qkv": (),
    "rotary_pct": (1,),
    "rotary_dim": (),
    "rope_interleaved": (),
    "rope_local_base_freq": (),
    "no_rope_layers": (),
    "no_rope_layer_interval": (),
    "position_embedding_type": ("rope", "rotary", "absolute"),
    "alibi": (),
    "use_qk_norm": (),
    "qk_norm": (),
    "qk_layernorm": (),
    "attention_chunk_size": (),
    "attn_temperature_tuning": (0,),
    "dual_chunk_attention_config": (),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "n_routed_experts": (0, 1),
    "kv_lora_rank": (),
    "use_bidirectional_attention": (),
    # A draft head's. The name that is read begins with ``eagle_``.
    "aux_hidden_state_layer_ids": (),
    "num_eagle_features": (1,),
    "parallel_draft_step": (1,),
    "compression_config": (),
    "quantization": (),
}
# Keys that change the numbers when they are false.
_REFUSED_IF_FALSE = frozenset({"is_causal", "causal", "use_causal_mask", "use_rope"})
# Keys without a meaning for the numbers of inference.
HARMLESS = frozenset(
    {
        *(
            "architectures",
            "auto_map",
            "transformers_version",
            "dtype",
            "torch_dtype",
            "_name_or_path",
            "model_max_length",
        ),
        *("use_cache", "initializer_range", "attention_dropout", "hidden_dropout", "pretraining_tp", "use_bfloat16"),
        *("bos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "cls_token_id", "mask_token_id"),
        *("decoder_start_token_id", "max_length", "min_length", "max_sequence_length", "tokenizer_class"),
        *("is_decoder", "is_encoder_decoder", "tie_encoder_decoder", "torchscript", "pruned_heads", "prefix"),
        *("add_cross_attention", "cross_attention_hidden_size", "chunk_size_feed_forward", "tf_legacy_loss"),
        *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params"),
        *("return_dict", "output_attentions", "output_hidden_states", "output_scores", "return_dict_in_generate"),
        *("bad_words_ids", "begin_suppress_tokens", "suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"),
        *("do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "length_penalty"),
        *("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "no_repeat_ngram_size"),
        *("encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "num_return_sequences"),
        *("remove_invalid_values", "_attn_implementation_autoset", "_flash_attn_2_enabled", "attn_implementation"),
        # These matter only beside keys that are read.
        *("max_window_layers", "original_max_position_embeddings", "num_nextn_predict_layers"),
        # Marks of the programs that trained or converted the model.
        *("is_llama_config", "unsloth_version", "unsloth_fixed", "neftune_noise_alpha"),
    }
)
# Keys of draft heads that say what the tensors show, or how the head was trained.
HARMLESS_IN_HEADS = frozenset(
    {
        *("loss_scale", "gradient_clipping", "draft_temperature"),
        *("bias", "fc_bias", "use_aux_norm", "has_lm_head", "reuse_target_lm_head"),
        *("hot_vocab_size", "truncated_vocab_size", "target_model_type", "eagle_decoder_type", "modal_type"),
        # Of NVIDIA's Model Optimizer. A missing norm is a missing tensor.
        *("use_input_layernorm_in_first_layer", "use_last_layernorm", "next_layer_regular"),
        # Of vLLM's speculators.
        *("speculators_config", "speculators_version", "has_no_defaults_at_init", "embed_requires_grad"),
        *("base_model_ep_plan", "base_model_tp_plan", "base_model_pp_plan", "inference_type"),
    }
)
# Keys of Llama 4 that matter only beside keys of REFUSED. Some heads for it keep them.
OF_LLAMA4 = frozenset(
    {
        *("attn_scale", "floor_scale", "for_llm_compressor", "interleave_moe_layer_step", "moe_layers"),
        *("num_experts_per_tok", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
    }
)
# Parts of the names of keys that change the numbers, in all architectures of transformers.
_NUMERIC = re.compile(
    r"scal(e|ing|ar)|multiplier|soft_?cap|clip|rope|rotary|alibi|position_embedding|window|sink|norm|bias|expert|moe"
    r"|mup|chunk|temperature|qk_|logit|latent|lora|ssm|mamba|conv(_|\d|$)|per_layer|shared_kv|cross_attention|quant|residual"
    r"|act(ivation)?_f|bidirectional"
)
# Of these, keys that multiply something: 1 changes nothing.
_FACTOR = re.compile(r"scal(e|ing)|multiplier")
# Values of any key that ask for nothing. In Python 0 == False and 1 == True, so booleans are
# checked on their own.
_NOTHING: tuple[Any, ...] = (None, "", [], {})


def refused_key(raw: dict[str, Any]) -> str | None:
    """Return the first known key with a value that changes the numbers; None if there is none."""
    for key, neutral in REFUSED.items():
        value = raw.get(key)
        if value is not False and value not in _NOTHING and (isinstance(value, bool) or value not in neutral):
            return key
    return next((key for key in sorted(_REFUSED_IF_FALSE) if raw.get(key, True) not in (True, *_NOTHING)), None)


def unknown_keys(raw: dict[str, Any], read: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the keys that are neither read nor known: those that change the numbers, and others.

    Args:
        read: keys that the caller reads.
    """
    numeric: list[str] = []
    others: list[str] = []
    for key, value in raw.items():
        if key in read or key in HARMLESS or key in REFUSED or key in _REFUSED_IF_FALSE:
            continue
        is_neutral_factor = value == 1 and value is not True and _FACTOR.search(key)
        # False is 0.
        if value not in (*_NOTHING, 0) and not is_neutral_factor:
            (numeric if _NUMERIC.search(key) else others).append(key)
    return sorted(numeric), sorted(others)


def check_keys(raw: Mapping[str, Any], read: Collection[str], file: Path, prefix: str = "") -> list[str]:
    """Return the keys that are neither read nor known; none of them changes the numbers.

    Args:
        read: keys that the caller reads.
        file: named in errors.
        prefix: precedes every key.

    Raises:
        ConfigError: a key that is not read changes the numbers; names it.
    """
    fields = dict(raw)
    numeric, others = unknown_keys(fields, read)
    if (key := refused_key(fields)) is not None:
        numeric = [key]
    if numeric:
        raise ConfigError(refusal(file, {f"{prefix}{key}": fields[key] for key in numeric}))
    return [f"{prefix}{key}" for key in others]


def refusal(file: Path, fields: Mapping[str, Any]) -> str:
    """Return the message about fields that change the numbers."""
    shown = ", ".join(f"{key} {json.dumps(value)}" for key, value in fields.items())
    return f"{file}: {shown} is not supported; it changes the model's numbers"


def unread_note(file: Path, keys: Collection[str]) -> tuple[str, ...]:
    """Return a warning about keys that are not known; nothing if there are none."""
    return (f"{file}: not known and ignored: {', '.join(keys)}",) if keys else ()
