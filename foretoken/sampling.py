"""Sampling of one request: its parameters, the order of logit operations and the keyed noise.

What stands here defines the text: plain decode, tree verification and drafters that sample all follow it. The noise
is defined in foretoken/noise.py, the logit operations in foretoken/logits.py, which this module does not import: the
gateway needs the parameters only.

A token is sampled from one row of target logits by these operations, in this order, the same at every tree node:

     1. logit bias         added
     2. penalties          repetition over prompt + output, then frequency and presence over the output; the output
                           includes the node's ancestors in the tree
     3. grammar mask       no token that the grammar does not allow after the output and the ancestors; stop tokens
                           only where the output is complete
     4. min-tokens mask    no stop token while the output has fewer than min_tokens tokens
     5. vocabulary mask    no id beyond the tokenizer's: the rows of a padded head
     6. temperature        divides; greedy takes the argmax here
     7. top-k              keeps the k largest logits and all that equal the k-th
     8. top-p              keeps the shortest run of the most likely tokens that holds the mass; of equal logits the
                           lower id comes first
     9. min-p              keeps what has at least this share of the best token's probability
    10. noise              added, keyed by seed, position, choice and token id
    11. argmax             of equal values the lowest id
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# Part of a model's fingerprint: raised whenever the same logits, parameters and seed could give another text.
# 2: grammars. A verifier of version 1 does not know them and would go on with a resumed output unconstrained.
SAMPLER_VERSION = 2

# A temperature below this is greedy: dividing by it would overflow float32 before it changed a text.
MIN_TEMPERATURE = 1e-5
# The last word of the noise counter: what the noise is for. Sampling of tokens is the only use so far.
TOKEN_STREAM = 0


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output must be, as a whole.

    ``text`` of a JSON schema is its JSON; of a regular expression the expression, which is matched from the first
    character to the last; any JSON object needs none.
    """

    kind: Literal["json_schema", "json_object", "regex"]
    text: str = ""


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
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """What one request wants of speculation; it never changes the text. ``max_draft_tokens`` excludes the root."""

    enabled: bool = True
    drafter: str = "auto"
    max_draft_tokens: int | None = None


def is_greedy(params: SamplingParams) -> bool:
    """Whether the argmax is taken without noise, so that top-k, top-p and min-p change nothing."""
    return params.temperature < MIN_TEMPERATURE


def noise_key(seed: int) -> tuple[int, int]:
    """Low and high 32-bit word of the seed modulo 2**64: the key of the noise."""
    return seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF


def stop_token_ids(params: SamplingParams, eos_ids: frozenset[int]) -> frozenset[int]:
    """Token ids that end the output: the request's, and the model's unless the request ignores those."""
    return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_ids)
