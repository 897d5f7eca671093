"""Put the parts of a verifier together: target, drafters, engine."""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from foretoken.drafter import Drafter
from foretoken.drafter_names import check_together
from foretoken.limits import ModelLimits
from foretoken.models.backend import Backend, choose_backend, device_name
from foretoken.models.decoder_weights import Progress
from foretoken.models.target_check import check_target, log_notes
from foretoken.models.tokenizer_size import num_token_ids
from verifier_svc.config import VerifierSettings
from verifier_svc.drafters.attachment import AttachmentSettings
from verifier_svc.drafters.clients import DrafterClients
from verifier_svc.drafters.request import TreeBounds
from verifier_svc.drafters.source import DraftSource
from verifier_svc.engine import Engine
from verifier_svc.info import VerifierConstants
from verifier_svc.lifecycle import SequenceBounds
from verifier_svc.model.calibration import measure_step_costs
from verifier_svc.model.memory_plan import MemoryPlan
from verifier_svc.model.sizes import with_sizes
from verifier_svc.model.target import memory_plan
from verifier_svc.progress_lines import ProgressLines
from verifier_svc.sampling import verify
from verifier_svc.sampling.grammar import Vocabulary
from verifier_svc.sampling.grammar_compiler import GrammarCompiler
from verifier_svc.sampling.simulated_acceptance import AcceptanceSimulator, SimulatedWalker
from verifier_svc.scheduling.block_manager import BlockManager
from verifier_svc.scheduling.cache_events import CacheEvents
from verifier_svc.scheduling.prefill_budget import PrefillBudget
from verifier_svc.scheduling.scheduler import Scheduler
from verifier_svc.speculation.candidate_shapes import usual_trees
from verifier_svc.speculation.costs import StepCosts
from verifier_svc.speculation.speculator import Speculator
from verifier_svc.target_loading import Target, load_target

if TYPE_CHECKING:
    from verifier_svc.kv_events import KvEventPublisher

logger = logging.getLogger(__name__)


def plan(settings: VerifierSettings, *, drafts: bool, has_model: bool) -> str:
    """Return the plan of memory and draft trees as text, for ``--dry-run``.

    Args:
        drafts: whether there are drafters.
        has_model: whether one of them may have a model.

    Raises:
        ConfigError, CheckpointError: as a start would.
    """
    backend = choose_backend(settings.device)
    settings = with_sizes(settings, backend)
    lines = [str(memory_plan(settings, backend)), f"  device     {device_name(backend)}"]
    if drafts:
        lines.append(f"  trees      {TreeBounds.of(settings).describe(has_model)}")
    return "\n".join(lines)


@dataclass(slots=True)
class Verifier:
    """An engine and its parts. ``close`` ends its thread and its drafters' attachments."""

    engine: Engine
    info: VerifierConstants
    grammars: GrammarCompiler
    clients: DrafterClients
    kv_events: KvEventPublisher | None = None

    def publish(self, kv_events: KvEventPublisher) -> None:
        """Publish the changes of the prefix cache. Call it before the engine starts."""
        self.kv_events = kv_events
        self.engine.scheduler.blocks.events = CacheEvents(kv_events.publish)

    def close(self) -> None:
        self.grammars.close()
        self.engine.stop()
        if self.kv_events is not None:
            self.kv_events.close()
        for drafter in self.engine.speculator.drafters:
            drafter.source.close()


def build(
    settings: VerifierSettings,
    in_process_drafters: Mapping[str, Drafter] | None = None,
    progress: Progress | None = None,
) -> Verifier:
    """Load and warm up the model, connect the drafters, and build an engine without starting it.

    Args:
        in_process_drafters: drafters to run in this process, by name.
        progress: called with (done, total, what) during slow work. None: print lines to stderr.

    Raises:
        ConfigError: a setting cannot be met on this machine or with this model.
        CheckpointError: the checkpoint cannot be loaded.
    """
    placed = in_process_drafters or {}
    check_together([*(endpoint.name for endpoint in settings.drafters), *placed])
    progress = progress or ProgressLines()
    backend = choose_backend(settings.device)
    logger.info("the model's device: %s", device_name(backend))
    log_notes(logger, check_target(settings.model))
    settings = with_sizes(settings, backend)
    budget = memory_plan(settings, backend)
    usual = usual_trees(TreeBounds.of(settings))
    # Bound before the model is loaded, so that an endpoint in use fails at once.
    kv_events = _kv_event_publisher(settings)
    clients = DrafterClients(settings, backend, budget.num_blocks, usual)
    try:
        target_model = load_target(settings, budget, backend, progress, clients.start)
        verifier = _assemble(settings, backend, budget, target_model, clients, placed)
        if kv_events is not None:
            verifier.publish(kv_events)
        return verifier
    except BaseException:
        clients.close()
        if kv_events is not None:
            kv_events.close()
        raise


