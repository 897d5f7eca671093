"""Decide how many tokens to draft for one row, which may be none.

Smoothed counts estimate for each row the chance ``a`` that a drafted token is accepted if its
parent was. A chain of k tokens then yields 1 + a + ... + a^k tokens a step, and the gate picks the
k with the most tokens per second. Where plain decode wins, the gate is shut. It opens now and then
for one probe, ever more rarely while probes fail.

A drafter that has nothing to propose costs a round trip. While that goes on it is
asked less often and only scouted: nobody waits for the answer, which shows whether
asking in earnest is worth it again.
"""

from __future__ import annotations

from collections.abc import Sequence

from verifier_svc.drafters.acceptance_estimates import PRIOR_ACCEPTANCE, PRIOR_TRIALS

# What a step's outcome still weighs after one more drafted step.
MEMORY = 0.9
FIRST_PROBE_AFTER = 8
RAREST_PROBE_AFTER = 128
PROBE_TOKENS = 3
# Replies without a draft in a row after which asking pauses, and the longest pause in steps.
PATIENT_MISSES = 2
LONGEST_PAUSE = 16
# The chance of a chain from which its end is worth nothing.
LEAST_CHANCE = 1e-3


def best_reach(acceptance: float, most: int, relative_costs: Sequence[float]) -> tuple[int, float]:
    """Return the chain length, at most ``most``, with the most tokens a second.

    Also return its speed over plain decode.

    Returns (0, 1.0) where plain decode is faster than any.
    ``relative_costs``: as ``Gate.num_tokens``.
    """
    best, best_rate, expected, power = 0, 1.0, 1.0, 1.0
    for k in range(1, most + 1):
        power *= acceptance
        if power < LEAST_CHANCE:
            break
        expected += power
        rate = expected / relative_costs[k]
        if rate > best_rate:
            best, best_rate = k, rate
    return best, best_rate


class Gate:
    """The gate of one row under drafters of one kind."""

    def __init__(self) -> None:
        self._accepted = PRIOR_TRIALS * PRIOR_ACCEPTANCE
        self._trials = PRIOR_TRIALS
        self._probe_after = FIRST_PROBE_AFTER
        self._shut_steps = 0
        self._probing = False
        # A row begins with scouting: at first most text repeats nothing, and that pays for no wait.
        self._misses = PATIENT_MISSES + 1
        self._pause = 0
        self._pause_length = 0
        self._in_earnest = False
        self._has_begun = False
        # The speed over plain decode that the last choice of ``num_tokens`` promised.
        self.rate = 1.0

    @property
    def acceptance(self) -> float:
        """Estimated chance that a drafted token is accepted given that its parent was."""
        return self._accepted / self._trials

    @property
    def is_scouting(self) -> bool:
        """Return whether the next ask is not worth waiting for."""
        return not self._in_earnest

    def num_tokens(self, most: int, relative_costs: Sequence[float]) -> int:
        """Return the tokens to draft in the next step, at most ``most``. Called once a step.

        ``relative_costs[k]``: the cost of a step with k drafted tokens a row over a
        plain step, for k up to ``most``.
        """
        if most <= 0:
            return 0
        if self._pause:
            self._pause -= 1
            return 0
        best, self.rate = best_reach(self.acceptance, most, relative_costs)
        if best:
            self._shut_steps, self._probing = 0, False
            self._probe_after = FIRST_PROBE_AFTER
            return best
        self._shut_steps += 1
        if self._shut_steps < self._probe_after:
            return 0
        # If not even perfect drafts would pay, costs must change and not the text.
        if self._shut_steps < RAREST_PROBE_AFTER and not best_reach(1.0, most, relative_costs)[0]:
            return 0
        self._shut_steps = 0
        self._probing = True
        return min(PROBE_TOKENS, most)

    def observe(self, num_accepted: int, depth: int) -> None:
        """Learn from a step that drafted to ``depth`` >= 1.

        The step accepted ``num_accepted`` of its path.
        """
        self._has_begun = True
        self._accepted = self._accepted * MEMORY + num_accepted
        # The token after the last accepted one was tried too, unless the draft ended there.
        self._trials = self._trials * MEMORY + min(num_accepted + 1, depth)
        if self._probing:
            # In overlapped steps the next step's number was chosen before this.
            self._probing = False
            # An accepted probe has failed too, unless the gate opens on it.
            self._probe_after = min(self._probe_after * 2, RAREST_PROBE_AFTER)
        if num_accepted:
            self._misses = self._pause = self._pause_length = 0
            self._in_earnest = True
        elif self._misses > PATIENT_MISSES:
            # What scouting found was worth nothing.
            self._scout()

    def pauses(self) -> bool:
        """Return whether nothing is asked in the next step because of misses.

        Count that step then.
        """
        if not self._pause:
            return False
        self._pause -= 1
        return True

    def pass_steps(self, count: int) -> None:
        """Count steps without a call of ``num_tokens``.

        Pauses, and the time to the next probe, are in steps.
        """
        paused = min(self._pause, count)
        self._pause -= paused
        self._shut_steps += count - paused

    def observe_miss(self) -> None:
        """Learn that the drafter, asked, had nothing to propose."""
        self._misses += 1
        if self._misses > PATIENT_MISSES:
            self._scout()

    def expect_drafts(self, acceptance: float) -> None:
        """Ask in earnest from now on: a model proposes something whenever it is asked.

        ``acceptance``: of the model's drafts in other rows. A row that has not
        drafted yet begins with it.
        """
        self._in_earnest = True
        self._pause = 0
        if not self._has_begun:
            self._accepted = PRIOR_TRIALS * acceptance

    def observe_find(self) -> None:
        """Learn that a scouted drafter had something: the next ask is in earnest."""
        self._in_earnest = True
        self._pause = 0

    def _scout(self) -> None:
        """Ask less often, and wait for no answer, until something is accepted."""
        self._in_earnest = False
        self._pause_length = min(max(2 * self._pause_length, 1), LONGEST_PAUSE)
        self._pause = self._pause_length
