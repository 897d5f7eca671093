"""Convert engine events to protobuf messages."""

from __future__ import annotations

from collections.abc import Iterable

from foretoken import wire
from protos import verifier_pb2
from verifier_svc.messages import ErrorEvent, Event, FinishedEvent, TokensEvent

# Fields that the messages have under the same name.
_FINISHED_FIELDS = wire.field_names(FinishedEvent, without=("key", "reason", "speculation"))
_ERROR_FIELDS = wire.field_names(ErrorEvent, without=("key",))


def to_session_response(batch: Iterable[Event]) -> verifier_pb2.SessionResponse:
    """Return one message that carries all ``batch`` events of a session."""
    response = verifier_pb2.SessionResponse()
    for event in batch:
        match event:
            case TokensEvent():
                response.tokens.append(tokens_to_proto(event))
            case FinishedEvent():
                response.finished.append(finished_to_proto(event))
            case ErrorEvent():
                response.errors.append(_error_to_proto(event))
    return response


def tokens_to_proto(event: TokensEvent) -> verifier_pb2.Tokens:
    message = verifier_pb2.Tokens(
        request_id=event.key.request_id,
        choice_index=event.key.choice_index,
        attempt=event.attempt,
        offset=event.offset,
        token_ids=event.token_ids,
        sources=event.sources,
        num_cached_tokens=event.num_cached_tokens,
    )
    if event.logprobs:
        message.logprobs.extend(wire.logprobs_to_proto(event.logprobs))
    if event.prompt_logprobs:
        message.prompt_logprobs.extend(wire.logprobs_to_proto(event.prompt_logprobs))
    return message


def finished_to_proto(event: FinishedEvent) -> verifier_pb2.Finished:
    return verifier_pb2.Finished(
        **wire.values_of(event, _FINISHED_FIELDS),
        request_id=event.key.request_id,
        choice_index=event.key.choice_index,
        reason=wire.reason_to_proto(event.reason),
        speculation=wire.stats_to_proto(event.speculation),
    )


def _error_to_proto(event: ErrorEvent) -> verifier_pb2.SequenceError:
    return verifier_pb2.SequenceError(
        **wire.values_of(event, _ERROR_FIELDS), request_id=event.key.request_id, choice_index=event.key.choice_index
    )
