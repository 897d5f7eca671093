"""Sampling of one request: its parameters, the order of logit operations and the keyed noise.

This module defines the text: plain decode, tree verification and sampling drafters all follow it.
foretoken/noise.py defines the noise and tests/references/logits.py the logit operations. This module
imports neither, because the gateway only needs the parameters.

A token is sampled from one row of target logits by these operations, in this order, the same at
every tree node:

     1. logit bias         added
     2. penalties          repetition over prompt + output, then frequency and presence over the output;
                           the output includes the node's ancestors in the tree
     3. grammar mask       removes tokens that the grammar forbids after output and ancestors; stop tokens
                           are only allowed when the output is complete
     4. token masks        remove all but the allowed tokens, and each token that would complete a bad
                           sequence after output and ancestors
     5. min-tokens mask    removes stop tokens while the output has fewer than min_tokens tokens
     6. vocabulary mask    removes ids beyond the tokenizer's, the rows of a padded head
     7. temperature        divides; greedy takes the argmax here
     8. top-k              keeps the k largest logits and all that equal the k-th
     9. top-p              keeps the shortest run of the most likely tokens that holds the mass; of equal
                           logits, the lower id comes first
    10. min-p              keeps tokens with at least this share of the best token's probability
    11. noise              added, keyed by seed, position, choice and token id
    12. argmax             of equal values, the lowest id
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# Part of a model's fingerprint. Raise it when the same logits, parameters and seed can give another
# text. Version 2 added grammars, version 3 Lark grammars and token masks: an older verifier would
# continue a resumed output without them.
SAMPLER_VERSION = 3

# A temperature below this is greedy: dividing by it would overflow float32.
MIN_TEMPERATURE = 1e-5
# The last word of the noise counter: the purpose of the noise. So far it only samples tokens.
TOKEN_STREAM = 0


@dataclass(frozen=True, slots=True)
class Grammar:
    """The grammar that a whole output must match.

    ``text`` is the JSON of a schema, a regular expression that must match the whole output, or a
    grammar in llguidance's Lark syntax; it is empty for any JSON object.
    """

    kind: Literal["json_schema", "json_object", "regex", "lark"]
    text: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's sampling parameters, with defaults. foretoken/limits.py has the ranges.

    ``top_k`` 0 or -1, ``top_p`` 1, ``min_p`` 0 and a repetition penalty of 1 are off. ``logprobs``
    None is off, 0 means only the sampled token's. ``seed`` modulo 2**64 is the noise key.
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
    # Only these tokens may be sampled; empty: all.
    allowed_token_ids: tuple[int, ...] = ()
    # Sequences of tokens that the output must not contain.
    bad_token_ids: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class DraftShape:
    """The exact shape of a request's draft trees.

    Attributes:
        num_steps: levels of a draft model's trees.
        topk: most children of one node in a draft model's trees.
        num_draft_tokens: nodes with the root; for a drafter without a model, at most.
    """

    num_steps: int
    topk: int
    num_draft_tokens: int


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """One request's options of speculation, which never change the text.

    ``max_draft_tokens`` excludes the root. ``shape`` None: the verifier chooses.
    """

    enabled: bool = True
    drafter: str = "auto"
    max_draft_tokens: int | None = None
    shape: DraftShape | None = None


def is_greedy(params: SamplingParams) -> bool:
    """Return whether the argmax is taken without noise.

    Top-k, top-p and min-p then have no effect.
    """
    return params.temperature < MIN_TEMPERATURE


def has_token_masks(params: SamplingParams) -> bool:
    """Return whether the host masks tokens, since a mask may depend on the tokens before."""
    return params.grammar is not None or bool(params.allowed_token_ids or params.bad_token_ids)


def noise_key(seed: int) -> tuple[int, int]:
    """Return the noise key: low and high 32-bit word of the seed modulo 2**64."""
    return seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF


def stop_token_ids(params: SamplingParams, eos_ids: frozenset[int]) -> frozenset[int]:
    """Return the token ids that end the output.

    They are the request's, and the model's unless the request ignores them.
    """
    return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_ids)
