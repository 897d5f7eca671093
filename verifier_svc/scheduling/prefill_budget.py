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
from collections.abc import Callable, Iterable
from itertools import accumulate

# Prompts get at least this share of what the step takes without them. Else they would starve where
# decoding alone takes as long as the limit.
LEAST_SHARE = 0.25
# A small pass reads the same weights for fewer tokens. A step computes at least the tokens from
# which each takes so many times as long as in the largest pass.
LEAST_GAIN = 1.25
# At least, whatever was timed. It is more than the positions that run again for a drafter.
LEAST_TOKENS = 16
# Steps from which the factor is learned. Their median bears single steps that were disturbed.
WINDOW = 9


class PrefillBudget:
    """The prompt tokens of each step. Used by the engine thread alone.

    Attributes:
        most_tokens: most prompt tokens of any step.
        least_tokens: tokens that a step may compute although it exceeds the limit.
        factor: what prompts take, over the times measured at start.
    """

    def __init__(
        self,
        most_tokens: int,
        *,
        limit_s: float = math.inf,
        pass_s: Callable[[int], float] = lambda rows: 0.0,
    ) -> None:
        """
        Args:
            limit_s: seconds that a step should take at most.
            pass_s: seconds of the target's pass by rows, measured at start.
        """
        self.most_tokens = most_tokens
        self._limit_s, self._pass_s = limit_s, pass_s
        # Seconds of a token in the largest pass.
        self._token_s = pass_s(most_tokens) / most_tokens
        self.least_tokens = self._efficient_tokens()
        self.factor = 1.0
        # The factors of the last steps, each with the seconds that its prompts should have taken.
        self._observed = deque([(self.factor, pass_s(most_tokens))], maxlen=WINDOW)

    def tokens(self, step_s: float, beside: int = 0) -> int:
        """Return the most prompt tokens of the next step.

        Args:
            step_s: seconds that it should take without prompts. 0: nobody else waits for it.
            beside: rows that share the prompts' pass. 0: prompts have a pass of their own.
        """
        room_s = max(self._limit_s - step_s, LEAST_SHARE * step_s)
        if not step_s or self._prompts_s(self.most_tokens, beside) <= room_s:
            return self.most_tokens
        fits, exceeds = 0, self.most_tokens
        while exceeds - fits > 1:
            middle = (fits + exceeds) // 2
            if self._prompts_s(middle, beside) <= room_s:
                fits = middle
            else:
                exceeds = middle
        return max(_round_down(fits), self.least_tokens)

    def observe(self, num_tokens: int, seconds: float, step_s: float, beside: int = 0) -> None:
        """Learn from a step with prompts that took ``seconds``; see ``tokens`` for the others."""
        nominal_s = self._nominal_s(num_tokens, beside)
        if nominal_s <= 0:
            return
        self._observed.append((max(seconds - step_s, 0.0) / nominal_s, nominal_s))
        self.factor = _median(self._observed)

    def _prompts_s(self, num_tokens: int, beside: int) -> float:
        """Return the seconds that so many prompt tokens should add to a step."""
        return self.factor * self._nominal_s(num_tokens, beside)

    def _nominal_s(self, num_tokens: int, beside: int) -> float:
        added_s = self._pass_s(beside + num_tokens) - (self._pass_s(beside) if beside else 0.0)
        # One disturbed measurement must not make prompts free.
        return max(added_s, num_tokens * self._token_s / 2)

    def _efficient_tokens(self) -> int:
        """Return the fewest tokens that are worth a pass."""
        tokens = LEAST_TOKENS
        while tokens < self.most_tokens and self._pass_s(tokens) > LEAST_GAIN * tokens * self._token_s:
            tokens *= 2
        return min(tokens, self.most_tokens)


def _median(values: Iterable[tuple[float, float]]) -> float:
    """Return the median of values with weights."""
    ranked = sorted(values)
    sums = list(accumulate(weight for _, weight in ranked))
    return ranked[bisect.bisect_left(sums, sums[-1] / 2)][0]


def _round_down(num_tokens: int) -> int:
    """Round to one of eight numbers an octave: each size of a prompt pass is a graph on a GPU."""
    return num_tokens & -(1 << max(num_tokens.bit_length() - 4, 0))