def _kv_event_publisher(settings: VerifierSettings) -> KvEventPublisher | None:
    if settings.kv_events is None:
        return None
    settings.check_kv_events()
    # Imported here, since an extra brings its packages.
    from verifier_svc.kv_events import KvEventPublisher

    topic = settings.kv_events_topic or f"kv@{socket.gethostname()}@{settings.served_model_name}"
    return KvEventPublisher(settings.kv_events, settings.kv_events_replay, topic, settings.block_size)


def _assemble(
    settings: VerifierSettings,
    backend: Backend,
    budget: MemoryPlan,
    target: Target,
    clients: DrafterClients,
    in_process_drafters: Mapping[str, Drafter],
) -> Verifier:
    """Build an engine around a warmed-up target and the clients of its drafters."""
    runner, walker = target.runner, target.walker
    verify.warm_up()
    max_nodes = settings.speculative_num_draft_tokens
    limits = ModelLimits(runner.config.vocab_size, runner.max_model_len)
    most_rows = max(max_nodes * 2, settings.max_running_requests)
    if target.overlap_runs is not None:
        # There the whole batch drafts in one shape, whose rows may be many times the sequences.
        most_rows = max(most_rows, min(settings.max_running_requests * max_nodes, settings.chunked_prefill_size))
    costs = measure_step_costs(
        runner,
        num_tokens=min(runner.max_model_len, budget.num_tokens),
        block_size=settings.block_size,
        most_rows=most_rows,
    )
    logger.info("a step costs %s", ", ".join(f"{n} rows {s * 1e3:.2f} ms" for n, s in costs.items()))
    pass_s, chunk = StepCosts(costs).estimate, settings.chunked_prefill_size
    limit_s = settings.max_step_ms / 1e3 if settings.max_step_ms else math.inf
    prefill = PrefillBudget(
        chunk,
        limit_s=limit_s,
        token_s=pass_s(chunk) / chunk,
        smallest_s=pass_s(1),
    )
    sources: list[DraftSource] = [*clients.remote, *clients.attach_inside(in_process_drafters)]
    blocks = BlockManager(budget.num_blocks, settings.block_size, enable_prefix_cache=not settings.disable_radix_cache)
    scheduler = Scheduler(
        blocks,
        max_running=settings.max_running_requests,
        max_waiting=settings.max_queued_requests,
        prefill=prefill,
    )
    speculator = Speculator(
        sources,
        StepCosts(costs),
        AttachmentSettings(
            clients.epoch, runner.config.vocab_size, settings.block_size, timeout_s=settings.draft_timeout_ms / 1e3
        ),
        TreeBounds.of(settings),
        max_batch_size=settings.speculative_max_batch_size,
        limit_s=limit_s,
        controller_log=settings.speculative_controller_log,
    )
    eos_ids = frozenset(runner.config.eos_token_ids)
    token_limit = num_token_ids(settings.model, runner.config.vocab_size)
    mode = str(runner.mode)
    if settings.simulate_accept_length is not None:
        length = settings.simulate_accept_length
        logger.warning("--simulate-accept-length %g: for benchmarks only; what is written means NOTHING", length)
        walker = SimulatedWalker(walker, AcceptanceSimulator(length))
        mode = f"{mode}, simulated acceptance of {length:g}"
    engine = Engine(
        runner,
        scheduler,
        speculator,
        SequenceBounds(runner.max_model_len, eos_ids, token_limit),
        walker=walker,
        overlap_runs=target.overlap_runs,
        model_name=settings.served_model_name,
    )
    grammars = GrammarCompiler(
        partial(Vocabulary, settings.model, vocab_limit=token_limit, eos_ids=eos_ids),
        # Only overlapped steps need the masks of a tree before it is walked.
        looks_ahead=target.overlap_runs is not None,
    )
    info = VerifierConstants(
        epoch=clients.epoch,
        model_name=settings.served_model_name,
        model_fingerprint=runner.fingerprint,
        device=device_name(backend),
        dtype=str(runner.dtype).removeprefix("torch."),
        mode=mode,
        limits=limits,
        eos_token_ids=tuple(runner.config.eos_token_ids),
        max_queue=settings.max_queued_requests,
        speculative_max_batch_size=settings.speculative_max_batch_size,
    )
    return Verifier(engine, info, grammars, clients)
