"""Run one verifier process: build the engine, serve it, drain it."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import uvloop

from foretoken import rpc
from foretoken.drafter import Drafter
from foretoken.drafter_names import check_together
from foretoken.limits import ModelLimits
from foretoken.links import check_listener, read_credentials
from foretoken.lost_context import exit_if_context_lost
from foretoken.models.backend import Backend, choose_backend, device_name
from foretoken.models.target_check import check_target
from foretoken.models.tokenizer_size import num_token_ids
from foretoken.tracing import make_tracer
from protos import verifier_pb2_grpc
from verifier_svc.assembly import Target, load_target
from verifier_svc.config import VerifierSettings
from verifier_svc.drafters.attachment import AttachmentSettings
from verifier_svc.drafters.awaited import AwaitedDrafters
from verifier_svc.drafters.clients import DrafterClients
from verifier_svc.drafters.corpora import DrafterCorpora
from verifier_svc.drafters.registry import DrafterRegistry
from verifier_svc.drafters.request import TreeBounds
from verifier_svc.drafters.source import DraftSource
from verifier_svc.engine import Engine
from verifier_svc.info import VerifierConstants
from verifier_svc.lifecycle import SequenceBounds
from verifier_svc.model.calibration import measure_step_costs
from verifier_svc.model.memory_plan import MemoryPlan
from verifier_svc.model.sizes import with_sizes
from verifier_svc.model.target import memory_plan
from verifier_svc.sampling import verify
from verifier_svc.sampling.grammar import Vocabulary
from verifier_svc.sampling.grammar_compiler import GrammarCompiler
from verifier_svc.sampling.simulated_acceptance import AcceptanceSimulator, SimulatedWalker
from verifier_svc.scheduling.block_manager import BlockManager
from verifier_svc.scheduling.cache_events import CacheEvents
from verifier_svc.scheduling.prefill_budget import PrefillBudget
from verifier_svc.scheduling.scheduler import Scheduler
from verifier_svc.service import VerifierService
from verifier_svc.speculation.candidate_shapes import usual_trees
from verifier_svc.speculation.costs import StepCosts
from verifier_svc.speculation.speculator import Speculator

if TYPE_CHECKING:
    from verifier_svc.kv_events import KvEventPublisher

logger = logging.getLogger(__name__)

SERVICE_NAME = "foretoken.verifier.v1.VerifierService"
# Seconds between checks of the engine thread and, while draining, of the running sequences.
WATCH_S = 0.5
STOP_GRACE_S = 2.0
PROGRESS_S = 1.0
# Most seconds for which a thread keeps the GIL while another one waits for it. The engine releases
# it in each call that launches GPU work, and waits until it has it back, while the service may
# have messages to write. Python's default of 5 ms is as long as a step.
GIL_INTERVAL_S = 5e-4
# Objects after which Python looks for unreachable cycles among the new ones. A step makes some
# 2000 for 256 sequences and drops nearly all of them at its end. With Python's default of 700, it
# looked through them several times a step.
GC_THRESHOLD = 50_000

Progress = Callable[[int, int, str], None]


class ProgressLines:
    """Print the progress of slow work to stderr.

    Prints at most one line in PROGRESS_S seconds, none for work that ends sooner, and always the
    end of work that it has printed.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._shown_at = clock()
        # The work that the last line named, if it has not ended.
        self._open = ""

    def __call__(self, done: int, total: int, what: str) -> None:
        now, has_ended = self._clock(), done >= total
        if now - self._shown_at >= PROGRESS_S or (has_ended and what == self._open):
            self._shown_at = now
            self._open = "" if has_ended else what
            # Work of one piece has no percentage before its end.
            percent = f" {done * 100 // max(total, 1)}%" if has_ended or total > 1 else ""
            print(f"verifier: {what}{percent}", file=sys.stderr, flush=True)


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
    for note in check_target(settings.model):
        # ``foretoken serve`` has said it.
        logger.info("%s", note)
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


