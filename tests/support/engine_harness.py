"""An engine with a target and drafters in one thread, stepped by hand: identity tests run on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from foretoken.drafter import Drafter
from foretoken.drafting import DrafterNeeds, TargetInfo
from foretoken.models.target_weights import TargetWeights
from foretoken.results import TokenLogprobs, VerifiedTree
from foretoken.sampling import SamplingParams, SpeculationOptions
from foretoken.transports.in_process import InProcessTransport
from foretoken.transports.transport import TransportCounters
from tests.support.block_books import check_blocks
from verifier_svc.drafters.attachment import AttachmentSettings
from verifier_svc.drafters.device_offer import DeviceOffer
from verifier_svc.drafters.request import TreeBounds
from verifier_svc.drafters.source import DraftSource
from verifier_svc.engine import Engine
from verifier_svc.lifecycle import SequenceBounds
from verifier_svc.messages import Abort, ErrorEvent, FinishedEvent, SequenceKey, Submit, TokensEvent
from verifier_svc.model.target_runner import TargetRunner
from verifier_svc.outbox import Outbox
from verifier_svc.overlap.runs import OverlapRuns
from verifier_svc.sampling.grammar import Matcher
from verifier_svc.sampling.walker import Walker
from verifier_svc.scheduling.block_manager import BlockManager
from verifier_svc.scheduling.prefill_budget import PrefillBudget
from verifier_svc.scheduling.scheduler import Scheduler
from verifier_svc.speculation.costs import StepCosts
from verifier_svc.speculation.speculator import Speculator

EPOCH = 41
# A node costs almost nothing here: the gate stays open, so that walks are exercised.
FLAT_COSTS = {1: 1.0, 256: 1.001}
# Steps in a row that may get nowhere although there is work.
MOST_VAIN_STEPS = 50


class TestSource:
    """A drafter in this process that can be killed and brought back."""

    __test__ = False

    def __init__(
        self,
        name: str,
        drafter: Drafter,
        target: TargetInfo,
        weights: TargetWeights | None = None,
        offer: DeviceOffer | None = None,
    ) -> None:
        self._weights = weights
        self._offer = offer
        self.name = name
        self.algorithm = drafter.algorithm
        self.needs = DrafterNeeds()
        self.transport_name = "in-process"
        self.address = ""
        self._drafter = drafter
        self._target = target
        self.transport: InProcessTransport | None = None
        self.num_attaches = 0
        self.num_rejected = 0
        self.gauges: dict[str, float] = {}
        self.reason = ""
        self.is_closed = False
        self.failures: list[str] = []
        self.start()

    @property
    def state(self) -> str:
        return "attached" if self.transport else "connecting"

    def start(self) -> None:
        self.needs = self._drafter.needs(self._target)
        self._drafter.attach(self._target, self._weights)
        memory = self._offer.in_process(self._drafter, self._target, self.needs) if self._offer is not None else None
        self.transport = InProcessTransport(self._drafter, TransportCounters(), memory)
        self.num_attaches += 1

    def kill(self) -> None:
        """Die as after a SIGKILL: the engine finds out at its next call."""
        assert self.transport is not None
        self.transport.close()

    def dies_and_returns(self, *, every: int, dies_at: int, returns_at: int) -> Callable[[Harness], None]:
        """Return a hook for ``Harness.run``.

        In each ``every`` steps it kills the drafter in step ``dies_at`` and brings it back in step
        ``returns_at``.
        """

        def each_step(at: Harness) -> None:
            if at.num_steps % every == dies_at and self.transport is not None:
                self.kill()
            if at.num_steps % every == returns_at and self.transport is None:
                self.start()

        return each_step

    def report_failure(self, reason: str) -> None:
        self.failures.append(reason)
        self.transport = None

    def report_success(self) -> None:
        return

    def close(self) -> None:
        self.transport = None
        self.is_closed = True


@dataclass(slots=True)
class Result:
    """Everything that one sequence's events said."""

    token_ids: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    # Each verified tree with the tokens that its step emitted.
    trees: list[tuple[VerifiedTree, tuple[int, ...]]] = field(default_factory=list)
    finished: FinishedEvent | None = None
    error: ErrorEvent | None = None

    @property
    def is_done(self) -> bool:
        return self.finished is not None or self.error is not None


