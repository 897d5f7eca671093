"""From flags to a service's settings and back: one mapping of names, one line for a user's mistake.

It knows no service: settings are any frozen pydantic models.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from foretoken.errors import ConfigError

Settings = TypeVar("Settings", bound=BaseModel)

# Fields whose unit is in the name keep it out of the flag where the help text states it.
_FLAG_NAMES = {
    "client_timeout_s": "client-timeout",
    "drain_timeout_s": "drain-timeout",
    "request_timeout_s": "request-timeout",
    "verifier_wait_s": "verifier-wait",
}
# Nested settings and the prefix of their flags.
_PREFIXES = {"ngram": "speculative-ngram-"}
# Repeatable flags, which hold texts or key=value pairs.
_REPEATED = {"drafters": "drafter", "verifiers": "verifier"}
# Not a flag but the argument.
_ARGUMENT = "model"


def flag_of(field: str, section: str = "") -> str:
    """The flag that sets a field; ``section`` is the field that holds the nested settings, if it is in one."""
    if field == _ARGUMENT:
        return "MODEL"
    name = _FLAG_NAMES.get(field) or _REPEATED.get(field) or field.replace("_", "-")
    return f"--{_PREFIXES.get(section, '')}{name}"


def build(kind: type[Settings], values: Mapping[str, Any], flag: str = "") -> Settings:
    """Settings from the values that were given. Raises ConfigError that names the flag at fault.

    ``flag``: the one flag whose pairs the values are; otherwise each field is a flag of its own.
    """
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError("; ".join(_describe(item, kind, flag) for item in error.errors())) from None


@contextlib.contextmanager
def at_fault(option: str) -> Iterator[None]:
    """Errors in the block name ``option``."""
    try:
        yield
    except ConfigError as error:
        raise type(error)(f"{option}: {error.message}") from error


def to_flags(settings: BaseModel, section: str = "") -> list[str]:
    """The command-line words that build ``settings`` again: the argument first, then each flag off its default.

    ``section``: the field that holds ``settings``, if they are nested ones.
    """
    words: list[str] = []
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if name == _ARGUMENT:
            words.insert(0, str(value))
        elif value == field.get_default(call_default_factory=True):
            continue
        elif isinstance(value, BaseModel):
            words += to_flags(value, name)
        elif name in _REPEATED:
            for item in value:
                words += [flag_of(name), item if isinstance(item, str) else pairs_text(item)]
        else:
            words += [flag_of(name, section)] if value is True else [flag_of(name, section), str(value)]
    return words


def pairs_text(item: BaseModel) -> str:
    """``key=value,key=value`` of a flat model."""
    return ",".join(f"{key}={value}" for key, value in item.model_dump().items())


def parse_pairs(text: str, flag: str) -> dict[str, str]:
    """The pairs of ``key=value,key=value``. Raises ConfigError that names ``flag``."""
    pairs: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or not key or key in pairs:
            raise ConfigError(f"{flag}: expected key=value,key=value with each key once, got {text!r}")
        pairs[key] = value
    return pairs


def _describe(item: Any, kind: type[BaseModel], flag: str) -> str:
    """One line for one entry of ``ValidationError.errors()`` of ``kind``."""
    message = _words(item)
    path = [str(part) for part in item["loc"]]
    if not path:
        return f"{flag} {message}" if flag else message
    if item["type"] == "extra_forbidden":
        # Of a repeated flag that is one of several settings the keys are another model's.
        message += f"; there is: {', '.join(kind.model_fields)}" if flag else ""
    elif isinstance(item["input"], (str, int, float)):
        message += f", got {item['input']!r}"
    if flag:
        return f"{flag} {path[0]}: {message}"
    if path[0] in _PREFIXES:
        # A rule about two nested fields names them itself.
        return f"{flag_of(path[1], path[0])}: {message}" if len(path) > 1 else f"--{_PREFIXES[path[0]]}...: {message}"
    if path[0] in _REPEATED and len(path) > 2:
        return f"{flag_of(path[0])} {path[2]}: {message}"
    return f"{flag_of(path[0])}: {message}"


def _words(item: Any) -> str:
    """What was expected, in words of ours where the library's are about models and schemas."""
    context: Mapping[str, Any] = item.get("ctx", {})
    match item["type"]:
        case "missing":
            return "must be given"
        case "extra_forbidden":
            return "there is no such key"
        case "literal_error":
            return f"expected {context['expected'].replace(chr(39), '')}"
        case "int_parsing" | "int_type" | "int_from_float" | "int_parsing_size":
            return "expected a whole number"
        case "float_parsing" | "float_type" | "finite_number":
            return "expected a number"
        case "bool_parsing" | "bool_type":
            return "expected true or false"
        case "string_type":
            return "expected text"
        case "string_too_short":
            return "must not be empty"
        case "greater_than_equal":
            return f"expected at least {context['ge']}"
        case "less_than_equal":
            return f"expected at most {context['le']}"
        case "greater_than":
            return f"expected more than {context['gt']}"
    message = str(item["msg"]).removeprefix("Value error, ")
    return message[:1].lower() + message[1:]
