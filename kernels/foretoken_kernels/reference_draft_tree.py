"""Define gpu/draft_tree in plain Python, one node at a time.

The functions have the same names and tensors (gpu/draft_tree_state, which does not import Triton).
They run on any device, slowly.
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

import torch

from foretoken_kernels.gpu import draft_tree_state as state
from foretoken_kernels.gpu.draft_tree_state import DraftBeams, DraftOutput, DraftTrees

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


class _Request(NamedTuple):
    """One row of DraftTrees.requests."""

    length: int
    max_nodes: int
    max_depth: int
    max_branches: int
    choice_index: int
    first_kv_slot: int
    root_token: int
    seed_words: tuple[int, int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float


def _request(trees: DraftTrees, tree: int) -> _Request:
    row = trees.requests[tree].tolist()
    return _Request(
        length=row[state.LENGTH],
        max_nodes=row[state.MAX_NODES],
        max_depth=min(row[state.MAX_DEPTH], row[state.MAX_NODES] - 1),
        max_branches=max(min(row[state.MAX_BRANCHES], trees.max_branches), 0),
        choice_index=row[state.CHOICE_INDEX],
        first_kv_slot=row[state.FIRST_KV_SLOT],
        root_token=row[state.ROOT_TOKEN],
        seed_words=(row[state.SEED_LOW] & _WORD, row[state.SEED_HIGH] & _WORD),
        temperature=_float32(row[state.TEMPERATURE]),
        top_k=row[state.TOP_K],
        top_p=_float32(row[state.TOP_P]),
        min_p=_float32(row[state.MIN_P]),
    )


def _float32(bits: int) -> float:
    value: float = struct.unpack("f", struct.pack("i", bits))[0]
    return value


def _filter(values: torch.Tensor, request: _Request) -> torch.Tensor:
    """Apply top-k, top-p and min-p to a row's logits over temperature: cut values become -inf.

    Equal values are all kept or all cut.
    """
    largest = float(values.max())
    if not math.isfinite(largest):
        return values
    if 0 < request.top_k < len(values):
        lowest = values.sort(descending=True).values[request.top_k - 1]
        values = values.masked_fill(values < lowest, -math.inf)
    if request.top_p < 1.0:
        ordered = values.sort(descending=True).values
        mass = (ordered.double() - largest).exp().cumsum(0)
        last = int((mass < request.top_p * mass[-1]).sum())
        values = values.masked_fill(values < ordered[last], -math.inf)
    if request.min_p > 0.0:
        values = values.masked_fill(values < largest + math.log(request.min_p), -math.inf)
    return values


def token_noise(token_ids: torch.Tensor, position: int, choice_index: int, seed_words: tuple[int, int]) -> torch.Tensor:
    """Return float32 Gumbel noise of int64 token ids.

    The words are Philox4x32-10 of the counter (id // 4, position, choice index, 0), keyed by the
    seed.
    """
    c0, c1 = token_ids // 4, torch.full_like(token_ids, position)
    c2, c3 = torch.full_like(token_ids, choice_index), torch.zeros_like(token_ids)
    k0, k1 = seed_words
    for _ in range(10):
        # int64 products wrap, but all 64 bits are right; the mask undoes the arithmetic shift.
        even, odd = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = ((odd >> 32) & _WORD) ^ c1 ^ k0, odd & _WORD
        c2, c3 = ((even >> 32) & _WORD) ^ c3 ^ k1, even & _WORD
        k0, k1 = (k0 + _INCREMENTS[0]) & _WORD, (k1 + _INCREMENTS[1]) & _WORD
    words = torch.stack([c0, c1, c2, c3]).gather(0, (token_ids % 4)[None])[0]
    uniform = ((words >> 9).double() + 0.5) / 2**23
    noise: torch.Tensor = (-(-uniform.log()).log()).float()
    return noise


def _order(values: torch.Tensor) -> list[int]:
    """Return the indices of values above -inf, the largest first, of equal ones the lower index."""
    order = values.sort(descending=True, stable=True).indices
    return [int(i) for i in order[values[order] > -math.inf]]


def _is_inert(request: _Request, level: int) -> bool:
    return level >= request.max_depth or request.max_branches < 1


def _first_child(trees: DraftTrees, level: int, beam: int) -> int:
    branches = trees.max_branches
    return 0 if level == 0 else branches + ((level - 1) * branches + beam) * branches


def offer_children(
    trees: DraftTrees,
    logits: torch.Tensor,
    level: int,
    *,
    vocab_limit: int,
    target_ids: torch.Tensor | None = None,
    scale: float = 0.0,
    filtered: bool = True,
) -> None:
    """Define gpu.draft_children.offer_children: each row's best children become candidates."""
    branches = trees.max_branches
    beams_per_tree = 1 if level == 0 else branches
    for tree in range(len(trees.requests)):
        request = _request(trees, tree)
        fed = trees.fed_counts[tree].tolist()
        for beam in range(beams_per_tree):
            first = _first_child(trees, level, beam)
            trees.scores[tree, first : first + branches] = -math.inf
            trees.tokens[tree, first : first + branches] = 0
            if _is_inert(request, level) or (level > 0 and beam >= fed[level + 1] - fed[level]):
                continue
            above = 0.0
            if level > 0:
                above = float(trees.scores[tree, trees.beam_nodes[tree, (level - 1) * branches + beam]])
            row = logits[tree * beams_per_tree + beam, :vocab_limit].float().nan_to_num(-math.inf, math.inf, -math.inf)
            ids = torch.arange(vocab_limit, device=row.device)
            tokens = ids if target_ids is None else target_ids[:vocab_limit].long()
            factor = 1.0
            if request.temperature > 0.0:
                row = row / request.temperature
                row = _filter(row, request) if filtered else row
                if scale > 0.0:
                    row = row + token_noise(tokens, request.length + level, request.choice_index, request.seed_words)
                    factor = request.temperature / scale
            best = _order(row)[: request.max_branches]
            if not best or row[best[0]] == math.inf:
                continue
            log_probs = (row.double() * factor).log_softmax(0)
            for place, draft_id in enumerate(best):
                trees.scores[tree, first + place] = above + min(float(log_probs[draft_id]), 0.0)
                trees.tokens[tree, first + place] = int(tokens[draft_id])


def choose_beams(
    trees: DraftTrees,
    level: int,
    block_tables: torch.Tensor,
    block_size: int,
    beams: DraftBeams,
    *,
    num_kv_slots: int,
    scratch_kv_slot: int,
    first_depth: int = 0,
) -> None:
    """Define gpu.draft_tree.choose_beams: run the best candidates that a tree has room for."""
    branches = trees.max_branches
    low, high = _first_child(trees, level - 1, 0), state.num_candidates(branches, level)
    for tree in range(len(trees.requests)):
        request = _request(trees, tree)
        if level == 1:
            trees.fed_counts[tree, 1] = 0
        fed = int(trees.fed_counts[tree, level])
        kept = set(_order(trees.scores[tree, :high])[: max(request.max_nodes - 1, 0)])
        most = 0 if _is_inert(request, level) else min(request.max_branches, state.MAX_BEAM_NODES - fed)
        chosen = [low + i for i in _order(trees.scores[tree, low:high]) if low + i in kept][:most]
        trees.fed_counts[tree, level + 1] = fed + len(chosen)
        above = int(trees.fed_counts[tree, first_depth]) if first_depth > 1 else 0
        for beam in range(branches):
            row = tree * branches + beam
            is_run = beam < len(chosen)
            node = chosen[beam] if is_run else 0
            parent = (node - low) // branches if is_run else 0
            number = fed + beam
            mask = 0
            if is_run:
                mask = 1 << number
                if level > 1:
                    mask |= int(trees.masks[tree, int(trees.fed_counts[tree, level - 1]) + parent]) % 2**64
                trees.masks[tree, number] = _signed(mask)
            kv_slot = -1
            entry = (request.first_kv_slot + number) // block_size
            if is_run and entry < block_tables.shape[1]:
                kv_slot = int(block_tables[tree, entry]) * block_size + (request.first_kv_slot + number) % block_size
            trees.beam_nodes[tree, (level - 1) * branches + beam] = node
            beams.token_ids[row] = trees.tokens[tree, node] if is_run else 0
            beams.positions[row] = request.length - 1 + level if is_run else 0
            beams.kv_slots[row] = kv_slot if 0 <= kv_slot < num_kv_slots else scratch_kv_slot
            beams.context_lens[row] = request.length if is_run else 0
            beams.masks[row, 0] = _signed(mask >> above << above)
            beams.sources[row] = tree if level == 1 else tree * branches + parent


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def emit_trees(trees: DraftTrees, out: DraftOutput) -> None:
    """Define gpu.draft_tree.emit_trees: write the root, then the best candidates in their order."""
    branches = trees.max_branches
    for tree in range(len(trees.requests)):
        request = _request(trees, tree)
        room = max(min(request.max_nodes, out.tokens.shape[1]) - 1, 0)
        chosen = sorted(_order(trees.scores[tree])[:room])
        places = {node: 1 + i for i, node in enumerate(chosen)}
        out.tokens[tree], out.parents[tree], out.scores[tree] = 0, -1, 0.0
        out.tokens[tree, 0] = request.root_token
        out.num_nodes[tree] = 1 + len(chosen)
        for node, place in places.items():
            out.tokens[tree, place] = trees.tokens[tree, node]
            out.scores[tree, place] = trees.scores[tree, node]
            beam = (node - branches) // branches
            out.parents[tree, place] = 0 if node < branches else places[int(trees.beam_nodes[tree, beam])]
