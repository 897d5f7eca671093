"""Choose how many prompt tokens a step computes, so that it stays under a time limit.

Streams that decode wait for the prompts of a step. So prompts get the time that the limit leaves
beside what the step takes without them. Passes were timed at start. What prompts take in service
differs (drafters, longer contexts, other processes), so a factor is learned from each step that
computes some.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Iterable
from itertools import accumulate

# Prompts get at least this share of what the step takes without them. Else they would starve where
# decoding alone takes as long as the limit.
LEAST_SHARE = 0.25
# A step computes at least this part of the largest chunk, and at least so many tokens: more than
# the positions that run again for a drafter.
LEAST_PART, LEAST_TOKENS = 16, 16
# Steps from which the factor is learned. Their median bears single steps that were disturbed.
WINDOW = 9


class PrefillBudget:
    """The prompt tokens of each step. Only the engine thread uses it.

    Attributes:
        most_tokens: most prompt tokens of any step.
        least_tokens: tokens that a step may compute although it exceeds the limit.
        factor: what prompts take, over the times measured at start.
    """

    def __init__(
        self, most_tokens: int, *, limit_s: float = math.inf, token_s: float = 0.0, smallest_s: float = 0.0
    ) -> None:
        """
        Args:
            limit_s: seconds that a step should take at most.
            token_s: seconds of a token in a pass over ``most_tokens``, measured at start.
            smallest_s: seconds of a pass over one token. It reads all weights.
        """
        self.most_tokens = most_tokens
        self._limit_s, self._token_s = limit_s, token_s
        # A pass over fewer tokens takes as long as one over these.
        self._bound_tokens = min(math.ceil(smallest_s / token_s), most_tokens) if token_s else 1
        self.least_tokens = min(max(self._bound_tokens, most_tokens // LEAST_PART, LEAST_TOKENS), most_tokens)
        self.factor = 1.0
        # The factors of the last steps, and how much each counts.
        self._observed = deque([(self.factor, most_tokens)], maxlen=WINDOW)

    def tokens(self, step_s: float) -> int:
        """Return the most prompt tokens of the next step.

        ``step_s``: seconds that it should take without prompts; 0: nobody else waits for it.
        """
        room_s = max(self._limit_s - step_s, LEAST_SHARE * step_s)
        token_s = self.factor * self._token_s
        if not step_s or self.most_tokens * token_s <= room_s:
            return self.most_tokens
        return max(_round_down(int(room_s / token_s)), self.least_tokens)

    def observe(self, num_tokens: int, seconds: float, step_s: float, *, has_joined: bool = False) -> None:
        """Learn from a step that took ``seconds`` with prompts, and should take ``step_s`` without.

        ``has_joined``: whether the prompts were in the step's own pass, which reads the weights
        anyway. Of few tokens there, a step's time says nothing.
        """
        if not self._token_s or (has_joined and num_tokens < self._bound_tokens):
            return
        weight = max(num_tokens, self._bound_tokens)
        self._observed.append((max(seconds - step_s, 0.0) / (weight * self._token_s), weight))
        self.factor = _median(self._observed)


def _median(values: Iterable[tuple[float, int]]) -> float:
    """Return the median of values with weights."""
    ranked = sorted(values)
    sums = list(accumulate(weight for _, weight in ranked))
    return ranked[bisect.bisect_left(sums, sums[-1] / 2)][0]


def _round_down(num_tokens: int) -> int:
    """Round to one of eight numbers an octave: each size of a prompt pass is a graph on a GPU."""
    return num_tokens & -(1 << max(num_tokens.bit_length() - 4, 0))
