"""Convert the messages of common.proto to values and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any

from foretoken import limits
from foretoken.results import DrafterStats, FinishReason, SpeculationStats, TokenLogprobs
from foretoken.sampling import DraftShape, Grammar, SamplingParams, SpeculationOptions
from protos import common_pb2

_OPTIONAL_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
)


def field_names(kind: Any, *, without: Collection[str] = ()) -> tuple[str, ...]:
    """Return the names of a dataclass' fields, except ``without``."""
    return tuple(field.name for field in dataclasses.fields(kind) if field.name not in without)


def values_of(source: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return these attributes of a value or message, by name."""
    return {name: getattr(source, name) for name in names}


_SHAPE = field_names(DraftShape)
# Numbers and texts that the message has under the same name.
_STATS_FIELDS = field_names(SpeculationStats, without=("acceptance_histogram", "drafters", "fallback_reasons"))


def sampling_from_proto(message: common_pb2.SamplingParams) -> SamplingParams:
    """Return sampling parameters; absent fields get their defaults.

    Raises InvalidRequestError for a list that is too long.
    """
    # Check before copying: a message may hold millions of entries.
    limits.check_count("logit_bias", len(message.logit_bias), limits.MAX_LOGIT_BIAS_ENTRIES)
    limits.check_count("stop_token_ids", len(message.stop_token_ids), limits.MAX_STOP_TOKEN_IDS)
    limits.check_count("allowed_token_ids", len(message.allowed_token_ids), limits.MAX_ALLOWED_TOKEN_IDS)
    limits.check_count("bad_words", len(message.bad_token_ids), 2 * limits.MAX_BAD_WORDS)
    limits.check_tokens("bad_words", sum(len(each.ids) for each in message.bad_token_ids), limits.MAX_BAD_TOKENS)
    values = {name: getattr(message, name) for name in _OPTIONAL_SAMPLING if message.HasField(name)}
    return SamplingParams(
        **values,
        logit_bias=dict(message.logit_bias),
        stop_token_ids=tuple(message.stop_token_ids),
        grammar=_grammar_from_proto(message),
        allowed_token_ids=tuple(message.allowed_token_ids),
        bad_token_ids=tuple(tuple(each.ids) for each in message.bad_token_ids),
    )


def sampling_to_proto(params: SamplingParams) -> common_pb2.SamplingParams:
    """Return a message with every field set, including defaults."""
    message = common_pb2.SamplingParams(
        logit_bias=params.logit_bias,
        stop_token_ids=params.stop_token_ids,
        allowed_token_ids=params.allowed_token_ids,
        bad_token_ids=[common_pb2.TokenSequence(ids=ids) for ids in params.bad_token_ids],
    )
    for name in _OPTIONAL_SAMPLING:
        value = getattr(params, name)
        if value is not None:
            setattr(message, name, value)
    if (grammar := params.grammar) is not None:
        setattr(message, grammar.kind, True if grammar.kind == "json_object" else grammar.text)
    return message


def _grammar_from_proto(message: common_pb2.SamplingParams) -> Grammar | None:
    match message.WhichOneof("grammar"):
        case "json_schema":
            return Grammar("json_schema", message.json_schema)
        case "regex":
            return Grammar("regex", message.regex)
        case "lark":
            return Grammar("lark", message.lark)
        case "json_object" if message.json_object:
            return Grammar("json_object")
    return None


def speculation_from_proto(message: common_pb2.SpeculationOptions) -> SpeculationOptions:
    """Return speculation options; absent fields get their defaults."""
    return SpeculationOptions(
        enabled=message.enabled if message.HasField("enabled") else True,
        drafter=message.drafter if message.HasField("drafter") else "auto",
        max_draft_tokens=message.max_draft_tokens if message.HasField("max_draft_tokens") else None,
        shape=DraftShape(**values_of(message.shape, _SHAPE)) if message.HasField("shape") else None,
    )


def speculation_to_proto(options: SpeculationOptions) -> common_pb2.SpeculationOptions:
    shape = options.shape
    return common_pb2.SpeculationOptions(
        enabled=options.enabled,
        drafter=options.drafter,
        max_draft_tokens=options.max_draft_tokens,
        shape=common_pb2.DraftShape(**values_of(shape, _SHAPE)) if shape is not None else None,
    )


_REASON_NUMBERS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: common_pb2.FINISH_REASON_ABORT,
}
_REASONS = {number: reason for reason, number in _REASON_NUMBERS.items()}


def reason_from_proto(reason: common_pb2.FinishReason) -> FinishReason:
    """Return the finish reason; ABORT for a reason that this version does not know."""
    return _REASONS.get(reason, FinishReason.ABORT)


def reason_to_proto(reason: FinishReason) -> common_pb2.FinishReason:
    return _REASON_NUMBERS[reason]


def logprobs_from_proto(entries: Iterable[common_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(
            entry.token_id, entry.logprob, entry.rank, tuple(zip(entry.top_ids, entry.top_logprobs, strict=True))
        )
        for entry in entries
    )


def logprobs_to_proto(entries: Iterable[TokenLogprobs]) -> list[common_pb2.TokenLogprobs]:
    return [
        common_pb2.TokenLogprobs(
            token_id=entry.token_id,
            logprob=entry.logprob,
            rank=entry.rank,
            top_ids=[token_id for token_id, _ in entry.top],
            top_logprobs=[logprob for _, logprob in entry.top],
        )
        for entry in entries
    ]


def stats_from_proto(stats: common_pb2.SpeculationStats) -> SpeculationStats:
    return SpeculationStats(
        **values_of(stats, _STATS_FIELDS),
        acceptance_histogram=tuple(stats.acceptance_histogram),
        fallback_reasons=dict(stats.fallback_reasons),
        drafters=tuple(
            DrafterStats(d.name, d.num_draft_tokens, d.num_accepted_tokens, tuple(d.accepted_per_position))
            for d in stats.drafters
        ),
    )


def stats_to_proto(stats: SpeculationStats) -> common_pb2.SpeculationStats:
    return common_pb2.SpeculationStats(
        **values_of(stats, _STATS_FIELDS),
        acceptance_histogram=stats.acceptance_histogram,
        fallback_reasons=stats.fallback_reasons,
        drafters=[common_pb2.DrafterStats(**drafter._asdict()) for drafter in stats.drafters],
    )
