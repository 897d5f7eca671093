"""Estimate how many of the promised tokens look-ups find, and in how many rows of a step.

A row's promise is the tokens that it should gain, by how many of its drafted tokens were accepted
in steps where a look-up found something. It leaves out the steps where look-ups find nothing, and
nodes that are not worth their rows in a large batch.
"""

from __future__ import annotations

from foretoken.models.device_batch import seq_bucket
from verifier_svc.speculation.costs import DraftCosts

# Before anything was looked up promises are taken to be kept, with this many tokens' worth of
# trust.
PRIOR_TOKENS = 4.0
# What a step's look-ups still weigh after one more step with look-ups.
MEMORY = 0.9


class LookupYield:
    """What look-ups of a whole batch find in a step. Only the engine thread uses it."""

    def __init__(self) -> None:
        # What ``observe`` was passed, summed over steps with look-ups.
        self._promised = self._found = PRIOR_TOKENS
        self._rows = PRIOR_TOKENS

    def observe(self, promised: float, found: float, num_rows: int) -> None:
        """Learn from a step with look-ups.

        ``promised`` and ``found``: tokens by which the step was to exceed one without look-ups,
        before and after the look-ups. ``num_rows``: rows of the nodes that were found.
        """
        self._promised = self._promised * MEMORY + promised
        self._found = self._found * MEMORY + found
        self._rows = self._rows * MEMORY + num_rows

    def tokens(self, promised: float) -> float:
        """Return the tokens that look-ups should find where so many are promised."""
        return promised * self._found / self._promised

    def num_rows(self, promised: float) -> int:
        """Return the rows of a step that these tokens should take."""
        return round(promised * self._rows / self._promised)

    def gain_s(self, promised: float, num_rows: int, token_s: float, costs: DraftCosts) -> float:
        """Return the seconds that look-ups should save if they promise so many tokens.

        What the rows of their nodes take is subtracted.

        Args:
            num_rows: rows of the step without them.
            token_s: seconds in which the batch makes a token without them.
        """
        return saved_s(self.tokens(promised), self.num_rows(promised), num_rows, token_s, costs)


def saved_s(num_tokens: float, num_added_rows: int, num_rows: int, token_s: float, costs: DraftCosts) -> float:
    """Return the seconds that so many tokens of look-ups save, less what their rows take.

    ``num_added_rows``: rows of their nodes. ``num_rows``, ``token_s``: as in LookupYield.gain_s.
    """
    return num_tokens * token_s - (costs.plain_step_s(num_rows + num_added_rows) - costs.plain_step_s(num_rows))


class LookupYields:
    """The yields in batches of each size: nodes that pay in a small one do not in a large one."""

    def __init__(self) -> None:
        # By rounded batch size.
        self._yields: dict[int, LookupYield] = {}

    def of(self, batch: int) -> LookupYield:
        """Return the yield with ``batch`` sequences."""
        return self._yields.setdefault(seq_bucket(batch), LookupYield())
