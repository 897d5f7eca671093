"""What the speculator knows of each row: its gates, its bounds, whether a model drafts."""

from __future__ import annotations

from verifier_svc.drafters.request import TreeBounds
from verifier_svc.scheduling.sequence import Sequence
from verifier_svc.speculation.gate import Gate


class RowState:
    """The state of one row."""

    def __init__(self, bounds: TreeBounds, *, has_prediction: bool) -> None:
        """``has_prediction``: whether the client has said what comes."""
        # Of the row's trees.
        self.bounds = bounds
        # One for look-up drafters, one for drafters with a model.
        self.lookup_gate = Gate()
        self.model_gate = Gate()
        # Whether the model that the server would choose drafts for the
        # row; None until that is decided.
        self.uses_model: bool | None = None
        if has_prediction:
            # There is something to propose from the first token on, so nothing to scout for.
            self.lookup_gate.observe_find()


class RowStates:
    """States by sequence. A preempted sequence keeps its state; one that ends loses it."""

    def __init__(self, bounds: TreeBounds) -> None:
        """``bounds``: of all trees."""
        self._bounds = bounds
        self._states: dict[Sequence, RowState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def of(self, sequence: Sequence) -> RowState:
        """Return the state of a sequence that has not ended; at first sight it is new."""
        state = self._states.get(sequence)
        if state is None:
            bounds = self._bounds.of_request(sequence.speculation.shape)
            state = self._states[sequence] = RowState(bounds, has_prediction=bool(sequence.submission.prediction_ids))
        return state

    def has(self, sequence: Sequence) -> bool:
        """Return whether a sequence has a state, which it has not once it has ended."""
        return sequence in self._states

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of a sequence that ends."""
        self._states.pop(sequence, None)
