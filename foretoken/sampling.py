"""Sampling of one request: its parameters, the order of logit operations and the keyed noise.

What stands here defines the text: plain decode, tree verification and drafters that sample all follow it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's sampling, defaults filled in. Ranges stand in foretoken/limits.py.

    ``top_k`` of 0 or -1, ``top_p`` of 1, ``min_p`` of 0 and a repetition penalty of 1 are off. ``logprobs`` of None
    is off, 0 the sampled token's only. ``seed`` is the noise key, taken modulo 2**64.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """What one request wants of speculation; it never changes the text. ``max_draft_tokens`` excludes the root."""

    enabled: bool = True
    drafter: str = "auto"
    max_draft_tokens: int | None = None
