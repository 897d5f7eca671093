"""How often rows try a model that does not pay."""

from __future__ import annotations

from typing import cast

from verifier_svc.scheduling.sequence import Sequence
from verifier_svc.speculation.model_trials import RAREST_TRIAL, TRIAL_EVERY, ModelTrials

# Steps of each row.
NUM_STEPS = 10


class Play:
    """Rows that come one after the other.

    Attributes:
        rows: whether each row so far tried the model.
    """

    def __init__(self) -> None:
        self.trials = ModelTrials()
        self.rows: list[bool] = []

    def run(self, num_steps: int) -> int:
        """Run at least so many steps; return how many rows tried the model in them."""
        first = len(self.rows)
        for _ in range(0, num_steps, NUM_STEPS):
            row = cast("Sequence", object())
            self.rows.append(self.trials.take(row))
            for _ in range(NUM_STEPS):
                self.trials.begin_step([row])
        return sum(self.rows[first:])


def test_trials_that_change_nothing_grow_rare() -> None:
    play = Play()
    assert play.run(TRIAL_EVERY) == 0 and play.run(NUM_STEPS) == 1
    assert play.run(NUM_STEPS * TRIAL_EVERY) == 0, "the second trial comes later than the first"
    assert play.run(2 * NUM_STEPS * TRIAL_EVERY) == 1
    # In the end one step of so many has a row that tries the model.
    play.run(50 * NUM_STEPS * RAREST_TRIAL)
    assert 4 <= play.run(5 * NUM_STEPS * RAREST_TRIAL) <= 5


def test_trials_are_frequent_again_once_a_model_pays() -> None:
    play = Play()
    play.run(100 * NUM_STEPS * TRIAL_EVERY)
    play.trials.restart()
    assert play.run(TRIAL_EVERY) == 0 and play.run(NUM_STEPS) == 1


def test_one_row_tries_the_model_at_a_time() -> None:
    trials = ModelTrials()
    first, second = (cast("Sequence", object()) for _ in range(2))
    for _ in range(TRIAL_EVERY):
        trials.begin_step([first, second])
    assert trials.take(first)
    for _ in range(100 * TRIAL_EVERY):
        trials.begin_step([first, second])
        assert not trials.take(second)
    trials.begin_step([])
    # Its steps count as a share of all steps.
    assert not trials.take(second)