@dataclass(slots=True)
class Request:
    """One sequence to run, in short form."""

    prompt: Sequence[int]
    sampling: SamplingParams
    choice_index: int = 0
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    cache_salt: str | None = None
    output: Sequence[int] = ()
    deadline: float | None = None
    attempt: int = 0
    # The matcher of the sampling's grammar, at its beginning; every run copies it.
    matcher: Matcher | None = None
    prediction: Sequence[int] = ()
    returns_trees: bool = False

    def plain(self) -> Request:
        """Return the same request without speculation."""
        return replace(self, speculation=SpeculationOptions(enabled=False))


class Harness:
    """Steps an engine. ``drafters`` are given by name; ``source`` returns one."""

    def __init__(  # noqa: PLR0913 - an engine's settings
        self,
        runner: TargetRunner,
        *,
        vocab_size: int,
        num_blocks: int,
        block_size: int,
        drafters: Mapping[str, Drafter] | None = None,
        eos_ids: frozenset[int] = frozenset(),
        max_model_len: int = 256,
        max_running: int = 8,
        max_waiting: int = 4096,
        chunk_tokens: int = 64,
        prefill: PrefillBudget | None = None,
        max_nodes: int = 8,
        max_batch_size: int = 0,
        prefix_cache: bool = True,
        costs: Mapping[int, float] | None = None,
        token_limit: int | None = None,
        sources: Sequence[DraftSource] = (),
        timeout_s: float = 5.0,
        clock: Callable[[], float] = time.perf_counter,
        num_steps: int = 0,
        branches: int = 4,
        hidden_size: int = 0,
        num_layers: int = 0,
        checkpoint: str = "",
        weights: TargetWeights | None = None,
        walker: Walker | None = None,
        overlap_runs: OverlapRuns | None = None,
        offer: DeviceOffer | None = None,
    ) -> None:
        """Make an engine.

        ``prefill``: in place of ``chunk_tokens``; ``sources``: started ones beside ``drafters``;
        ``clock``: measures waits for drafts; ``num_steps``, ``branches``: draft models' trees;
        ``hidden_size`` and later: the target.
        """
        target = TargetInfo(
            "test",
            vocab_size,
            max_model_len,
            max_running,
            max_nodes,
            hidden_size=hidden_size,
            num_layers=num_layers,
            block_size=block_size,
            num_blocks=num_blocks,
            checkpoint=checkpoint,
        )
        self.sources = [TestSource(name, drafter, target, weights, offer) for name, drafter in (drafters or {}).items()]
        self.blocks = BlockManager(num_blocks, block_size, enable_prefix_cache=prefix_cache)
        self.scheduler = Scheduler(
            self.blocks,
            max_running=max_running,
            max_waiting=max_waiting,
            prefill=prefill or PrefillBudget(chunk_tokens),
        )
        self.speculator = Speculator(
            [*self.sources, *sources],
            StepCosts(dict(costs or FLAT_COSTS)),
            AttachmentSettings(EPOCH, vocab_size, block_size, timeout_s, clock),
            TreeBounds(max_nodes, num_steps, branches),
            max_batch_size=max_batch_size,
        )
        # Steps take micro- or milliseconds, as the machine likes; the gate must not depend on that.
        self.speculator.costs.observe_step = lambda num_rows, seconds: None  # type: ignore[method-assign]
        self.runner = runner
        self.engine = Engine(
            runner,
            self.scheduler,
            self.speculator,
            SequenceBounds(max_model_len, eos_ids, token_limit or vocab_size),
            walker=walker,
            overlap_runs=overlap_runs,
        )
        self.outbox = Outbox(lambda: None)
        self.session = self.engine.open_session(self.outbox)
        self.results: dict[SequenceKey, Result] = {}
        self.num_steps = 0
        self._num_submitted = 0
        # Steps since the last one that had work to do and got anywhere, as far as can be seen.
        self._num_vain = 0

    def submit(self, request: Request, request_id: str | None = None, *, session: int | None = None) -> SequenceKey:
        """Queue a request; return its key. ``session``: another one, whose events nobody takes."""
        self._num_submitted += 1
        key = SequenceKey(session or self.session, request_id or f"r{self._num_submitted}", request.choice_index)
        self.results[key] = Result()
        matcher = request.matcher and request.matcher.anew()
        assert matcher is None or not request.output or matcher.advance(request.output)
        self.engine.send(
            Submit(
                key=key,
                attempt=request.attempt,
                prompt_ids=tuple(request.prompt),
                prediction_ids=tuple(request.prediction),
                output_ids=tuple(request.output),
                sampling=request.sampling,
                speculation=request.speculation,
                cache_salt=request.cache_salt,
                deadline=request.deadline,
                matcher=matcher,
                returns_trees=request.returns_trees,
            )
        )
        return key

    def abort(self, key: SequenceKey, kept_tokens: int | None = None) -> None:
        self.engine.send(Abort(key, kept_tokens))

    def step(self) -> None:
        """Run one step, and take its events into ``results``."""
        before = self._progress()
        self.engine.run_step()
        self.num_steps += 1
        self._num_vain = self._num_vain + 1 if self._progress() == before and not self.engine.is_idle else 0
        assert self._num_vain < MOST_VAIN_STEPS, "the engine turns in vain"
        self.take_events()

    def take_events(self) -> None:
        """Take what the engine has published into ``results``; check that offsets leave no gap."""
        for event in self.outbox.take():
            result = self.results[event.key]
            match event:
                case TokensEvent():
                    resumed = event.offset - len(result.token_ids)
                    assert resumed >= 0 and (not result.token_ids or resumed == 0), "a gap or an overlap"
                    result.token_ids.extend([0] * resumed + list(event.token_ids))
                    result.sources.extend(event.sources)
                    result.logprobs.extend(event.logprobs)
                    result.prompt_logprobs.extend(event.prompt_logprobs)
                    if event.tree is not None:
                        result.trees.append((event.tree, event.token_ids))
                case FinishedEvent():
                    result.finished = event
                case ErrorEvent():
                    result.error = event

    def _progress(self) -> tuple[int, int, int]:
        """Return counts of which one grows with each step that gets anywhere."""
        engine = self.engine
        running = sum(sequence.num_computed for sequence in self.scheduler.running)
        return engine.counters.num_steps, engine.counters.num_generated_tokens, running

    def run(self, requests: Iterable[Request], *, every_step: Callable[[Harness], None] | None = None) -> list[Result]:
        """Submit all, step until all are done, return their results in order."""
        keys = [self.submit(request) for request in requests]
        while not all(self.results[key].is_done for key in keys):
            self.step()
            if every_step is not None:
                every_step(self)
        return [self.results[key] for key in keys]

    def drain(self) -> None:
        """Step until nothing runs and final updates are sent, then check the books."""
        while not self.engine.is_idle:
            self.step()
        self.step()
        check_blocks(self.blocks)
        assert self.blocks.num_free_blocks == self.blocks.num_blocks, "blocks leaked"
        assert len(self.speculator.rows) == 0, "states of ended rows leaked"


def assert_bits(expected: Result, got: Result, case: str = "") -> None:
    """Assert the same text and finish reason, and equal logprobs without tolerance."""
    assert got.error is None and got.finished is not None and expected.finished is not None, case
    assert got.token_ids == expected.token_ids, case
    assert got.finished.reason == expected.finished.reason, case
    assert got.logprobs == expected.logprobs, case
