"""Fields of other servers that would change the output and cannot be obeyed, with the reason.

These are refused by every API. Each API adds its own.
"""

from __future__ import annotations

from collections.abc import Mapping

_TOKENS_ONLY = "the engine takes tokens"
_NO_ADAPTERS = "there are no adapters"
_NO_CODE = "it would run a client's code"

UNSUPPORTED: Mapping[str, str] = {
    "use_beam_search": "the engine samples",
    "logits_processors": _NO_CODE,
    "custom_logit_processor": _NO_CODE,
    "custom_params": "they are a custom_logit_processor's",
    "prompt_embeds": _TOKENS_ONLY,
    "input_embeds": _TOKENS_ONLY,
    "mm_processor_kwargs": "the engine takes text only",
    "lora_path": _NO_ADAPTERS,
    "lora_request": _NO_ADAPTERS,
    "session_params": "send the whole prompt; the prefix cache makes it cheap",
    "kv_transfer_params": "",
    "repetition_detection": "",
    "logprob_token_ids": "",
    "vllm_xargs": "",
    "return_hidden_states": "",
    "return_routed_experts": "",
    "thinking_token_budget": "",
    "stop_regex": "",
    "structural_tag": "",
}
