"""Protobuf to values and back, for the messages of common.proto. Nothing past the rims sees a protobuf type."""

from __future__ import annotations

from foretoken.sampling import Grammar, SamplingParams, SpeculationOptions
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


def sampling_from_proto(message: common_pb2.SamplingParams) -> SamplingParams:
    """Absent fields take the defaults of SamplingParams."""
    values = {name: getattr(message, name) for name in _OPTIONAL_SAMPLING if message.HasField(name)}
    return SamplingParams(
        **values,
        logit_bias=dict(message.logit_bias),
        stop_token_ids=tuple(message.stop_token_ids),
        grammar=_grammar_from_proto(message),
    )


def sampling_to_proto(params: SamplingParams) -> common_pb2.SamplingParams:
    """Every field is set, also those at their default."""
    message = common_pb2.SamplingParams(logit_bias=params.logit_bias, stop_token_ids=params.stop_token_ids)
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
        case "json_object" if message.json_object:
            return Grammar("json_object")
    return None


def speculation_from_proto(message: common_pb2.SpeculationOptions) -> SpeculationOptions:
    """Absent fields take the defaults of SpeculationOptions."""
    return SpeculationOptions(
        enabled=message.enabled if message.HasField("enabled") else True,
        drafter=message.drafter if message.HasField("drafter") else "auto",
        max_draft_tokens=message.max_draft_tokens if message.HasField("max_draft_tokens") else None,
    )


def speculation_to_proto(options: SpeculationOptions) -> common_pb2.SpeculationOptions:
    return common_pb2.SpeculationOptions(
        enabled=options.enabled, drafter=options.drafter, max_draft_tokens=options.max_draft_tokens
    )
