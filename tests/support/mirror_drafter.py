"""A drafter whose replies show everything that reached it, to test transports.

It can also run as a process of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import uvloop

from drafter_svc.config import DrafterSettings
from drafter_svc.server import serve
from foretoken.drafting import DraftBatch, DrafterNeeds, DraftRequest, TargetInfo
from foretoken.models.target_weights import TargetWeights
from tests.support.draft_requests import draft_batch

INT31 = 2**31 - 1
# A row with this salt makes the drafter raise.
POISON_SALT = 0xDEAD
# Nodes that show a row's columns; a row with fewer nodes shows fewer columns.
NUM_SHOWN = 12


class MirrorDrafter:
    """Node 1 + k of a row's chain holds column k of its request; the root is its last token."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[int, list[int]]] = {}
        self.attached: list[TargetInfo] = []
        self.num_requests = 0
        self.most_new_tokens = 0

    @property
    def algorithm(self) -> str:
        return "MIRROR"

    def needs(self, target: TargetInfo) -> DrafterNeeds:
        return DrafterNeeds()

    def attach(self, target: TargetInfo, weights: TargetWeights | None) -> None:
        self.known.clear()
        self.attached.append(target)

    def draft(self, request: DraftRequest) -> DraftBatch:
        self.num_requests += 1
        self.most_new_tokens = max(self.most_new_tokens, len(request.new_tokens))
        if POISON_SALT in request.salts:
            raise RuntimeError("poisoned")
        chains = []
        for row in range(request.num_rows):
            tokens = self._learn(request, row)
            chains.append(shown(request, row, tokens)[: max(int(request.max_nodes[row]), 1)])
        return draft_batch(
            request.epoch,
            request.step_id,
            np.cumsum([0, *map(len, chains)]).astype(np.int32),
            np.array([token for chain in chains for token in chain], np.int32),
            np.array([node - 1 for chain in chains for node in range(len(chain))], np.int32),
        )

    def release(self, batch_slots: Sequence[int]) -> None:
        for batch_slot in batch_slots:
            self.known.pop(int(batch_slot), None)

    def gauges(self) -> dict[str, float]:
        return {
            "slots": float(len(self.known)),
            "requests": float(self.num_requests),
            "most_new_tokens": float(self.most_new_tokens),
        }

    def _learn(self, request: DraftRequest, row: int) -> list[int]:
        batch_slot, generation = int(request.batch_slots[row]), int(request.generations[row])
        known_generation, tokens = self.known.get(batch_slot, (generation, []))
        if known_generation != generation:
            tokens = []
        tokens = [*tokens, *request.new_tokens[request.new_token_starts[row] : request.new_token_starts[row + 1]]]
        self.known[batch_slot] = (generation, [int(token) for token in tokens])
        return self.known[batch_slot][1]


def shown(request: DraftRequest, row: int, tokens: list[int]) -> list[int]:
    """Return the chain of a row whose batch slot has ``tokens``, not yet cut to the wanted size."""
    salt, seed = int(request.salts[row]), int(request.seeds[row])
    return [
        tokens[-1] if tokens else 0,
        sum((place + 1) * token for place, token in enumerate(tokens)) % INT31,
        int(request.batch_slots[row]),
        int(request.generations[row]),
        int(request.lengths[row]),
        int(request.prompt_lengths[row]),
        salt % INT31,
        salt >> 40,
        seed % INT31,
        seed >> 40,
        int(request.choice_indices[row]),
        int(request.temperatures[row : row + 1].view(np.int32)[0]),
    ]


if __name__ == "__main__":
    uvloop.run(serve(DrafterSettings(name="mirror", address=sys.argv[1]), MirrorDrafter))
