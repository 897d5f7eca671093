"""The policy of speculation, all of it: which rows draft, with which drafters, how wide, and when plain decode is best.

It has one request a drafter posted right after a step's tokens are known, and collects the trees before those tokens
are published: on few cores a drafter that shares them with the gateway's work on the last tokens would answer later
than one that runs alone. Whatever goes wrong with a drafter costs root-only rows and a counter, never an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import NamedTuple

import numpy as np

from foretoken.errors import NotFoundError, PreconditionError
from foretoken.limits import DRAFTER_JOIN, MAX_DRAFTER_NAMES, MAX_DRAFTERS
from foretoken.tree import depths
from verifier_svc.draft import Draft, merge
from verifier_svc.draft_link import NO_DRAFT, DrafterCounters, DraftLink, Posted, Row
from verifier_svc.draft_source import DraftSource
from verifier_svc.sequence import DrafterShare, Sequence
from verifier_svc.step_costs import StepCosts
from verifier_svc.tree_shape import TreeShape

__all__ = ["DrafterCounters", "Speculator"]

# The name by which a request asks for the trees of all attached drafters in one.
MERGE = "merge"
AUTO = "auto"
# Steps for which relative costs are taken as they are: they move slowly, and a step has better to do.
COSTS_HOLD_FOR = 16


class _Plan(NamedTuple):
    """What one row does in the next step: it asks these drafters for drafts of ``reach`` (TreeShape)."""

    sequence: Sequence
    links: list[DraftLink]
    reach: int
    # Drafted tokens at most.
    most: int
    awaited: bool


class Speculator:
    """Chooses each row's tree. Used by the engine thread alone."""

    def __init__(
        self,
        sources: Seq[DraftSource],
        costs: StepCosts,
        *,
        epoch: int,
        vocab_size: int,
        block_size: int,
        shape: TreeShape,
        max_batch_size: int,
        timeout_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``max_batch_size`` of 0 means no limit."""
        self._costs = costs
        self._shape = shape
        self._max_batch_size = max_batch_size
        self._new_link = partial(
            DraftLink,
            epoch=epoch,
            vocab_size=vocab_size,
            block_size=block_size,
            timeout_s=timeout_s,
            clock=clock,
        )
        self._clock = clock
        self._links: list[DraftLink] = []
        # Trees for the next step by slot and generation.
        self._drafts: dict[tuple[int, int], Draft] = {}
        self._plans: list[_Plan] = []
        self._captured: tuple[int, ...] = ()
        self._num_posts = 0
        # By drafters and batch size: when they were counted, and relative costs by reach.
        self._cost_lists: dict[tuple[str, int], tuple[int, list[float]]] = {}
        self.num_plain_batch_steps = 0
        for source in sources:
            self.add_source(source)

    @property
    def links(self) -> Seq[DraftLink]:
        """All drafters that there were, by their numbers; its figures may be read by any thread."""
        return self._links

    @property
    def counters(self) -> dict[str, DrafterCounters]:
        """By drafter."""
        return {link.name: link.counters for link in self._links}

    def num_rerun(self, sequence: Sequence) -> int:
        """Positions before the first computed one that its drafters want run again for their hidden states."""
        if not self._captured:
            return 0
        wanted = max((link.source.needs.num_rerun for link in self._links_of(sequence)), default=0)
        return min(wanted, sequence.num_computed)

    def add_source(self, source: DraftSource) -> None:
        """One more drafter, or another one under a name that was detached: that gets its number back.

        Numbers never change: tokens of running sequences bear them. Raises PreconditionError for a name that is taken,
        and at the limits of drafters and names.
        """
        if sum(not link.is_detached for link in self._links) >= MAX_DRAFTERS:
            raise PreconditionError(f"a verifier has at most {MAX_DRAFTERS} drafters: detach one", field="name")
        link = self._link(source.name)
        if link is None:
            if len(self._links) >= MAX_DRAFTER_NAMES:
                raise PreconditionError(
                    f"this verifier has had drafters of {MAX_DRAFTER_NAMES} names: use one of them again",
                    field="name",
                )
            self._links.append(self._new_link(source, len(self._links) + 1))
        elif link.is_detached:
            link.replace_source(source)
        else:
            raise PreconditionError(f"a drafter {source.name!r} is attached: detach it first", field="name")

    def remove_source(self, name: str) -> DraftSource:
        """Do without a drafter from now on; its source, which the caller closes, outside of the engine's thread.

        Rows that wait with a tree of it decode plainly in the next step. Raises NotFoundError if there is none.
        """
        link = self._link(name)
        if link is None or link.is_detached:
            raise NotFoundError(f"there is no drafter {name!r}", field="name")
        link.detach()
        self._drafts = {key: draft for key, draft in self._drafts.items() if link.number not in draft.sources}
        return link.source

    def _link(self, name: str) -> DraftLink | None:
        return next((link for link in self._links if link.name == name), None)

    def capture(self, sequences: Seq[Sequence]) -> tuple[int, ...]:
        """The target's hidden states that attached drafters want of the next step. Called once a step, before it.

        Rows of another set of states are of no use any more.
        """
        wanted = tuple(dict.fromkeys(feature for link in self._links for feature in link.features))
        if wanted != self._captured:
            self._captured = wanted
            for sequence in sequences:
                sequence.features.clear()
        return wanted

    def wants_drafts(self, sequence: Sequence) -> bool:
        """Whether this request asked for speculation at all."""
        options = sequence.speculation
        return options.enabled and options.max_draft_tokens != 0 and bool(self._links)

    def wants_features(self, sequence: Sequence) -> bool:
        """Whether a drafter of this sequence wants the target's hidden states."""
        return bool(self._captured) and any(link.features for link in self._links_of(sequence))

    def draft_of(self, sequence: Sequence) -> Draft | None:
        """The tree to verify in the next step; None: the root alone."""
        return self._drafts.get((sequence.slot, sequence.generation))

    def finish(self, sequence: Sequence) -> None:
        """A sequence is about to give its slot back: its last tokens ride in the next requests, to be learnt."""
        for link in self._links:
            if link.is_attached:
                link.finish(sequence, self._captured)

    def tell(self, prefilling: Seq[Sequence]) -> None:
        """Tell drafters the prompts that this step computes: they learn them while the target does.

        Those that want the target's hidden states are told by ``post``, when there are some.
        """
        for link in self._links:
            if link.is_attached and not link.features:
                self._post(link, self._rows_to_tell(link, prefilling))

    def post(self, decoding: Seq[Sequence], prefilling: Seq[Sequence]) -> None:
        """Ask for the next step's trees.

        ``decoding``: sequences whose next step is a decode step; ``prefilling``: those in the middle of their prompt.
        """
        self._num_posts += 1
        for link in self._links:
            link.read_scout()
        if self._max_batch_size and len(decoding) > self._max_batch_size:
            # True plain decode. Drafters are told of these tokens when speculation returns.
            self.num_plain_batch_steps += 1
            decoding = ()
        batch = max(len(decoding), 1)
        self._plans = [plan for plan in (self._plan(sequence, batch) for sequence in decoding) if plan is not None]
        for link in self._links:
            if link.is_attached:
                rows = self._rows_to_tell(link, prefilling) if link.features else []
                rows += [] if link.is_catching_up() else self._rows_to_draft(link)
                self._post(link, rows)
        for sequence in (*decoding, *prefilling):
            self._forget_told_features(sequence)

    def _post(self, link: DraftLink, rows: list[Row]) -> None:
        if rows or link.has_last_words:
            link.post(rows)

    def _rows_to_tell(self, link: DraftLink, sequences: Seq[Sequence]) -> list[Row]:
        rows = []
        for sequence in sequences:
            if link in self._links_of(sequence):
                row = link.row(sequence, NO_DRAFT, awaited=False, captured=self._captured)
                if row is not None:
                    rows.append(row)
        return rows

    def _rows_to_draft(self, link: DraftLink) -> list[Row]:
        rows = []
        for plan in self._plans:
            if link not in plan.links:
                continue
            shape = self._shape.of_row(link.source.needs.blocks, plan.reach, plan.most)
            awaited = plan.awaited and link.patience.has_some(self._clock())
            row = link.row(plan.sequence, shape, awaited=awaited, captured=self._captured)
            if row is not None:
                rows.append(row)
        return rows

    def _forget_told_features(self, sequence: Sequence) -> None:
        told = [link.told_length(sequence) for link in self._links_of(sequence) if link.features]
        if told:
            # The feature at position told - 1 belongs to the first token that is not told.
            sequence.features.forget_before(min(told) - 1)

    @property
    def waits_for_model(self) -> bool:
        """Whether ``collect`` will wait for a drafter with a model."""
        return any(link.is_awaited and link.source.needs.blocks for link in self._links)

    def collect(self) -> None:
        """Wait for the trees that were asked for and keep those that are sound; ``draft_of`` has them afterwards."""
        self._drafts = {}
        found: dict[tuple[int, int], list[tuple[Row, Draft]]] = {}
        for link in self._links:
            for row, draft in link.collect(self._worth_s):
                found.setdefault((row.slot, row.generation), []).append((row, draft))
        plans = {(plan.sequence.slot, plan.sequence.generation): plan for plan in self._plans}
        for key, answers in found.items():
            draft = merge([draft for _, draft in answers])
            if draft.tree.num_nodes == 1:
                plans[key].sequence.gate.observe_miss()
                continue
            draft = self._trimmed(draft, plans[key], len(found))
            if draft.tree.num_nodes > 1:
                self._drafts[key] = draft

    def _worth_s(self, posted: Posted) -> float:
        """Each row that waits gains at most its drafted tokens, each of which is a plain step of all rows saved."""
        return max(row.shape.nodes - 1 for row in posted.rows) * self._costs.estimate(len(posted.rows))

    def _trimmed(self, draft: Draft, plan: _Plan, batch: int) -> Draft:
        """The nodes that make the most tokens a second, if each of ``batch`` rows verifies as many."""
        draft = draft.best(1 + plan.most)
        if self._shape.is_fixed:
            return draft
        overhead_s = self._wait_s(plan.links, plan.reach)
        expected = np.cumsum(-np.sort(-draft.chances))
        seconds = [self._costs.estimate(batch * (1 + k)) + overhead_s for k in range(len(expected))]
        return draft.best(1 + int(np.argmax(expected / np.array(seconds))))

    def observe(self, sequence: Sequence, draft: Draft, matched: Seq[int], shares: Seq[DrafterShare]) -> None:
        """Learn from a verified tree of which the walk went through the nodes ``matched``."""
        depth = int(depths(draft.tree.parents).max())
        sequence.gate.observe(len(matched), depth)
        is_matched = np.zeros(draft.tree.num_nodes, np.bool_)
        is_matched[list(matched)] = True
        for share in shares:
            link = self._links[share.drafter - 1]
            mine = draft.sources == share.drafter
            link.counters.add(share.num_drafted, share.accepted_depths)
            if len(shares) == 1:
                link.observe_acceptance(len(matched), depth)
            link.estimates.observe(draft.scores[mine], is_matched[mine])

    def observe_step(self, num_rows: int, seconds: float) -> None:
        """Learn what a step without prefill cost."""
        self._costs.observe(num_rows, seconds)

    def _links_of(self, sequence: Sequence) -> list[DraftLink]:
        """The attached drafters of a row: those that it names, all, or the first one. Several are merged."""
        if not self.wants_drafts(sequence):
            return []
        wanted = sequence.speculation.drafter
        attached = [link for link in self._links if link.is_attached]
        if wanted == MERGE:
            return attached
        if wanted == AUTO:
            return attached[:1]
        names = wanted.split(DRAFTER_JOIN)
        return [link for link in attached if link.name in names]

    def _plan(self, sequence: Sequence, batch: int) -> _Plan | None:
        """What a row asks for in the next step; None: nothing."""
        links = self._links_of(sequence)
        if not links:
            return None
        # The last token that may be emitted needs no draft behind it.
        most = min(self._shape.max_nodes, sequence.max_new_tokens) - 1
        if sequence.speculation.max_draft_tokens is not None:
            most = min(most, sequence.speculation.max_draft_tokens)
        if any(link.source.needs.blocks for link in links):
            # A model always has something to propose.
            models = [link.acceptance for link in links if link.source.needs.blocks]
            sequence.gate.expect_drafts(max(models))
        reach = sequence.gate.num_tokens(most, self._relative_costs(links, batch))
        if self._shape.is_fixed:
            reach = most
        return _Plan(sequence, links, reach, most, not sequence.gate.is_scouting) if reach > 0 else None

    def _relative_costs(self, links: list[DraftLink], batch: int) -> list[float]:
        """Cost of a step in which each of ``batch`` rows verifies a draft of reach k over that of a plain one, by k."""
        key = ",".join(link.name for link in links), batch
        counted_at, costs = self._cost_lists.get(key, (0, []))
        if not costs or self._num_posts - counted_at >= COSTS_HOLD_FOR:
            plain = self._costs.estimate(batch)
            costs = [1.0]
            for reach in range(1, self._shape.max_nodes):
                nodes = max(self._shape.of_row(link.source.needs.blocks, reach, reach).nodes for link in links)
                costs.append((self._costs.estimate(batch * nodes) + self._wait_s(links, reach)) / plain)
            self._cost_lists[key] = (self._num_posts, costs)
        return costs

    def _wait_s(self, links: list[DraftLink], reach: int) -> float:
        """Seconds that a step waits for drafts: the drafters work side by side."""
        return max(
            link.times.estimate(self._shape.of_row(True, reach, reach).depth)
            if link.source.needs.blocks
            else link.patience.wait_s
            for link in links
        )
