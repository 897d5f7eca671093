"""Define the sampler and the walk of a batch of draft trees in plain PyTorch.

Slow, but runs anywhere; the GPU kernels are tested against it. Each row's logits go through these
operations, in this order: bias, penalties, mask of stop tokens, the row's own mask, mask of ids
beyond the vocabulary, temperature, top-k, top-p, min-p, keyed noise, argmax. Logits are float32 and
each operation rounds to float32; probabilities are float64. A row returns NO_SAMPLE instead of a
token if one of its logits within the vocabulary is NaN or +inf, before or after these operations,
or if all of them are -inf after them. It returns NOT_ALLOWED if it has a mask and the logits are
sound before these operations: no NaN, no +inf, and one above -inf.

A token's noise is the Gumbel noise of a word of Philox4x32-10 (Salmon et al., SC 2011). The key is
the seed, the counter is (token id // 4, position, choice index, 0), and token id % 4 picks the
word.
"""

from __future__ import annotations

import torch

from foretoken_kernels.sampler_state import (
    CLOSED,
    FINISH_BROKEN,
    FINISH_LENGTH,
    FINISH_NONE,
    FINISH_NOT_ALLOWED,
    FINISH_STOP,
    NO_SAMPLE,
    NOT_ALLOWED,
    SampleBatch,
    SamplerState,
    WalkTensors,
)

_WORD = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_NEVER = float("-inf")
_INFINITY = float("inf")
_UNFINISHED = {NO_SAMPLE: FINISH_BROKEN, NOT_ALLOWED: FINISH_NOT_ALLOWED}


def token_words(token_ids: torch.Tensor, position: int, choice: int, key_low: int, key_high: int) -> torch.Tensor:
    """Return int64 words in [0, 2**32) of int64 token ids at a position of prompt + output."""
    zeros = torch.zeros_like(token_ids)
    c0, c1, c2, c3 = token_ids // 4, zeros + position, zeros + choice, zeros
    for _ in range(_ROUNDS):
        # int64 products wrap, but all 64 bits are right; the mask undoes the arithmetic shift.
        even, odd = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = ((odd >> 32) & _WORD) ^ c1 ^ key_low, odd & _WORD
        c2, c3 = ((even >> 32) & _WORD) ^ c3 ^ key_high, even & _WORD
        key_low, key_high = (key_low + _INCREMENTS[0]) & _WORD, (key_high + _INCREMENTS[1]) & _WORD
    lanes = token_ids % 4
    return torch.where(lanes < 2, torch.where(lanes == 0, c0, c1), torch.where(lanes == 2, c2, c3))


def gumbel_from_words(words: torch.Tensor) -> torch.Tensor:
    """Return float32 noise: -log(-log u) in float64, u = (the word's top 23 bits + 0.5) / 2**23."""
    uniform = ((words >> 9).double() + 0.5) / 2**23
    return (-(-uniform.log()).log()).float()


def row_parents(batch: SampleBatch, row: int) -> tuple[int, list[int]]:
    """Return the first row of the row's tree, and the nodes from its own up to below the root."""
    start = int(batch.row_starts[batch.row_seqs[row]])
    path = []
    node = row - start
    while node > 0:
        path.append(node)
        node = min(max(int(batch.parents[start + node]), 0), node - 1)
    return start, path


