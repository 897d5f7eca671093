"""Decide which of the verifier's drafters each request gets."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from foretoken.errors import NotFoundError, PreconditionError
from foretoken.limits import DRAFTER_JOIN, MAX_DRAFTER_NAMES, MAX_DRAFTERS
from verifier_svc.drafters.handle import DrafterHandle
from verifier_svc.drafters.source import DraftSource
from verifier_svc.scheduling.sequence import Sequence
from verifier_svc.speculation.model_trials import ModelTrials
from verifier_svc.speculation.row_state import RowStates

# The name by which a request asks for the trees of all attached drafters in one.
MERGE = "merge"
AUTO = "auto"


class _Drafters(NamedTuple):
    """Some drafters, and which of them have a model."""

    all: Seq[DrafterHandle]
    models: Seq[DrafterHandle]
    lookups: Seq[DrafterHandle]

    @classmethod
    def of(cls, drafters: Seq[DrafterHandle]) -> _Drafters:
        models = [drafter for drafter in drafters if drafter.has_model]
        lookups = [drafter for drafter in drafters if not drafter.has_model]
        return cls(drafters, models, lookups)

    def of_kind(self, *, has_model: bool) -> Seq[DrafterHandle]:
        return self.models if has_model else self.lookups


class DrafterRouting:
    """Choose each request's drafters. Only the engine thread uses it; any may read ``drafters``.

    Args:
        new_handle: of a source, under a number.
        pays: whether the server would draft with this model where it chooses for itself.
    """

    def __init__(
        self,
        new_handle: Callable[[DraftSource, int], DrafterHandle],
        pays: Callable[[DrafterHandle], bool],
        rows: RowStates,
    ) -> None:
        self._new_handle, self._pays, self._rows = new_handle, pays, rows
        self._drafters: list[DrafterHandle] = []
        self._attached = _Drafters([], [], [])
        # What the drafters of rows were chosen from, and each row's drafters, which a step asks for
        # many times.
        self._chosen_from: list[tuple[DrafterHandle, DraftSource, bool]] = []
        self._of_row: dict[Sequence, _Drafters] = {}
        self._trials = ModelTrials()

    @property
    def drafters(self) -> Seq[DrafterHandle]:
        """All drafters that there were, by number. Numbers begin at 1."""
        return self._drafters

    @property
    def attached(self) -> Seq[DrafterHandle]:
        """The drafters that take part in this step."""
        return self._attached.all

    def attached_of_kind(self, *, has_model: bool) -> Seq[DrafterHandle]:
        """Return the drafters with a model that take part in this step, or those without one."""
        return self._attached.of_kind(has_model=has_model)

    @property
    def is_as_attached(self) -> bool:
        """Return whether the same drafters are attached as when this step began."""
        return self._attached.all == [drafter for drafter in self._drafters if drafter.is_attached]

    def begin_step(self, running: Seq[Sequence]) -> None:
        """Fix who takes part in this step.

        Drafters that attach later take part from the next step on.
        """
        self._trials.begin_step(running)
        attached = [drafter for drafter in self._drafters if drafter.is_attached]
        choice = [(drafter, drafter.source, drafter.has_model) for drafter in attached]
        if choice != self._chosen_from:
            self._chosen_from = choice
            self._of_row.clear()
            self._attached = _Drafters.of(attached)

    def add(self, source: DraftSource) -> None:
        """Add a drafter. Under a name that was detached it gets that name's number back.

        Numbers never change, since tokens of running sequences carry them. Raises PreconditionError
        for a name or an address that is taken, and at the limits of drafters and names.
        """
        for other in self._drafters:
            is_same = source.address and other.name != source.name and other.source.address == source.address
            if is_same and not other.is_detached:
                # A drafter serves one attachment. Two names would take it from each other for ever.
                raise PreconditionError(
                    f"the drafter at {source.address} is attached as {other.name!r}: detach it first", field="address"
                )
        if sum(not drafter.is_detached for drafter in self._drafters) >= MAX_DRAFTERS:
            raise PreconditionError(f"a verifier has at most {MAX_DRAFTERS} drafters: detach one", field="name")
        drafter = self._drafter(source.name)
        if drafter is None:
            if len(self._drafters) >= MAX_DRAFTER_NAMES:
                raise PreconditionError(
                    f"this verifier has had drafters of {MAX_DRAFTER_NAMES} names: use one of them again",
                    field="name",
                )
            self._drafters.append(self._new_handle(source, len(self._drafters) + 1))
        elif drafter.is_detached:
            drafter.replace_source(source)
        else:
            raise PreconditionError(f"there is a drafter {source.name!r}: detach it first", field="name")
        self._trials.restart()

    def remove(self, name: str) -> DrafterHandle:
        """Detach a drafter, which keeps its number. Raises NotFoundError if there is none."""
        drafter = self._drafter(name)
        if drafter is None or drafter.is_detached:
            what = f"there is no drafter {name!r}" if drafter is None else f"the drafter {name!r} is detached"
            raise NotFoundError(what, field="name")
        drafter.detach()
        return drafter

    def _drafter(self, name: str) -> DrafterHandle | None:
        return next((drafter for drafter in self._drafters if drafter.name == name), None)

    def is_wanted(self, sequence: Sequence) -> bool:
        """Return whether this request asked for speculation at all, and there is some."""
        options = sequence.speculation
        return options.enabled and options.max_draft_tokens != 0 and bool(self._drafters)

    def may_use(self, sequence: Sequence) -> bool:
        """Return whether any drafter that this request admits is attached."""
        wanted = sequence.speculation.drafter
        if wanted in (AUTO, MERGE):
            return bool(self._attached.all)
        names = wanted.split(DRAFTER_JOIN)
        return any(drafter.name in names for drafter in self._attached.all)

    def of(self, sequence: Sequence) -> Seq[DrafterHandle]:
        """Return the attached drafters of a row.

        A row gets the drafters that it names, or all of them, or those that the server chooses
        from. The server chooses from the first drafter, unless that is a model that does not pay.
        Beside a model it takes the first look-up drafter, which costs next to nothing to ask.
        """
        return self._row(sequence).all

    def of_kind(self, sequence: Sequence, *, has_model: bool) -> Seq[DrafterHandle]:
        """Return a row's drafters with a model, or those without one."""
        return self._row(sequence).of_kind(has_model=has_model)

    def _row(self, sequence: Sequence) -> _Drafters:
        row = self._of_row.get(sequence)
        if row is None:
            row = self._of_row[sequence] = _Drafters.of(self._choose(sequence))
        return row

    def forget(self, sequence: Sequence) -> None:
        """Drop what is known of a sequence that ends."""
        self._of_row.pop(sequence, None)

    def _choose(self, sequence: Sequence) -> Seq[DrafterHandle]:
        if not self.is_wanted(sequence):
            return []
        wanted = sequence.speculation.drafter
        attached = self._attached.all
        if wanted == MERGE:
            return attached
        if wanted == AUTO:
            if not attached or not attached[0].has_model:
                return attached[:1]
            lookup = [drafter for drafter in attached[1:] if not drafter.has_model][:1]
            return [attached[0], *lookup] if self._uses_model(sequence, attached[0]) else lookup
        names = wanted.split(DRAFTER_JOIN)
        return [drafter for drafter in attached if drafter.name in names]

    def _uses_model(self, sequence: Sequence, drafter: DrafterHandle) -> bool:
        """Return whether a row for which the server chooses drafts with the model.

        Decided once, before it is sent.
        """
        state = self._rows.of(sequence)
        if state.uses_model is None:
            pays = self._pays(drafter)
            if pays:
                self._trials.restart()
            # A tree of a fixed shape is drafted whatever it costs.
            state.uses_model = pays or state.bounds.is_fixed or self._trials.take(sequence)
        return state.uses_model
