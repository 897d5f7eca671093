"""A drafter that knows the plain text and errs in planned ways, so that every walk is exercised.

For each row it plants, in turn: a right chain, a chain with a wrong token, a wrong sibling before
the right one with nodes below both, a right branch after a wrong subtree (so that KV entries must
be compacted), an early end, no draft, and only wrong tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from foretoken.drafting import DraftBatch, DrafterNeeds, DraftRequest, TargetInfo
from foretoken.models.target_weights import TargetWeights
from tests.support.draft_requests import draft_batch

Nodes = list[tuple[int, int]]  # token, parent


class ScriptedDrafter:
    """Replays ``outputs``: plain output tokens by (prompt, choice index)."""

    def __init__(self, outputs: Mapping[tuple[tuple[int, ...], int], Sequence[int]], *, seed: int = 0) -> None:
        self._outputs = outputs
        self._rng = np.random.default_rng(seed)
        self._tokens: dict[tuple[int, int], list[int]] = {}
        self._vocab_size = 0
        self.num_requests = 0

    @property
    def algorithm(self) -> str:
        return "SCRIPTED"

    def needs(self, target: TargetInfo) -> DrafterNeeds:
        return DrafterNeeds()

    def attach(self, target: TargetInfo, weights: TargetWeights | None) -> None:
        self._vocab_size = target.vocab_size
        self._tokens.clear()

    def release(self, batch_slots: Sequence[int]) -> None:
        for key in [key for key in self._tokens if key[0] in batch_slots]:
            del self._tokens[key]

    def gauges(self) -> dict[str, float]:
        return {"scripted_rows": float(len(self._tokens))}

    def draft(self, request: DraftRequest) -> DraftBatch:
        self.num_requests += 1
        starts, tokens, parents = [0], [], []
        for row in range(request.num_rows):
            known = self._learn(request, row)
            nodes = self._tree(request, row, known)
            tokens.extend(token for token, _ in nodes)
            parents.extend(parent for _, parent in nodes)
            starts.append(len(tokens))
        return draft_batch(
            request.epoch,
            request.step_id,
            np.array(starts, np.int32),
            np.array(tokens, np.int32),
            np.array(parents, np.int32),
        )

    def _learn(self, request: DraftRequest, row: int) -> list[int]:
        key = (int(request.batch_slots[row]), int(request.generations[row]))
        low, high = request.new_token_starts[row], request.new_token_starts[row + 1]
        known = self._tokens.setdefault(key, [])
        first = int(request.lengths[row]) - int(high - low)
        assert first <= len(known), "tokens that this drafter was never sent"
        del known[first:]
        known.extend(request.new_tokens[low:high].tolist())
        return known

    def _tree(self, request: DraftRequest, row: int, known: list[int]) -> Nodes:
        most = int(request.max_nodes[row])
        nodes: Nodes = [(known[-1], -1)]
        prompt_length = int(request.prompt_lengths[row])
        output = self._outputs.get((tuple(known[:prompt_length]), int(request.choice_indices[row])))
        if output is None or most == 1:
            return nodes
        right = list(output[len(known) - prompt_length :])
        plan = self._rng.integers(7)
        if plan == 0:
            _chain(nodes, right, 0, most)
        elif plan == 1:
            at = int(self._rng.integers(max(min(len(right), most - 1), 1)))
            wrong = [self._wrong(t) if i == at else t for i, t in enumerate(right)]
            _chain(nodes, wrong, 0, most)
        elif plan == 2 and right:
            nodes.append((self._wrong(right[0]), 0))
            nodes.append((right[0], 0))
            _chain(nodes, right[1:2], 1, most)
            _chain(nodes, right[1:], 2, most)
        elif plan == 3 and len(right) > 1:
            nodes.append((right[0], 0))
            _chain(nodes, [self._wrong(right[1]), self._wrong(right[1])], 1, min(most, 4))
            _chain(nodes, right[1:], 1, most)
        elif plan == 4:
            _chain(nodes, right[:1], 0, most)
        elif plan == 6:
            _chain(nodes, [self._wrong(t) for t in right], 0, most)
        return nodes[:most]

    def _wrong(self, token: int) -> int:
        return (token + 1 + int(self._rng.integers(self._vocab_size - 1))) % self._vocab_size


def _chain(nodes: Nodes, tokens: Sequence[int], parent: int, most: int) -> None:
    """Append ``tokens`` below ``parent``, one below the other, while there is room."""
    for token in tokens:
        if len(nodes) >= most:
            return
        nodes.append((token, parent))
        parent = len(nodes) - 1
