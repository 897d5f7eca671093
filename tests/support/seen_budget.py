"""A PrefillBudget that keeps what it is asked and sent, and
learns nothing: no test depends on times.
"""

from __future__ import annotations

from collections.abc import Callable

from verifier_svc.scheduling.prefill_budget import PrefillBudget


class SeenBudget(PrefillBudget):
    """Gives ``chosen(step_s)`` tokens; all of them while nobody decodes.

    Attributes:
        asked: the seconds of each step without prompts.
        observed: the prompt rows of each step that was observed.
    """

    def __init__(self, most_tokens: int, chosen: Callable[[float], int]) -> None:
        super().__init__(most_tokens)
        self._chosen = chosen
        self.asked: list[float] = []
        self.observed: list[int] = []

    def tokens(self, step_s: float) -> int:
        self.asked.append(step_s)
        return self._chosen(step_s) if step_s else super().tokens(step_s)

    def observe(self, num_tokens: int, seconds: float, step_s: float, *, has_joined: bool = False) -> None:
        assert seconds > 0
        self.observed.append(num_tokens)
