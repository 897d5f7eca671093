"""Which rows ask look-up drafters in a step, and which steps wait for what they ask."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Items

from foretoken.models.device_batch import seq_bucket
from verifier_svc.scheduling.sequence import Sequence
from verifier_svc.speculation.draft_round import LookupRound

# Steps after which look-ups are tried although they do not promise what waiting for them costs: at
# first, and at most where tries do not change that.
TRY_EVERY, RAREST_TRY = 16, 256
# In batches from this size on whose look-ups do not pay, a row is asked so many times as often as
# look-ups are tried. A load of eight streams often has seven rows.
RARELY_FROM, ASKS_A_TRY = 5, 4


class _Tries:
    """The tries in batches of one size.

    In a small batch, look-ups may pay that do not in a large one.

    Attributes:
        num_without: steps since one waited for look-ups.
        after: such steps after which the next one does.
    """

    def __init__(self) -> None:
        self.num_without, self.after = 0, TRY_EVERY


class LookupPace:
    """The pace of one kind of steps, overlapped or ordinary. Only the engine thread uses it.

    Where look-ups pay, and in a small batch, each row is asked in each step. Elsewhere rows are
    asked ever more rarely, and steps wait for look-ups only to try them.

    Args:
        in_turns: whether rows that scout are asked in different steps, where a running step hides
            what that takes; else all in the same step, because a request costs more than its rows.
    """

    def __init__(self, lookup_round: LookupRound, *, in_turns: bool) -> None:
        self._round, self._in_turns = lookup_round, in_turns
        # Whether rows are asked in the next step too. Steps so far; those since all rows were
        # asked, or all that ask in earnest; and those since the last call of ``waits``.
        self._asks_again = True
        self._num_steps, self._num_unasked, self._num_uncounted = 0, 0, 0
        # By rounded batch size.
        self._tries: defaultdict[int, _Tries] = defaultdict(_Tries)
        self._latest = _Tries()

    def begin_step(self, batch: int, *, at_once: bool) -> bool:
        """Begin a step of ``batch`` rows. Return whether it asks all of them.

        ``at_once``: whether it does in any case.
        """
        self._num_steps += 1
        self._num_unasked += 1
        self._num_uncounted += 1
        self._latest = self._tries[seq_bucket(batch)]
        if at_once or self._asks_again or batch < RARELY_FROM:
            return True
        return not self._in_turns and self._num_unasked >= self._every

    @property
    def _every(self) -> int:
        """The steps after which a row is asked again where look-ups do not pay."""
        return self._latest.after // ASKS_A_TRY

    def ask_all(self, rows: Items[Sequence]) -> None:
        """Ask all rows that decode and have look-up drafters."""
        self._pass_steps(rows, self._num_unasked)
        self._num_unasked = 0
        self._asks_again = any(self._round.bounds(sequence).is_fixed for sequence in rows)

    def ask_some(self, rows: Items[Sequence]) -> list[Sequence]:
        """Return those that scout in this step, and now and then all that ask in earnest.

        These only pay together.
        """
        every, gate = self._every, self._round.gate
        turn = self._num_steps % every
        scouts = [s for s in rows if s.batch_slot % every == turn and gate(s).is_scouting]
        self._pass_steps(scouts, every)
        if self._num_unasked < every:
            return scouts
        in_earnest = [sequence for sequence in rows if not gate(sequence).is_scouting]
        self._pass_steps(in_earnest, self._num_unasked)
        self._num_unasked = 0
        return scouts + in_earnest

    def _pass_steps(self, rows: Items[Sequence], num_steps: int) -> None:
        """Let gates know that rows are asked in one step of so many."""
        if num_steps > 1:
            for sequence in rows:
                self._round.gate(sequence).pass_steps(num_steps - 1)

    def observe_try(self, *, has_paid: bool) -> None:
        """Learn whether what this step waited for saves more than it took.

        If so, the next step tries again: what look-ups are believed to find follows slowly.
        """
        if has_paid:
            self._latest.after = self._latest.num_without = TRY_EVERY
            self._asks_again = True

    def waits(self, *, pays: bool) -> bool:
        """Return whether the step waits for look-ups: they pay, or are tried.

        Called only in a step that asks.
        """
        num_uncounted, self._num_uncounted = self._num_uncounted, 0
        tries = self._latest
        tries.num_without += num_uncounted
        self._asks_again |= pays
        if not pays and tries.num_without < tries.after:
            return False
        tries.num_without = 0
        tries.after = TRY_EVERY if pays else min(2 * tries.after, RAREST_TRY)
        return True
