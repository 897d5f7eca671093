"""Sample one token from one row of logits: the reference that tests hold the kernels against.

It defines what foretoken_kernels.cpu.sample does fast.

There is one function for each operation, in the order of foretoken/sampling.py. Logits are float32,
and each operation rounds to float32. Probabilities are float64 and are summed in the stated order.
A NaN logit counts as -inf, which no operation can undo. A row gives NO_SAMPLE instead of a token if
one of its logits is NaN or +inf, before or after these operations, or if no token is left; the
caller then ends the output.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from foretoken.noise import Float32, gumbel_noise
from foretoken.sampling import SamplingParams, is_greedy, stop_token_ids

NEVER = np.float32(-np.inf)
# Stands for the token of a row that gives none.
NO_SAMPLE = -2


def sample_reference(
    logits: Float32,
    params: SamplingParams,
    *,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    eos_ids: frozenset[int] = frozenset(),
    choice_index: int = 0,
    vocab_limit: int | None = None,
    allowed_ids: Collection[int] | None = None,
) -> int:
    """Return the token that follows prompt and output, or NO_SAMPLE.

    Args:
        logits: float32 [vocab]; the target's, unprocessed.
        output_ids: emitted tokens; at a tree node, also the tokens on the path from the root to the
            node.
        vocab_limit: number of the tokenizer's ids; None: the whole row.
        allowed_ids: tokens that the grammar allows after the output; None: no grammar.
    """
    if not (logits[:vocab_limit] < np.inf).all():
        return NO_SAMPLE
    kept = process_logits(
        logits,
        params,
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        eos_ids=eos_ids,
        vocab_limit=vocab_limit,
        allowed_ids=allowed_ids,
    )
    if not NEVER < kept.max() < np.inf:
        return NO_SAMPLE
    if is_greedy(params):
        return int(np.argmax(kept))
    position = len(prompt_ids) + len(output_ids)
    return int(np.argmax(kept + gumbel_noise(params.seed, position, choice_index, np.arange(len(kept)))))


def process_logits(
    logits: Float32,
    params: SamplingParams,
    *,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    eos_ids: frozenset[int] = frozenset(),
    vocab_limit: int | None = None,
    allowed_ids: Collection[int] | None = None,
) -> Float32:
    """Return the processed logits, before noise, float32 [vocab].

    Tokens that may not be sampled are -inf.
    """
    row = np.where(np.isnan(logits), NEVER, logits).astype(np.float32)
    row = add_logit_bias(row, params.logit_bias)
    row = penalize(row, params, prompt_ids, output_ids)
    if allowed_ids is not None:
        row = mask_tokens(row, set(range(len(row))).difference(allowed_ids))
    if params.allowed_token_ids:
        row = mask_tokens(row, set(range(len(row))).difference(params.allowed_token_ids))
    row = mask_tokens(row, completing_tokens(params.bad_token_ids, output_ids))
    if len(output_ids) < params.min_tokens:
        row = mask_tokens(row, stop_token_ids(params, eos_ids))
    row = mask_tokens(row, range(len(row) if vocab_limit is None else vocab_limit, len(row)))
    if is_greedy(params):
        return row
    row = row / np.float32(params.temperature)
    row = keep_top_k(row, params.top_k)
    row = keep_top_p(row, params.top_p)
    return keep_min_p(row, params.min_p)


def add_logit_bias(row: Float32, logit_bias: Mapping[int, float]) -> Float32:
    """Add each token's bias."""
    out = row.copy()
    for token_id, bias in logit_bias.items():
        out[token_id] += np.float32(bias)
    return out


def penalize(row: Float32, params: SamplingParams, prompt_ids: Iterable[int], output_ids: Sequence[int]) -> Float32:
    """Apply the repetition penalty, then OpenAI's frequency and presence penalties.

    The repetition penalty is CTRL's (Keskar et al., 2019).
    """
    out = row.copy()
    repetition = np.float32(params.repetition_penalty)
    for token_id in {*prompt_ids, *output_ids}:
        out[token_id] = out[token_id] / repetition if out[token_id] > 0 else out[token_id] * repetition
    for token_id in set(output_ids):
        out[token_id] -= np.float32(params.frequency_penalty) * np.float32(output_ids.count(token_id))
        out[token_id] -= np.float32(params.presence_penalty)
    return out


def completing_tokens(bad_token_ids: Iterable[Sequence[int]], output_ids: Sequence[int]) -> set[int]:
    """Return the tokens that would complete one of these sequences after the output."""
    output = tuple(output_ids)
    return {bad[-1] for bad in bad_token_ids if output[len(output) - len(bad) + 1 :] == tuple(bad[:-1])}


def mask_tokens(row: Float32, token_ids: Iterable[int]) -> Float32:
    """Set these tokens' logits to -inf."""
    out = row.copy()
    out[list(token_ids)] = NEVER
    return out


def keep_top_k(row: Float32, top_k: int) -> Float32:
    """Keep the k largest logits and all that equal the k-th; k < 1 is off."""
    if not 0 < top_k < len(row):
        return row
    return np.where(row >= np.sort(row)[-top_k], row, NEVER)


def keep_top_p(row: Float32, top_p: float) -> Float32:
    """Keep the shortest run of most likely tokens with at least ``top_p`` of the mass.

    1 is off.
    """
    if top_p >= 1.0:
        return row
    weights = relative_weights(row)
    total = 0.0
    for weight in weights:
        total += weight
    out = np.full_like(row, NEVER)
    mass = 0.0
    for token_id in sorted(range(len(row)), key=lambda i: (-row[i], i)):
        if mass >= top_p * total and mass > 0.0:
            break
        out[token_id] = row[token_id]
        mass += weights[token_id]
    return out


def keep_min_p(row: Float32, min_p: float) -> Float32:
    """Keep tokens with at least ``min_p`` times the highest probability; 0 is off."""
    if min_p <= 0.0:
        return row
    return np.where(np.array(relative_weights(row)) >= min_p, row, NEVER)


def relative_weights(row: Float32) -> list[float]:
    """Return unnormalised float64 probabilities: exp(logit - largest logit), 0 for -inf."""
    largest = float(row.max())
    return [math.exp(float(logit) - largest) if logit > NEVER else 0.0 for logit in row]