def run(settings: VerifierSettings, in_process_drafters: Mapping[str, Drafter] | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then drain.

    Raises:
        ConfigError: a setting cannot be met on this machine or with this model.
        RuntimeError: the engine died.

    A signal during loading ends the process with status 0.
    """
    sys.setswitchinterval(GIL_INTERVAL_S)
    if not uvloop.run(_serve(settings, in_process_drafters)):
        # Loading runs native code that cannot be interrupted. It holds nothing that outlives this
        # process.
        logging.shutdown()
        os._exit(0)


async def _serve(settings: VerifierSettings, in_process_drafters: Mapping[str, Drafter] | None) -> bool:
    """Serve until a signal. Return False if the signal came before the verifier was built.

    Building then still goes on in its thread.
    """
    credentials = read_credentials(settings)
    check_listener(settings.address, credentials, is_insecure=settings.insecure_links)
    tracer = make_tracer(settings.otlp_traces_endpoint, "verifier")
    server = rpc.link_server(settings.address, credentials)
    health = rpc.HealthService(server, (SERVICE_NAME,))
    await health.mark(False)
    with rpc.stop_signals() as stop:
        # Bind before loading the model, so that an address in use fails at once.
        rpc.bind(server, settings.address, credentials)
        verifier: Verifier | None = None
        keeping: asyncio.Task[None] | None = None
        try:
            verifier = await _build(settings, in_process_drafters, stop)
            if verifier is None:
                return False
            engine = verifier.engine
            sources = [drafter.source for drafter in engine.speculator.drafters]
            corpora = DrafterCorpora(sources, settings.drafters, in_process_drafters or {}, credentials)
            keeping = asyncio.create_task(corpora.keep())
            find = engine.speculator.drafter
            drafters = DrafterRegistry(engine.send, find, verifier.clients.make, corpora)
            awaited = AwaitedDrafters(find(client.name) for client in verifier.clients.remote)
            service = VerifierService(engine, verifier.info, tracer, corpora, verifier.grammars, drafters, awaited)
            verifier_pb2_grpc.add_VerifierServiceServicer_to_server(service, server)
            spare_collections()
            engine.start()
            await server.start()
            await health.mark(True)
            await _watch(engine, stop)
            await health.drain()
            service.drain()
            await _idle(engine, settings.drain_timeout_s)
            service.close()
            await server.stop(STOP_GRACE_S)
        finally:
            rpc.remove_socket(settings.address)
            if keeping is not None:
                keeping.cancel()
            if verifier is not None:
                await asyncio.to_thread(verifier.close)
            if tracer is not None:
                await asyncio.to_thread(tracer.close)
    return True


def spare_collections() -> None:
    """Make garbage collections rare, and let them skip the objects from start-up, which stay."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)


async def _build(
    settings: VerifierSettings, in_process_drafters: Mapping[str, Drafter] | None, stop: asyncio.Event
) -> Verifier | None:
    """Run ``build`` in a daemon thread, which delays no exit; None if ``stop`` comes first."""
    built: Future[Verifier] = Future()

    def run() -> None:
        try:
            built.set_result(build(settings, in_process_drafters))
        except BaseException as error:
            built.set_exception(error)

    threading.Thread(target=run, name="verifier-build", daemon=True).start()
    building = asyncio.wrap_future(built)
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait((building, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    return building.result() if building.done() else None


async def _watch(engine: Engine, stop: asyncio.Event) -> None:
    """Wait for ``stop``. Raises RuntimeError if the engine dies, since its state is lost.

    Ends the process at once if the engine has lost its GPU context.
    """
    while not stop.is_set():
        if not engine.is_alive():
            exit_if_context_lost()
            raise RuntimeError("the engine died") from engine.failure
        try:
            await asyncio.wait_for(stop.wait(), WATCH_S)
        except TimeoutError:
            continue


async def _idle(engine: Engine, timeout_s: float) -> None:
    """Wait up to ``timeout_s`` seconds until the engine is idle. Gateways resume the rest."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not engine.is_idle and loop.time() < deadline:
        await asyncio.sleep(min(WATCH_S, 0.05))