def row_logits(batch: SampleBatch, state: SamplerState, row: int) -> torch.Tensor:
    """Return float32 [vocab]: a row's logits after all operations up to the temperature.

    Masked tokens and NaN become -inf.
    """
    seq = int(batch.row_seqs[row])
    batch_slot = int(batch.batch_slots[seq])
    start, path = row_parents(batch, row)
    values = batch.logits[row].float()
    values = torch.where(values.isnan(), _NEVER, values)
    num_bias = int(state.num_bias[batch_slot])
    values[state.bias_ids[batch_slot, :num_bias].long()] += state.bias_values[batch_slot, :num_bias]

    repetition, frequency, presence = (
        state.repetition[batch_slot],
        state.frequency[batch_slot],
        state.presence[batch_slot],
    )
    if (float(repetition), float(frequency), float(presence)) != (1, 0, 0):
        counts = state.counts[batch_slot].clone()
        for node in path:
            counts[batch.tokens[start + node]] += 1
        repeated = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where((state.seen[batch_slot] != 0) | (counts > 0), repeated, values)
        values = torch.where(counts > 0, (values - frequency * counts.float()) - presence, values)

    if int(batch.num_outputs[seq]) + len(path) < int(state.min_tokens[batch_slot]):
        values[state.stop_ids[batch_slot, : int(state.num_stops[batch_slot])].long()] = _NEVER
    if batch.mask_rows is not None and batch.mask_bits is not None and int(batch.mask_rows[row]) >= 0:
        ids = torch.arange(len(values), device=values.device).clamp(max=batch.vocab_limit - 1)
        words = batch.mask_bits[int(batch.mask_rows[row])]
        values[(words[ids // 32] >> (ids % 32)) & 1 == 0] = _NEVER
    values[batch.vocab_limit :] = _NEVER
    temperature = state.temperature[batch_slot]
    return values / temperature if temperature > 0 else values


def relative_weights(values: torch.Tensor) -> torch.Tensor:
    """Return float64 probabilities, unnormalised: 1 for the largest value, 0 for -inf."""
    largest = values.max().double()
    return torch.where(values > _NEVER, (values.double() - largest).exp(), 0.0)


def row_cut(values: torch.Tensor, top_k: int, top_p: float, min_p: float) -> tuple[float, int]:
    """Return value and id of the least likely token that top-k, top-p and min-p keep.

    Top-k keeps the k largest values and all values equal to the k-th. From these, top-p keeps the
    shortest run of the most likely tokens that holds the mass, of equal values the lower id first.
    Min-p keeps tokens with at least this share of the best token's probability. (-inf, last id)
    means that all tokens stay.
    """
    cut, cut_id = _NEVER, len(values) - 1
    if values.max() == _NEVER:
        return cut, cut_id
    if 0 < top_k < len(values):
        cut = float(values.sort(descending=True).values[top_k - 1])
        values = torch.where(values >= cut, values, _NEVER)
    if top_p < 1:
        weights = relative_weights(values)
        order = values.sort(dim=0, descending=True, stable=True).indices
        wanted = top_p * weights.sum()
        last = int((weights[order].cumsum(0) < wanted).sum().clamp(max=len(values) - 1))
        # Sums in another order may miss the mass by a rounding; a token without weight never helps.
        last = min(last, int((weights > 0).sum()) - 1)
        cut, cut_id = float(values[order[last]]), int(order[last])
        ids = torch.arange(len(values), device=values.device)
        values = torch.where((values > cut) | ((values == cut) & (ids <= cut_id)), values, _NEVER)
    if min_p > 0:
        least = float(values[relative_weights(values) >= min_p].min())
        cut, cut_id = (least, len(values) - 1) if least > cut else (cut, cut_id)
    return cut, cut_id


def sample_row(batch: SampleBatch, state: SamplerState, row: int) -> int:
    """Return the token sampled at one node, or NO_SAMPLE, or NOT_ALLOWED."""
    seq = int(batch.row_seqs[row])
    batch_slot = int(batch.batch_slots[seq])
    values = row_logits(batch, state, row)
    raw = batch.logits[row, : batch.vocab_limit]
    # Comparisons with NaN are false.
    is_sound = bool((raw < _INFINITY).all()) and bool((raw > _NEVER).any())
    if not is_sound or not _NEVER < values.max() < _INFINITY:
        is_masked = batch.mask_rows is not None and int(batch.mask_rows[row]) >= 0
        return NOT_ALLOWED if is_masked and is_sound else NO_SAMPLE
    if float(state.temperature[batch_slot]) > 0:
        ids = torch.arange(len(values), device=values.device)
        cut, cut_id = row_cut(
            values, int(state.top_k[batch_slot]), float(state.top_p[batch_slot]), float(state.min_p[batch_slot])
        )
        values = torch.where((values > cut) | ((values == cut) & (ids <= cut_id)), values, _NEVER)
        position = int(batch.positions[seq]) + len(row_parents(batch, row)[1])
        key = int(state.seed_low[batch_slot]), int(state.seed_high[batch_slot])
        values = values + gumbel_from_words(token_words(ids, position, int(state.choice[batch_slot]), *key))
    return int((values == values.max()).int().argmax())


def sample_rows_reference(batch: SampleBatch, state: SamplerState, sampled: torch.Tensor) -> None:
    """Sample every row.

    Args:
        sampled: int32 [rows]; written; -1 for rows that belong to no sequence.
    """
    for row, seq in enumerate(batch.row_seqs.tolist()):
        sampled[row] = sample_row(batch, state, row) if 0 <= seq < len(batch.batch_slots) else -1


def walk_reference(
    batch: SampleBatch, sampled: torch.Tensor, state: SamplerState, result: WalkTensors, update_state: bool = True
) -> None:
    """Walk each tree from its root to the child with the sampled token, until there is none.

    Of equal siblings the first is taken. A stop token ends the walk and is not emitted. At most
    ``max_new`` tokens are emitted; the result is LENGTH if the tokens before a stop token fill
    ``max_new``. NO_SAMPLE and NOT_ALLOWED end the walk too; the result is BROKEN or NOT_ALLOWED
    unless the tokens before it fill ``max_new``. No walk enters a node that is CLOSED; with such a
    root the result is STOP, without tokens.
    """
    starts, batch_slots = batch.row_starts.tolist(), batch.batch_slots.clamp(0, len(state.counts) - 1).tolist()
    for seq, batch_slot in enumerate(batch_slots):
        start, num_nodes = starts[seq], starts[seq + 1] - starts[seq]
        stops = set(state.stop_ids[batch_slot, : int(state.num_stops[batch_slot])].tolist())
        held = batch.tokens[start : start + num_nodes].tolist()
        parents = [min(max(parent, 0), node - 1) for node, parent in enumerate(batch.parents[start:].tolist())]
        tokens: list[int] = []
        nodes: list[int] = []
        matched: list[int] = []
        node: int | None = 0 if num_nodes > 0 else None
        unfinished = FINISH_NONE
        nodes_below = list(range(1, num_nodes))
        if batch.mask_rows is not None:
            nodes_below = [i for i in nodes_below if int(batch.mask_rows[start + i]) != CLOSED]
            if num_nodes and int(batch.mask_rows[start]) == CLOSED:
                node = None
        while node is not None and len(tokens) < result.tokens.shape[1]:
            token = int(sampled[start + node])
            if token in _UNFINISHED:
                unfinished = _UNFINISHED[token]
                break
            tokens.append(token)
            nodes.append(node)
            children = (i for i in nodes_below if parents[i] == node and held[i] == token)
            node = next(children, None)
            matched += [] if node is None else [node]
            if token in stops:
                break
        has_ended = num_nodes > 0 and not tokens and unfinished == FINISH_NONE
        is_stopped = has_ended or (bool(tokens) and tokens[-1] in stops)
        emitted = tokens[:-1] if is_stopped else tokens
        max_new = int(batch.max_new[seq])
        is_full = bool(tokens) and len(emitted) >= max_new
        emitted = emitted[:max_new]
        result.num_walked[seq], result.num_tokens[seq] = len(tokens), len(emitted)
        result.num_matched[seq], result.num_accepted[seq] = len(matched), min(len(matched), len(emitted))
        result.finish[seq] = FINISH_LENGTH if is_full else FINISH_STOP if is_stopped else unfinished
        for out, entries in ((result.tokens, tokens), (result.nodes, nodes), (result.accepted, matched)):
            out[seq, : len(entries)] = torch.tensor(entries, dtype=torch.int32)
        penalties = (
            float(state.repetition[batch_slot]),
            float(state.frequency[batch_slot]),
            float(state.presence[batch_slot]),
        )
        if update_state and penalties != (1, 0, 0):
            for token in emitted:
                state.counts[batch_slot, token] += 1
                state.seen[batch_slot, token] = 1


def row_logprobs(
    logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each row's log of the sum of exp, and its token's log-probability and rank.

    Rank 1 is the most likely token; of equal logits the lower id comes first. Runs on any device,
    without synchronising.

    Args:
        logits: float32 or bfloat16 [num_rows, vocab], raw.
        rows, tokens: int32 or int64 [n].

    Returns:
        float64 [n], float64 [n], int32 [n].
    """
    values = logits[rows.long()].float()
    values = torch.where(values.isnan(), _NEVER, values)
    log_sums = values.double().logsumexp(-1)
    chosen = values.gather(1, tokens.long()[:, None])
    ids = torch.arange(values.shape[1], device=values.device)
    ahead = (values > chosen) | ((values == chosen) & (ids < tokens[:, None]))
    return log_sums, chosen[:, 0].double() - log_sums, (ahead.sum(-1) + 1).int()


def top_logprobs(
    logits: torch.Tensor, rows: torch.Tensor, log_sums: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's most likely tokens, best first; of equal logits the lower id.

    Sorts whole rows, because ``torch.topk`` does not define the order of equal values.

    Args:
        logits, rows: as for row_logprobs.
        log_sums: float64 [n], from row_logprobs.

    Returns:
        Ids, int32 [n, count], and log-probabilities, float64 [n, count].
    """
    values = logits[rows.long()].float()
    # Adding 0 makes -0.0 equal to 0.0, for a sort that compares bits.
    values = torch.where(values.isnan(), _NEVER, values) + 0.0
    best, ids = values.sort(dim=-1, descending=True, stable=True)
    return ids[:, :count].int(), best[:, :count].double() - log_sums[:, None]
