"""Sample a token from one row of logits, bit for bit as tests/references/logits.py and noise.py define it.

Each row is sampled alone, by scalar arithmetic in a fixed order, so a token never depends on the
batch. Where the definition uses float64, values are widened by np.float64: numba's float() leaves a
float32 unchanged. All compiled functions are in this file, because numba's cache checks only the
time stamp of the file that defines a function.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

_WORD = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_INCREMENT_0, _INCREMENT_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_ROUNDS = 10
_NEVER = np.float32(-np.inf)
_INFINITY = np.float32(np.inf)
_ZERO = np.float32(0.0)


# Returned instead of a token for a row that cannot be sampled; same value as in
# tests/references/logits.py.
NO_SAMPLE = -2


class RowRules(NamedTuple):
    """One request's sampling rules in the form that compiled code takes. Built once per request.

    Attributes:
        vocab_limit: ids below this may be sampled.
        bias_ids, bias_values: int32, float32 [biases]; distinct ids below ``vocab_limit``.
        stop_ids: int32 [stop ids]; below ``vocab_limit``; masked until min_tokens tokens are out.
        repetition, frequency, presence: float32 penalties.
        temperature: float32; 0 for greedy.
        top_k: 0 for off.
        top_p: 1 for off.
        min_p: 0 for off.
        key_low, key_high: the words of the noise key.
        choice_index, stream: the last two words of the noise counter.
    """

    vocab_limit: int
    bias_ids: Int32
    bias_values: Float32
    stop_ids: Int32
    repetition: np.float32
    frequency: np.float32
    presence: np.float32
    temperature: np.float32
    top_k: int
    top_p: float
    min_p: float
    key_low: np.uint64
    key_high: np.uint64
    choice_index: int
    stream: int


def _gumbel_bounds() -> Float32:
    """Return float32 [256]: an upper bound of the noise for each value of a word's first byte."""
    largest = ((np.arange(256, dtype=np.int64) << 15) | 0x7FFF) + 0.5
    bounds: Float32 = (-np.log(-np.log(largest / 2**23)) + 1e-5).astype(np.float32)
    bounds.setflags(write=False)
    return bounds


_GUMBEL_BOUNDS = _gumbel_bounds()


