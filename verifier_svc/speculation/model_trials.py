"""Which rows try a model that does not pay, where the server chooses."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from verifier_svc.scheduling.sequence import Sequence

# One row at a time tries the model, in one of so many steps: more steps after each trial that
# changed nothing. Steps are counted and not rows, since all rows of a batch wait for that row's
# drafts.
TRIAL_EVERY, RAREST_TRIAL = 32, 256


class ModelTrials:
    """Choose the rows that try a model. Only the engine thread uses it."""

    def __init__(self) -> None:
        self._row: Sequence | None = None
        self._every = TRIAL_EVERY
        # Steps in which a row tried the model, and all steps.
        self._num_trial_steps = 0
        self._num_steps = 0

    def restart(self) -> None:
        """Begin with frequent trials: a model pays, or another one came."""
        self._every = TRIAL_EVERY
        self._num_trial_steps = 0
        self._num_steps = 0

    def begin_step(self, running: Seq[Sequence]) -> None:
        """Count a step, and end the trial of a row that has ended."""
        self._num_steps += bool(running)
        if self._row is not None and not any(sequence is self._row for sequence in running):
            self._row = None
            self._every = min(2 * self._every, RAREST_TRIAL)
        self._num_trial_steps += self._row is not None

    def take(self, sequence: Sequence) -> bool:
        """Return whether this new row tries the model."""
        if self._row is not None or self._num_steps < self._every * (self._num_trial_steps + 1):
            return False
        self._row = sequence
        return True
