"""Make batches for the device sampler, as foretoken's own objects and as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from foretoken_kernels.sampler_state import SampleBatch, SamplerState, WalkTensors, new_sampler_state, reset_batch_slots

from foretoken.sampling import SamplingParams, is_greedy, noise_key, stop_token_ids
from foretoken.tree import DraftTree

MAX_BIAS, MAX_STOPS = 4, 3


@dataclass
class Sequence:
    params: SamplingParams
    prompt: list[int]
    output: list[int]
    tree: DraftTree
    logits: np.ndarray
    eos_ids: frozenset[int] = frozenset()
    choice: int = 0
    max_new: int = 100


def random_params(rng: np.random.Generator, vocab: int) -> SamplingParams:
    """Return random settings: all operations in all combinations, extreme values included."""

    def pick(*values):
        return values[rng.integers(len(values))]

    return SamplingParams(
        temperature=pick(0.0, 1.0, 0.7, 1e-4, 2.0),
        top_k=int(pick(0, 0, -1, 1, 3, 40, vocab - 1, vocab, 10 * vocab)),
        top_p=pick(1.0, 1.0, 0.9, 0.5, 1e-9, 0.999),
        min_p=pick(0.0, 0.0, 0.05, 0.5, 1.0),
        repetition_penalty=pick(1.0, 1.0, 1.3, 0.6),
        frequency_penalty=pick(0.0, 0.0, 0.7, -1.1),
        presence_penalty=pick(0.0, 0.0, 1.9, -0.3),
        seed=int(rng.integers(-(2**63), 2**63 - 1)),
        logit_bias={int(i): float(pick(-100.0, 3.3, 100.0)) for i in rng.integers(vocab, size=pick(0, 0, MAX_BIAS))},
        min_tokens=int(pick(0, 0, 3, 6)),
        stop_token_ids=tuple(int(i) for i in set(rng.integers(vocab, size=pick(0, 2)).tolist())),
    )


def random_logits(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    logits = rng.normal(0, 3, (rows, vocab))
    if rng.random() < 0.5:
        logits = np.round(logits)  # ties
    if rng.random() < 0.3:
        logits[rng.random((rows, vocab)) < 0.2] = -np.inf
    if rng.random() < 0.3:
        broken = np.flatnonzero(rng.random(rows) < 0.4)
        logits[broken, rng.integers(vocab, size=len(broken))] = rng.choice([np.nan, np.inf], len(broken))
    if rng.random() < 0.1:
        logits[:] = pick_constant(rng)
    return logits.astype(np.float32)


def pick_constant(rng: np.random.Generator) -> float:
    return [0.0, -np.inf, 1e30, np.nan][rng.integers(4)]


def random_tree(rng: np.random.Generator, nodes: int, vocab: int, root: int) -> DraftTree:
    """Return a tree of any shape; few distinct tokens, so siblings and ancestors repeat them."""
    parents = [-1] + [int(rng.integers(node)) for node in range(1, nodes)]
    tokens = [root] + [int(token) for token in rng.integers(min(vocab, 6), size=nodes - 1)]
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32))


def random_sequence(rng: np.random.Generator, vocab: int, nodes: int, pull: float = 0.0) -> Sequence:
    """Return a random sequence; ``pull`` raises its tree's tokens' logits, so walks go deep."""
    prompt = rng.integers(min(vocab, 20), size=rng.integers(1, 6)).tolist()
    output = rng.integers(min(vocab, 12), size=rng.integers(0, 6)).tolist()
    logits = random_logits(rng, nodes, vocab)
    logits[:, :6] += np.float32(pull)
    return Sequence(
        random_params(rng, vocab),
        prompt,
        output,
        random_tree(rng, nodes, vocab, (prompt + output)[-1]),
        logits,
        eos_ids=frozenset({int(rng.integers(6))}),
        choice=int(rng.integers(16)),
        max_new=int(rng.integers(1, 6)),
    )


def new_state(
    sequences: list[Sequence], batch_slots: list[int], vocab: int, max_batch_slots: int, device: str
) -> SamplerState:
    """Return a state that holds each sequence in its batch slot."""
    state = new_sampler_state(max_batch_slots, vocab, MAX_BIAS, MAX_STOPS, device)
    # Left behind by an earlier request.
    state.counts.fill_(7)
    state.seen.fill_(1)
    for batch_slot, sequence in zip(batch_slots, sequences, strict=True):
        params = sequence.params
        state.temperature[batch_slot] = 0.0 if is_greedy(params) else params.temperature
        state.top_k[batch_slot] = params.top_k
        state.top_p[batch_slot] = params.top_p
        state.min_p[batch_slot] = params.min_p
        state.repetition[batch_slot] = params.repetition_penalty
        state.frequency[batch_slot] = params.frequency_penalty
        state.presence[batch_slot] = params.presence_penalty
        state.seed_low[batch_slot], state.seed_high[batch_slot] = noise_key(params.seed)
        state.choice[batch_slot] = sequence.choice
        state.min_tokens[batch_slot] = params.min_tokens
        for index, (token, bias) in enumerate(params.logit_bias.items()):
            state.bias_ids[batch_slot, index], state.bias_values[batch_slot, index] = token, bias
        state.num_bias[batch_slot] = len(params.logit_bias)
        stops = sorted(stop_token_ids(params, sequence.eos_ids))
        state.stop_ids[batch_slot, : len(stops)] = torch.tensor(stops, dtype=torch.int32)
        state.num_stops[batch_slot] = len(stops)

    def ids(lists: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = [(token, batch_slot) for batch_slot, tokens in zip(batch_slots, lists, strict=True) for token in tokens]
        flat = torch.tensor(pairs, dtype=torch.int64, device=device).reshape(-1, 2)
        return flat[:, 0], flat[:, 1]

    prompts, outputs = ids([s.prompt for s in sequences]), ids([s.output for s in sequences])
    reset_batch_slots(state, torch.tensor(batch_slots, device=device), *prompts, *outputs)
    return state


def new_batch(
    sequences: list[Sequence],
    batch_slots: list[int],
    vocab: int,
    device: str,
    *,
    vocab_limit: int | None = None,
    padding_rows: int = 0,
    dtype: torch.dtype = torch.float32,
) -> SampleBatch:
    """Return one step of these sequences; padding rows and one sequence without rows come last."""

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    sizes = [s.tree.num_nodes for s in sequences]
    starts = np.cumsum([0, *sizes]).tolist()
    logits = np.concatenate([s.logits for s in sequences] + [np.full((padding_rows, vocab), np.nan, np.float32)])
    return SampleBatch(
        logits=torch.from_numpy(logits).to(device, dtype),
        row_seqs=ints([seq for seq, size in enumerate(sizes) for _ in range(size)] + [-1] * padding_rows),
        row_starts=ints([*starts, starts[-1]]),
        tokens=ints([t for s in sequences for t in s.tree.tokens.tolist()] + [123456789] * padding_rows),
        parents=ints([p for s in sequences for p in s.tree.parents.tolist()] + [987654321] * padding_rows),
        batch_slots=ints([*batch_slots, -5]),
        positions=ints([len(s.prompt) + len(s.output) for s in sequences] + [0]),
        num_outputs=ints([len(s.output) for s in sequences] + [0]),
        max_new=ints([s.max_new for s in sequences] + [0]),
        vocab_limit=vocab if vocab_limit is None else vocab_limit,
    )


def path_tokens(tree: DraftTree, node: int) -> list[int]:
    """Return the tokens from the root's child to the node."""
    path = []
    while node > 0:
        path.append(int(tree.tokens[node]))
        node = int(tree.parents[node])
    return path[::-1]


def new_walk_result(max_seqs: int, max_tokens: int, device: torch.device | str) -> WalkTensors:
    """Return a result with room for ``max_tokens`` sampled tokens a sequence.

    Args:
        max_tokens: the deepest node's depth and one more.
    """

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    return WalkTensors(
        num_walked=zeros(max_seqs),
        num_tokens=zeros(max_seqs),
        tokens=zeros(max_seqs, max_tokens),
        nodes=zeros(max_seqs, max_tokens),
        num_matched=zeros(max_seqs),
        num_accepted=zeros(max_seqs),
        accepted=zeros(max_seqs, max_tokens),
        finish=zeros(max_seqs),
    )
