"""Find the tokens that a request's grammar and token masks allow.

They may follow its output, and a draft tree's nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretoken.errors import ForetokenError, InvalidRequestError
from foretoken.sampling import SamplingParams, has_token_masks
from verifier_svc.sampling.grammar import Bits, Matcher, bits_of
from verifier_svc.sampling.token_masks import TokenMasks

Int32 = NDArray[np.int32]

# TreeMasks.rows of a node where no walk samples, and of one that no walk may enter. The same values
# as in foretoken_kernels/sampler_state.py, which a CPU does not import.
NO_MASK, CLOSED = -1, -2


class TreeMasks(NamedTuple):
    """The tokens that may follow each node of a draft tree.

    Attributes:
        bits: uint8 [n, ceil(vocab_limit / 8)]; each row as ``Matcher.allowed``.
        rows: int32 [num_nodes]; the node's row of ``bits``. NO_MASK: its token ends the output, so
            no walk samples there. CLOSED: no walk may enter the node. Its token is forbidden, or
            completes the grammar, or it is not known what may follow.
    """

    bits: NDArray[np.uint8]
    rows: Int32


# The masks of a sequence that has ended, perhaps since its step was launched: no walk begins.
ENDED = TreeMasks(np.zeros((0, 0), np.uint8), np.array([CLOSED], np.int32))


class _Next(NamedTuple):
    """What may follow a text. ``bits``: None if nothing may. ``is_complete``: the text is whole."""

    bits: Bits | None
    is_complete: bool


class AllowedTokens:
    """The tokens that may follow one output. It advances with the output.

    Attributes:
        bits: uint8 [ceil(vocab_limit / 8)], as in Matcher: text, and stop tokens where the output
            may end.
        is_complete: whether the grammar is complete and nothing may follow.
        error: why the output cannot go on, or None.
    """

    def __init__(
        self,
        params: SamplingParams,
        output_ids: Sequence[int],
        stop_ids: frozenset[int],
        vocab_limit: int,
        matcher: Matcher | None,
    ) -> None:
        """
        Args:
            vocab_limit: ids below this one may be sampled.
            matcher: the grammar's state after the output so far. This object owns it.
        """
        self._params, self._stop_ids, self._matcher = params, stop_ids, matcher
        if matcher is not None:
            vocab_limit = 8 * len(matcher.allowed)
        self._stop_bits = bits_of(stop_ids, vocab_limit)
        self._masks = TokenMasks.of(params, output_ids, vocab_limit)
        # The matcher that reads drafts, and the output that it has not read yet.
        self._ahead = matcher.ahead if matcher is not None else None
        self._unread: list[int] = list(output_ids) if self._ahead is not None else []
        self.bits: Bits
        self.is_complete = False
        self.error: ForetokenError | None = None
        self._look(len(output_ids))

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        output_ids: Sequence[int],
        stop_ids: frozenset[int],
        vocab_limit: int,
        matcher: Matcher | None,
    ) -> AllowedTokens | None:
        """Return what limits a request's tokens; None if nothing does.

        Arguments as for the class.
        """
        if not has_token_masks(params) and matcher is None:
            return None
        return cls(params, output_ids, stop_ids, vocab_limit, matcher)

    @property
    def has_ended(self) -> bool:
        """Return whether no token may follow: the grammar is complete, or cannot go on."""
        return self.is_complete or self.error is not None

    def advance(self, token_id: int, num_output_tokens: int) -> None:
        """Note the output's next token. ``num_output_tokens``: tokens of the output with it."""
        if self._masks is not None:
            self._masks.advance(token_id)
        if self._matcher is not None:
            if token_id in self._stop_ids:
                return
            self._matcher.advance((token_id,))
            if self._ahead is not None:
                self._unread.append(token_id)
        self._look(num_output_tokens)

    def no_token_error(self) -> InvalidRequestError:
        """Return the error for a row in which no allowed token has a logit above -inf."""
        if self._matcher is not None:
            return InvalidRequestError("the model gives no token that the grammar allows", field=self._grammar_kind)
        field = "allowed_token_ids" if self._params.allowed_token_ids else "bad_words"
        return InvalidRequestError(f"{field} leaves no token that the model can continue with", field=field)

    @property
    def _grammar_kind(self) -> str:
        return self._params.grammar.kind if self._params.grammar is not None else ""

    def _look(self, num_output_tokens: int) -> None:
        """Read which tokens may follow, before a row needs them: no token means the text ends."""
        bits, self.is_complete = self._next(self._matcher, self._masks, num_output_tokens)
        if bits is not None:
            self.bits = bits
        elif not self.is_complete:
            assert self._matcher is not None
            other = "min_tokens" if self._masks is None else "the other fields"
            reason = self._matcher.error or f"no token is allowed by both the grammar and {other}"
            self.error = InvalidRequestError(f"the grammar cannot go on: {reason}", field=self._grammar_kind)

    def _next(self, matcher: Matcher | None, masks: TokenMasks | None, num_output_tokens: int) -> _Next:
        """Return what may follow a text after which matcher and masks are in these states."""
        if matcher is None:
            assert masks is not None
            return _Next(masks.bits, False)
        masks_stops = num_output_tokens < self._params.min_tokens
        text = matcher.allowed & ~self._stop_bits if masks_stops else matcher.allowed
        stops = self._stop_bits
        if masks is not None:
            text, stops = text & masks.bits, stops & masks.bits
        if not text.any():
            return _Next(None, matcher.is_accepting)
        return _Next(text | stops if matcher.is_accepting and not masks_stops else text, False)

    # Draft trees.

    def of_tree(self, tokens: Int32, parents: Int32, num_output_tokens: int) -> TreeMasks:
        """Return what may follow each node of a tree whose root is the output's last token.

        Only the look-ahead matcher reads the drafts. So their number of lexer states and the fuel
        that they take never reach the output's own matcher, and the text cannot depend on them.
        Where it cannot go on, or there is none, the tree is closed. ENDED if no token may follow
        the output: a resumed one may be complete.

        Args:
            tokens, parents: int32 [num_nodes], as in DraftTree.
            num_output_tokens: tokens of the output.
        """
        if self.has_ended:
            return ENDED
        walk = _TreeWalk(tokens.tolist(), parents.tolist(), [self.bits])
        if len(tokens) > 1:
            if self._ahead is not None and self._unread:
                self._try_ahead(self._unread)
                self._unread = []
            self._visit(walk, 0, self._masks, num_output_tokens)
        return TreeMasks(np.stack(walk.bits), np.array(walk.rows, np.int32))

    def _visit(self, walk: _TreeWalk, node: int, masks: TokenMasks | None, num_output_tokens: int) -> None:
        """Find what may follow the nodes below ``node``, after which matcher and masks stand."""
        bits = walk.bits[walk.rows[node]]
        for token, child in walk.children[node].items():
            if not _holds(bits, token):
                continue
            if token in self._stop_ids:
                walk.rows[child] = NO_MASK
                continue
            ahead = None
            if self._matcher is not None:
                if not self._try_ahead([token]):
                    continue
                ahead = self._ahead
            after = masks.after(token) if masks is not None else None
            following, _ = self._next(ahead, after, num_output_tokens + 1)
            if following is not None:
                walk.rows[child] = len(walk.bits)
                walk.bits.append(following)
                self._visit(walk, child, after, num_output_tokens + 1)
            if self._ahead is not None:
                self._ahead.go_back(1)

    def _try_ahead(self, token_ids: list[int]) -> bool:
        """Advance the look-ahead matcher. Return False, and drop it, if it cannot go on."""
        if self._ahead is not None and not (self._ahead.advance(token_ids) and not self._ahead.error):
            self._ahead = None
        return self._ahead is not None


class _TreeWalk:
    """The nodes of a tree by parent and token, and what was found of them so far.

    Attributes:
        children: for each node, its children by token; of siblings with one token, the lowest.
        bits: the masks found so far, the root's first.
        rows: as TreeMasks.rows.
    """

    def __init__(self, tokens: list[int], parents: list[int], bits: list[Bits]) -> None:
        self.children: list[dict[int, int]] = [{} for _ in tokens]
        for node in range(1, len(tokens)):
            self.children[parents[node]].setdefault(tokens[node], node)
        self.bits = bits
        # Closed unless a mask is found: also the second of two siblings with one token.
        self.rows = [0] + [CLOSED] * (len(tokens) - 1)


def _holds(bits: Bits, token_id: int) -> bool:
    return token_id < 8 * len(bits) and bool(bits[token_id >> 3] >> (token_id & 7) & 1)
