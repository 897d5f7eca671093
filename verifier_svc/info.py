"""Answer GetInfo: the constants of this start and the current figures."""

from __future__ import annotations

from dataclasses import dataclass

from foretoken import __version__, wire
from foretoken.limits import ModelLimits
from protos import verifier_pb2
from verifier_svc.drafters.handle import DrafterHandle
from verifier_svc.engine import Engine


@dataclass(frozen=True, slots=True)
class VerifierConstants:
    """Constants of one start. ``epoch`` is a random number drawn at each start."""

    epoch: int
    model_name: str
    model_fingerprint: str
    device: str
    dtype: str
    mode: str
    limits: ModelLimits
    eos_token_ids: tuple[int, ...]
    max_queue: int
    speculative_max_batch_size: int

    def response(self, engine: Engine) -> verifier_pb2.GetInfoResponse:
        """Return GetInfo's answer. The engine keeps running, so figures differ slightly in time."""
        counters = engine.counters
        scheduler = engine.scheduler
        blocks = scheduler.blocks
        return verifier_pb2.GetInfoResponse(
            version=__version__,
            **wire.values_of(self, _CONSTANTS),
            vocab_size=self.limits.vocab_size,
            max_model_len=self.limits.max_model_len,
            block_size=blocks.block_size,
            num_blocks=blocks.num_blocks,
            num_free_blocks=blocks.num_free_blocks,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            drafters=[drafter_state(drafter) for drafter in tuple(engine.speculator.drafters)],
            num_steps=counters.num_steps,
            num_resident_steps=counters.num_overlapped_steps,
            num_preemptions=scheduler.num_preemptions,
            num_prefix_cache_queries=scheduler.num_prefix_queries,
            num_prefix_cache_hits=scheduler.num_prefix_hits,
            num_generated_tokens=counters.num_generated_tokens,
            num_prompt_tokens=counters.num_prompt_tokens,
            num_plain_batch_steps=engine.speculator.limit.num_steps_above,
            num_fallback_steps=counters.num_fallback_steps,
            step_time_us={phase: int(seconds * 1e6) for phase, seconds in dict(counters.phase_seconds).items()},
            overlap_blocked_steps=dict(counters.overlap_blocked_steps),
            fallback_reasons={reason.value: count for reason, count in dict(counters.fallback_steps).items()},
        )


def load(engine: Engine) -> verifier_pb2.Load:
    """Return what the engine has to do now, approximately: it keeps running."""
    scheduler = engine.scheduler
    return verifier_pb2.Load(
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        max_running=scheduler.max_running,
        num_blocks=scheduler.blocks.num_blocks,
        num_free_blocks=scheduler.blocks.num_free_blocks,
    )


# Fields that the answer has under the same name.
_CONSTANTS = wire.field_names(VerifierConstants, without=("limits",))


def drafter_state(drafter: DrafterHandle) -> verifier_pb2.DrafterState:
    source, counters = drafter.source, drafter.counters
    return verifier_pb2.DrafterState(
        name=drafter.name,
        algorithm=source.algorithm,
        transport=source.transport_name,
        address=source.address,
        state=drafter.state,
        reason=drafter.reason,
        num_attaches=drafter.num_attaches,
        num_drafts=counters.num_drafts,
        num_draft_tokens=counters.num_draft_tokens,
        num_accepted_tokens=counters.num_accepted_tokens,
        num_rejected_drafts=drafter.num_rejected,
        accepted_per_position=counters.accepted_per_position,
        num_awaited=counters.num_awaited,
        wait_us=int(counters.wait_seconds * 1e6),
        gauges=drafter.gauges,
        has_low_acceptance=drafter.record.watch.is_low,
    )