@njit(cache=True, nogil=True)
def philox4x32(
    c0: np.uint64, c1: np.uint64, c2: np.uint64, c3: np.uint64, k0: np.uint64, k1: np.uint64
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    """Return four 32-bit words of a counter and a key, all held in uint64."""
    for _ in range(_ROUNDS):
        even = c0 * _MULTIPLIER_0
        odd = c2 * _MULTIPLIER_1
        c0 = (odd >> _HALF) ^ c1 ^ k0
        c1 = odd & _WORD
        c2 = (even >> _HALF) ^ c3 ^ k1
        c3 = even & _WORD
        k0 = (k0 + _INCREMENT_0) & _WORD
        k1 = (k1 + _INCREMENT_1) & _WORD
    return c0, c1, c2, c3


@njit(cache=True, nogil=True)
def gumbel_from_word(word: np.uint64) -> np.float32:
    """Return the Gumbel noise of a 32-bit word."""
    uniform = (np.float64(word >> np.uint64(9)) + 0.5) / 8388608.0
    return np.float32(-math.log(-math.log(uniform)))


@njit(cache=True, nogil=True)
def argmax_row(logits: Float32, vocab_limit: int) -> int:
    """Return the lowest id of the largest logit below ``vocab_limit``; NaN counts as -inf."""
    best_id = 0
    best = _NEVER
    for token_id in range(vocab_limit):
        if logits[token_id] > best:
            best = logits[token_id]
            best_id = token_id
    return best_id


@njit(cache=True, nogil=True)
def greedy_row(logits: Float32, vocab_limit: int) -> int:
    """Return argmax_row, or NO_SAMPLE for broken logits.

    Logits are broken if one below ``vocab_limit`` is NaN or +inf, or if all are -inf.
    """
    best_id = NO_SAMPLE
    best = _NEVER
    for token_id in range(vocab_limit):
        logit = logits[token_id]
        # Also true for NaN, so NaN needs no extra comparison for each logit.
        if not logit <= best:
            if not logit < _INFINITY:
                return NO_SAMPLE
            best = logit
            best_id = token_id
    return best_id


@njit(cache=True, nogil=True, error_model="numpy")
def _penalize(row: Float32, rules: RowRules, output_counts: Int32, seen: NDArray[np.bool_]) -> None:
    for token_id in range(len(row)):
        if seen[token_id]:
            logit = row[token_id]
            row[token_id] = logit / rules.repetition if logit > _ZERO else logit * rules.repetition
        if output_counts[token_id] > 0:
            row[token_id] -= rules.frequency * np.float32(output_counts[token_id])
            row[token_id] -= rules.presence


@njit(cache=True, nogil=True)
def _mask_bits(row: Float32, allowed: NDArray[np.uint8]) -> None:
    """Set tokens whose bit is not set to -inf, byte by byte."""
    for byte_index in range(len(allowed)):
        bits = allowed[byte_index]
        first = 8 * byte_index
        for token_id in range(first, min(first + 8, len(row))):
            if not (bits >> np.uint8(token_id - first)) & np.uint8(1):
                row[token_id] = _NEVER


@njit(cache=True, nogil=True)
def _sift_down(heap: Int64, size: int, place: int, row: Float32) -> None:
    """Move the id at ``place`` down until no child comes first.

    The id with the larger number in ``row`` comes first; of equal ones the lower id.
    """
    token_id = heap[place]
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        if child + 1 < size:
            left, right = heap[child], heap[child + 1]
            if row[right] > row[left] or (row[right] == row[left] and right < left):
                child += 1
        best = heap[child]
        if row[best] < row[token_id] or (row[best] == row[token_id] and token_id < best):
            break
        heap[place] = best
        place = child
    heap[place] = token_id


@njit(cache=True, nogil=True)
def _heapify(ids: Int64, row: Float32) -> None:
    """Make ``ids`` a heap whose first id is the most likely.

    A heap, because numba's own sorts take long to compile.
    """
    for place in range(len(ids) // 2 - 1, -1, -1):
        _sift_down(ids, len(ids), place, row)


@njit(cache=True, nogil=True)
def _pop(heap: Int64, size: int, row: Float32) -> int:
    """Pop the first id of a heap of ``size`` ids and put it after the remaining ones."""
    first = int(heap[0])
    heap[0] = heap[size - 1]
    _sift_down(heap, size - 1, 0, row)
    heap[size - 1] = first
    return first


@njit(cache=True, nogil=True)
def _keep_top_k(row: Float32, top_k: int) -> None:
    heap = np.empty(len(row), np.int64)
    for token_id in range(len(row)):
        heap[token_id] = token_id
    _heapify(heap, row)
    for taken in range(top_k - 1):
        _pop(heap, len(row) - taken, row)
    lowest = row[heap[0]]
    for token_id in range(len(row)):
        if not row[token_id] >= lowest:
            row[token_id] = _NEVER


@njit(cache=True, nogil=True)
def _weights(row: Float32) -> Float64:
    largest = np.float64(row[argmax_row(row, len(row))])
    weights = np.zeros(len(row), np.float64)
    for token_id in range(len(row)):
        if row[token_id] > _NEVER:
            weights[token_id] = math.exp(np.float64(row[token_id]) - largest)
    return weights


@njit(cache=True, nogil=True)
def _candidates(weights: Float64, least: float) -> Int64:
    """Return the ids whose weight is more than ``least``, ascending."""
    count = 0
    for token_id in range(len(weights)):
        count += weights[token_id] > least
    ids = np.empty(count, np.int64)
    count = 0
    for token_id in range(len(weights)):
        if weights[token_id] > least:
            ids[count] = token_id
            count += 1
    return ids


@njit(cache=True, nogil=True)
def _keep_top_p(row: Float32, weights: Float64, top_p: float) -> None:
    total = 0.0
    for token_id in range(len(row)):
        total += weights[token_id]
    # Tokens below this share hold less than half of the mass that may be cut, so the others hold
    # enough: only those are sorted. If rounding ever breaks this, all are sorted.
    least = 0.5 * (1.0 - top_p) * total / len(row)
    while True:
        heap = _candidates(weights, least)
        _heapify(heap, row)
        size = len(heap)
        mass = 0.0
        while size > 0 and (mass < top_p * total or mass == 0.0):
            mass += weights[_pop(heap, size, row)]
            size -= 1
        if size > 0 or least < 0.0:
            break
        least = -1.0
    # The weights are no longer needed; from here on they mark the tokens to keep.
    for token_id in range(len(row)):
        weights[token_id] = -1.0
    for place in range(size, len(heap)):
        weights[heap[place]] = 1.0
    for token_id in range(len(row)):
        if weights[token_id] < 0.0:
            row[token_id] = _NEVER


@njit(cache=True, nogil=True)
def keep_likely(row: Float32, top_k: int, top_p: float, min_p: float) -> None:
    """Set tokens that top-k, top-p or min-p cut to -inf, in this order."""
    if 0 < top_k < len(row):
        _keep_top_k(row, top_k)
    if top_p < 1.0:
        _keep_top_p(row, _weights(row), top_p)
    if min_p > 0.0:
        weights = _weights(row)
        for token_id in range(len(row)):
            if weights[token_id] < min_p:
                row[token_id] = _NEVER


@njit(cache=True, nogil=True)
def _noised_argmax(row: Float32, rules: RowRules, position: int) -> int:
    """Return the argmax of row + noise.

    Draws words and takes logarithms only for tokens that could still win, so the result is exact.
    """
    c1, c2, c3 = np.uint64(position), np.uint64(rules.choice_index), np.uint64(rules.stream)
    first = argmax_row(row, len(row))
    words = philox4x32(np.uint64(first // 4), c1, c2, c3, rules.key_low, rules.key_high)
    best_id = first
    best = row[first] + gumbel_from_word(words[first % 4])
    for block in range((len(row) + 3) // 4):
        low, high = 4 * block, min(4 * block + 4, len(row))
        largest = row[low]
        for token_id in range(low + 1, high):
            largest = max(largest, row[token_id])
        if largest + _GUMBEL_BOUNDS[255] < best or largest == _NEVER:
            continue
        words = philox4x32(np.uint64(block), c1, c2, c3, rules.key_low, rules.key_high)
        for token_id in range(low, high):
            word = words[token_id - low]
            if row[token_id] + _GUMBEL_BOUNDS[word >> np.uint64(24)] < best:
                continue
            noised = row[token_id] + gumbel_from_word(word)
            if noised > best or (noised == best and token_id < best_id):
                best, best_id = noised, token_id
    return best_id


@njit(cache=True, nogil=True, error_model="numpy")
def sample_row(
    logits: Float32,
    rules: RowRules,
    output_counts: Int32,
    seen: NDArray[np.bool_],
    allowed: NDArray[np.uint8],
    mask_stops: bool,
    position: int,
) -> int:
    """Return the token sampled from one row of raw logits, or NO_SAMPLE.

    Args:
        logits: float32 [vocab].
        output_counts: int32 [vocab]; how often each token stands in the output so far; empty: no
            penalties.
        seen: bool [vocab]; tokens of prompt and output; empty: no penalties.
        allowed: uint8 [vocab_limit / 8, rounded up]; bit ``id % 8`` of byte ``id // 8`` is set if
            the grammar allows the token; empty: no grammar.
        mask_stops: whether too few tokens are out for a stop token.
        position: index of the sampled token in prompt + output.
    """
    row = np.empty(rules.vocab_limit, np.float32)
    is_broken = False
    for token_id in range(rules.vocab_limit):
        logit = logits[token_id]
        row[token_id] = logit
        is_broken |= not logit < _INFINITY
    if is_broken:
        return NO_SAMPLE
    for index in range(len(rules.bias_ids)):
        row[rules.bias_ids[index]] += rules.bias_values[index]
    if len(seen) > 0:
        _penalize(row, rules, output_counts, seen)
    if len(allowed) > 0:
        _mask_bits(row, allowed)
    if mask_stops:
        for index in range(len(rules.stop_ids)):
            row[rules.stop_ids[index]] = _NEVER
    if rules.temperature == _ZERO:
        return greedy_row(row, len(row))
    for token_id in range(len(row)):
        row[token_id] /= rules.temperature
    if greedy_row(row, len(row)) == NO_SAMPLE:
        return NO_SAMPLE
    keep_likely(row, rules.top_k, rules.top_p, rules.min_p)
    return _noised_argmax(row, rules, position)


@njit(cache=True, nogil=True)
def logprob_and_rank(logits: Float32, token_id: int) -> tuple[float, float, int]:
    """Return a row's log of the sum of exp, the token's log-probability, and the token's rank.

    Sums run in float64 in id order. Rank 1 is the most likely token; of equal logits the lower id
    comes first. Both logarithms are NaN for a row that contains NaN or +inf, or only -inf.
    """
    best_id = greedy_row(logits, len(logits))
    if best_id == NO_SAMPLE:
        return np.nan, np.nan, 1
    largest = np.float64(logits[best_id])
    total = 0.0
    rank = 1
    chosen = logits[token_id]
    for other in range(len(logits)):
        if logits[other] > _NEVER:
            total += math.exp(np.float64(logits[other]) - largest)
        rank += logits[other] > chosen or (logits[other] == chosen and other < token_id)
    log_sum = largest + math.log(total)
    return log_sum, np.float64(chosen) - log_sum, rank


@njit(cache=True, nogil=True)
def top_ids(logits: Float32, count: int) -> Int64:
    """Return int64 [count]: ids of the largest logits, best first; of equal ones the lower id."""
    ids = np.empty(count, np.int64)
    filled = 0
    for token_id in range(len(logits)):
        logit = logits[token_id]
        if filled == count and (count == 0 or not logit > logits[ids[filled - 1]]):
            continue
        place = filled if filled < count else count - 1
        while place > 0 and logit > logits[ids[place - 1]]:
            if place < count:
                ids[place] = ids[place - 1]
            place -= 1
        ids[place] = token_id
        filled = min(filled + 1, count)
    return ids
