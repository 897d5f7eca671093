"""Convert the verifier's protobuf messages to the gateway's values and back."""

from __future__ import annotations

from foretoken import wire
from foretoken.results import VerifiedTree
from gateway.messages import DrafterInfo, Finished, SequenceSpec, VerifierInfo, VerifierLoad
from protos import verifier_pb2

# Numbers and texts that the messages have under the same name.
_FINISHED_FIELDS = wire.field_names(Finished, without=("reason", "speculation", "stop_token_id"))
_INFO_FIELDS = wire.field_names(
    VerifierInfo, without=("step_time_us", "overlap_blocked_steps", "fallback_reasons", "drafters")
)
_DRAFTER_FIELDS = wire.field_names(DrafterInfo, without=("accepted_per_position", "gauges"))


def spec_to_proto(spec: SequenceSpec) -> verifier_pb2.Sequence:
    return verifier_pb2.Sequence(
        request_id=spec.request_id,
        choice_index=spec.choice_index,
        attempt=spec.attempt,
        prompt_token_ids=spec.prompt_ids,
        output_token_ids=spec.output_ids,
        sampling=wire.sampling_to_proto(spec.sampling),
        speculation=wire.speculation_to_proto(spec.speculation),
        cache_salt=spec.cache_salt,
        model_fingerprint=spec.model_fingerprint,
        timeout_ms=spec.timeout_ms,
        traceparent=spec.trace.traceparent if spec.trace else None,
        tracestate=spec.trace.tracestate if spec.trace else None,
        prediction_token_ids=spec.prediction_ids,
        priority=spec.priority,
        return_trees=spec.returns_trees,
    )


def finished_from_proto(finished: verifier_pb2.Finished) -> Finished:
    return Finished(
        **wire.values_of(finished, _FINISHED_FIELDS),
        reason=wire.reason_from_proto(finished.reason),
        speculation=wire.stats_from_proto(finished.speculation),
        stop_token_id=finished.stop_token_id if finished.HasField("stop_token_id") else None,
    )


def tree_from_proto(tree: verifier_pb2.VerifiedTree) -> VerifiedTree:
    return VerifiedTree(tuple(tree.token_ids), tuple(tree.parents), tuple(tree.sources), tuple(tree.accepted))


def load_from_proto(load: verifier_pb2.Load) -> VerifierLoad:
    return VerifierLoad(load.num_running, load.num_waiting, load.max_running, load.num_blocks, load.num_free_blocks)


def info_from_proto(info: verifier_pb2.GetInfoResponse) -> VerifierInfo:
    return VerifierInfo(
        **wire.values_of(info, _INFO_FIELDS),
        step_time_us=dict(info.step_time_us),
        overlap_blocked_steps=dict(info.overlap_blocked_steps),
        fallback_reasons=dict(info.fallback_reasons),
        drafters=tuple(drafter_from_proto(drafter) for drafter in info.drafters),
    )


def drafter_from_proto(drafter: verifier_pb2.DrafterState) -> DrafterInfo:
    return DrafterInfo(
        **wire.values_of(drafter, _DRAFTER_FIELDS),
        accepted_per_position=tuple(drafter.accepted_per_position),
        gauges=dict(drafter.gauges),
    )
