"""Convert engine events to protobuf messages."""

from __future__ import annotations

from collections.abc import Iterable

from foretoken import wire
from protos import verifier_pb2
from verifier_svc.messages import ErrorEvent, Event, FinishedEvent, TokensEvent

# Fields that the messages have under the same name.
_FINISHED_FIELDS = wire.field_names(FinishedEvent, without=("key", "reason", "speculation", "batch_slot", "generation"))
_ERROR_FIELDS = wire.field_names(ErrorEvent, without=("key",))


def to_session_response(batch: Iterable[Event]) -> verifier_pb2.SessionResponse:
    """Return one message that carries all ``batch`` events of a session."""
    response = verifier_pb2.SessionResponse()
    for event in batch:
        match event:
            case TokensEvent():
                _fill_tokens(response.tokens.add(), event)
            case FinishedEvent():
                response.finished.append(finished_to_proto(event))
            case ErrorEvent():
                response.errors.append(_error_to_proto(event))
    return response


def tokens_to_proto(event: TokensEvent) -> verifier_pb2.Tokens:
    message = verifier_pb2.Tokens()
    _fill_tokens(message, event)
    return message


def _fill_tokens(message: verifier_pb2.Tokens, event: TokensEvent) -> None:
    """Fill a new message, in place and field by field: each step has one for each sequence."""
    key = event.key
    message.request_id = key.request_id
    message.choice_index = key.choice_index
    message.attempt = event.attempt
    message.offset = event.offset
    message.token_ids.extend(event.token_ids)
    message.sources.extend(event.sources)
    if event.num_cached_tokens is not None:
        message.num_cached_tokens = event.num_cached_tokens
    if event.logprobs:
        message.logprobs.extend(wire.logprobs_to_proto(event.logprobs))
    if event.tree is not None:
        message.tree.CopyFrom(verifier_pb2.VerifiedTree(**event.tree._asdict()))
    if event.prompt_logprobs:
        message.prompt_logprobs.extend(wire.logprobs_to_proto(event.prompt_logprobs))


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
