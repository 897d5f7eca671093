"""Walk a tree with masks from outside, node by node, as a GPU does: it knows no grammar."""

from __future__ import annotations

import numpy as np

from foretoken.errors import InvalidRequestError
from foretoken.tree import DraftTree
from verifier_svc.sampling.allowed_tokens import CLOSED, TreeMasks
from verifier_svc.sampling.grammar import Bits
from verifier_svc.sampling.verify import SamplingState


class _Given:
    """Stand in for AllowedTokens: the masks of one tree's nodes, along a walk."""

    is_complete, error = False, None

    def __init__(self, tree: DraftTree, masks: TreeMasks) -> None:
        self._tree, self._masks, self._node = tree, masks, 0

    @property
    def bits(self) -> Bits:
        row = self._masks.rows[self._node]
        assert row >= 0, "a walk samples at a node without a mask"
        return np.asarray(self._masks.bits[row], np.uint8)

    def advance(self, token_id: int, num_output_tokens: int) -> None:
        held = (self._tree.parents == self._node) & (self._tree.tokens == token_id)
        self._node = int(held.argmax()) if held.any() else self._node

    def no_token_error(self) -> InvalidRequestError:
        return InvalidRequestError("no token is allowed")


def give(state: SamplingState, tree: DraftTree, masks: TreeMasks) -> DraftTree:
    """Let ``state`` use these masks for its next walk; return the tree without its closed nodes."""
    opened = DraftTree(np.where(masks.rows == CLOSED, -2, tree.tokens), tree.parents)
    state._allowed = _Given(opened, masks)  # type: ignore[assignment]
    return opened
