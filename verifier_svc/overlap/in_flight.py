"""The overlapped steps that were launched and not read yet, and their results."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foretoken_kernels.overlap_state import NO_NODE

from verifier_svc.overlap.stage import Stage
from verifier_svc.sampling.device_logprobs import LogprobNumbers
from verifier_svc.sampling.device_walker import walk_results
from verifier_svc.sampling.verify import WalkResult, followed
from verifier_svc.scheduling.batch_row import BatchRow, BatchRowResult, BatchRowTree
from verifier_svc.scheduling.draft import Draft


@dataclass(slots=True)
class StepInFlight:
    """A step that was not read yet.

    Attributes:
        number: the step's.
        stage: None for an empty step, whose end is ``reached``.
        found: the trees that came from the host, by batch row.
        is_bound: whether the second half was launched too.
        logprobs: of all tokens that the batch rows ``logprob_rows`` may have got, row by row.
    """

    number: int
    batch_rows: tuple[BatchRow | None, ...]
    stage: Stage | None
    found: Mapping[int, Draft]
    is_bound: bool = False
    reached: Any = None
    logprob_rows: list[int] = field(default_factory=list)
    logprobs: LogprobNumbers | None = None


class StepsInFlight:
    """Read steps in their order.

    ``is_simulated``: walks need not match grammars, for benchmarks only.
    """

    def __init__(self, *, is_simulated: bool) -> None:
        self._is_simulated = is_simulated
        self._steps: deque[StepInFlight] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: StepInFlight) -> None:
        """Add the step that was launched last."""
        self._steps.append(step)

    @property
    def last(self) -> StepInFlight:
        """Return the step that was launched last. There must be one."""
        return self._steps[-1]

    @property
    def is_bound(self) -> bool:
        """Return whether the last step was launched as a whole."""
        return not self._steps or self._steps[-1].is_bound

    def has_trees(self) -> bool:
        """Return whether ``trees`` of the step that is not bound have arrived."""
        stage = self.last.stage
        assert stage is not None
        return stage.parents.is_ready()

    def trees(self) -> dict[int, BatchRowTree]:
        """Return the trees of the last step's batch rows with masks.

        Sequences that have ended are left out.
        """
        step = self.last
        stage = step.stage
        assert stage is not None
        tokens, parents, starts = stage.tokens.values(), stage.parents.values(), stage.starts.values()
        found = {}
        for index, batch_row in enumerate(step.batch_rows):
            if batch_row is None or not batch_row.is_masked:
                continue
            rows = slice(starts[index], starts[index + 1])
            count = int((tokens[rows] != NO_NODE).sum())
            if count:
                found[index] = BatchRowTree(batch_row, tokens[rows][:count], parents[rows][:count])
        return found

    def is_done(self) -> bool:
        """Return whether the oldest step, which is bound, is done."""
        oldest = self._steps[0]
        if oldest.stage is not None:
            return oldest.stage.walk.found.is_ready()
        return oldest.reached is None or bool(oldest.reached.query())

    def wait(self) -> None:
        """Wait until the oldest step is done, without a break."""
        oldest = self._steps[0]
        if oldest.stage is not None:
            oldest.stage.walk.found.wait()
        elif oldest.reached is not None:
            oldest.reached.synchronize()

    def receive(self) -> list[BatchRowResult]:
        """Return the results of the oldest step, which must be done.

        Samplers of sequences with masks advance by their results.
        """
        step = self._steps.popleft()
        if step.stage is None:
            return []
        found = step.stage.walk.found.take()
        taken = [(index, row) for index, row in enumerate(step.batch_rows) if row is not None]
        drafts = step.found
        sources = [(index, drafts[index].sources if index in drafts else row.drafter_number) for index, row in taken]
        walks = walk_results(found, sources)
        if step.logprobs is not None:
            places = {index: place for place, (index, _) in enumerate(taken)}
            for at, index in enumerate(step.logprob_rows):
                place = places[index]
                walk, most = walks[place], taken[place][1].sequence.sampling.logprobs
                assert most is not None
                depth = len(step.logprobs.logprobs) // len(step.logprob_rows)
                rows = range(at * depth, at * depth + len(walk.tokens))
                entries = step.logprobs.results(walk.tokens, [most] * len(walk.tokens), rows)
                walks[place] = walk._replace(logprobs=entries)
        num_nodes = found["num_nodes"].tolist()
        for place, (index, row) in enumerate(taken):
            if row.is_masked and num_nodes[index] and not row.is_left:
                walks[place] = self._followed(row, walks[place])
        return [
            BatchRowResult(row, walk, num_nodes[index], drafts.get(index))
            for (index, row), walk in zip(taken, walks, strict=True)
        ]

    def _followed(self, batch_row: BatchRow, walk: WalkResult) -> WalkResult:
        """Advance a sampler with masks by a walk, and return what to commit."""
        sampler = batch_row.sequence.sampler
        if not self._is_simulated:
            return followed(sampler, walk)
        # A simulated text need not match: each step has the first one's masks.
        sampler.num_output_tokens += len(walk.tokens)
        return walk
