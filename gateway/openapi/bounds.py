"""Add the bounds of foretoken/limits.py to the schemas of requests, by the names of fields."""

from __future__ import annotations

from typing import Any

from foretoken import limits
from foretoken.limits import Range

Schema = dict[str, Any]


def in_range(allowed: Range) -> Schema:
    """Return the schema of a number in a range."""
    low = "exclusiveMinimum" if allowed.low_open else "minimum"
    return {
        "type": "integer" if allowed.is_integer else "number",
        low: allowed.low,
        "maximum": allowed.high,
    }


def _text(most: int, least: int = 0) -> Schema:
    return {"type": "string", "maxLength": most} | ({"minLength": least} if least else {})


def _list(items: Schema, most: int, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "maxItems": most} | ({"minItems": least} if least else {})


def _one_or_many(item: Schema, most: int, least: int = 0) -> Schema:
    return {"anyOf": [item, _list(item, most, least)]}


_RANGES = limits.SAMPLING_RANGES
_TOKEN = {"type": "integer", "minimum": 0}
_TEXT = _text(limits.MAX_PROMPT_CHARS, 1)
_IDS = {"type": "array", "items": _TOKEN, "minItems": 1}
_PROMPTS = limits.MAX_PROMPTS_PER_REQUEST
_NAME = _text(64, 1)
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
# The fields' own names, and of fields that have another name than in foretoken/limits.py.
_FIELDS: dict[str, Schema] = {
    **{name: in_range(allowed) for name, allowed in _RANGES.items()},
    "max_completion_tokens": in_range(_RANGES["max_tokens"]),
    "max_new_tokens": in_range(_RANGES["max_tokens"]),
    "min_new_tokens": in_range(_RANGES["min_tokens"]),
    "top_logprobs": in_range(_RANGES["logprobs"]),
    "top_logprobs_num": in_range(_RANGES["logprobs"]),
    "logprob_start_len": {"type": "integer", "minimum": -1},
    "sampling_seed": in_range(_RANGES["seed"]),
    "best_of": {"type": "integer", "minimum": 1, "maximum": 1},
    "n": in_range(Range(1, limits.MAX_N)),
    "max_draft_tokens": in_range(limits.MAX_DRAFT_TOKENS),
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": in_range(limits.LOGIT_BIAS_RANGE) | {"type": "number"},
        "maxProperties": limits.MAX_LOGIT_BIAS_ENTRIES,
    },
    "stop": _one_or_many(_text(limits.MAX_STOP_STRING_CHARS, 1), limits.MAX_STOP_STRINGS),
    "stop_token_ids": _list(_TOKEN, limits.MAX_STOP_TOKEN_IDS),
    "cache_salt": _text(limits.MAX_CACHE_SALT_CHARS),
    "messages": {"minItems": 1, "maxItems": limits.MAX_CHAT_MESSAGES},
    "tokens": _list(_TOKEN, limits.MAX_TOKENIZED_IDS),
    "token_ids": _IDS | {"maxItems": limits.MAX_CORPUS_TOKENS},
    "input_ids": {"anyOf": [_IDS, _list(_IDS, _PROMPTS, 1)]},
    "text": _one_or_many(_TEXT, _PROMPTS, 1),
}
# Where a name means something else.
_FIELDS_OF: dict[str, dict[str, Schema]] = {
    "CompletionFields": {
        "prompt": {"anyOf": [_TEXT, _list(_TEXT, _PROMPTS, 1), _IDS, _list(_IDS, _PROMPTS, 1)]},
        # 0 with echo.
        "max_tokens": in_range(Range(0, _RANGES["max_tokens"].high)),
    },
    "ChatFields": {"logprobs": {}},
    "TokenizeFields": {"prompt": _text(limits.MAX_PROMPT_CHARS)},
    "CorpusFields": {"name": _NAME | {"pattern": "^[a-z0-9][a-z0-9_.-]{0,63}$"}, "text": _TEXT},
    "DrafterFields": {
        "name": _NAME | {"pattern": "^[a-z0-9][a-z0-9_.-]{0,63}$"},
        "address": _text(limits.MAX_ADDRESS_CHARS),
    },
    "ResponsesFields": {"text": {}, "max_output_tokens": in_range(_RANGES["max_tokens"])},
    "GenerateFields": {"rid": {"anyOf": [{"type": "string"}, _list({"type": "string"}, _PROMPTS)]}},
    "AbortFields": {"rid": _text(limits.MAX_OUTPUT_ID_CHARS)},
    # Definitions to which bodies refer.
    "ChatMessage": {"content": {"anyOf": [_text(limits.MAX_PROMPT_CHARS), _list(_PART, limits.MAX_CONTENT_PARTS)]}},
    "SpeculativeFields": {"max_draft_tokens": in_range(limits.MAX_DRAFT_TOKENS)},
    "ShapeFields": {name: in_range(allowed) for name, allowed in limits.SHAPE_RANGES.items()},
}


def add_bounds(schema: Schema, kind: str) -> None:
    """Add bounds to the properties of a request's schema, in place; optional ones may be null.

    ``kind``: the class of the fields.
    """
    is_definition = kind in ("ChatMessage", "SpeculativeFields", "ShapeFields")
    known = _FIELDS_OF.get(kind, {}) if is_definition else _FIELDS | _FIELDS_OF.get(kind, {})
    required = schema.get("required", ())
    for name, value in schema.get("properties", {}).items():
        bounded = _with_bounds(value, known.get(name, {}))
        schema["properties"][name] = bounded if name in required else _nullable(bounded)


def _with_bounds(value: Schema, bounds: Schema) -> Schema:
    """Return a property's schema with bounds, which stand for its type."""
    if not bounds:
        return value
    kept = {key: item for key, item in value.items() if key not in ("anyOf", "type")}
    return kept | bounds if "type" in bounds or "anyOf" in bounds else value | bounds


def _nullable(value: Schema) -> Schema:
    """Return a property's schema that allows null, which counts as absent."""
    about = {key: value[key] for key in ("title", "description", "default") if key in value}
    rest = {key: item for key, item in value.items() if key not in about}
    options = rest.get("anyOf", [rest])
    if not rest or {"type": "null"} in options:
        return value
    return about | {"anyOf": [*options, {"type": "null"}]}
