"""Turn JSON bodies into checked fields. Every InvalidRequestError names the field at fault."""

from __future__ import annotations

import asyncio
import difflib
import logging
import secrets
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from foretoken import limits
from foretoken.errors import InvalidRequestError
from foretoken.sampling import DraftShape, SpeculationOptions
from gateway.ignored_fields import ignored_fields
from gateway.json_depth import is_too_deep

logger = logging.getLogger(__name__)

# Larger bodies are parsed in a thread, by a few calls. Each holds the GIL for some milliseconds;
# the event loop goes on between them.
INLINE_BODY_BYTES = 256 * 1024
# Values with which an unsupported field asks for nothing.
NOTHING: tuple[Any, ...] = (False, 0, "", [], {})
# JavaScript's numbers hold integers of 53 bits.
SEED_BITS = 53
# An unknown field's error names so many known ones at most.
MOST_NAMED = 12


class Fields(BaseModel):
    """Base of request bodies: types are not converted, and ``validate`` warns of unknown fields."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class ClosedFields(Fields):
    """Base of objects that refuse unknown fields, as a misspelt one would change the answer."""

    model_config = ConfigDict(extra="forbid")


FieldsT = TypeVar("FieldsT", bound=Fields)


class ShapeFields(ClosedFields):
    """The exact shape of draft trees, within the bounds of the server's flags of these names."""

    num_steps: int = Field(description="Levels of a draft model's trees.")
    topk: int = Field(description="Most children of one node in a draft model's trees.")
    num_draft_tokens: int = Field(description="Nodes of a tree with its root; for a drafter without a model, at most.")


class SpeculativeFields(ClosedFields):
    """Our extension: how this request uses speculation. It never changes the text."""

    enabled: bool = True
    drafter: str = Field(
        default="auto",
        description="A drafter's name, several joined by +, merge (all that are attached) or auto. In an answer's "
        "metrics, drafter is the one that drafted most, whatever was chosen here, and drafters are all that drafted.",
    )
    max_draft_tokens: int | None = None
    shape: ShapeFields | None = Field(
        default=None, description="The exact shape of draft trees; without it the server chooses."
    )

    def to_options(self) -> SpeculationOptions:
        shape = DraftShape(**self.shape.model_dump()) if self.shape is not None else None
        return SpeculationOptions(self.enabled, self.drafter, self.max_draft_tokens, shape)


async def parse_body(body: bytes, *, max_values: int = limits.MAX_JSON_VALUES) -> dict[str, Any]:
    """Return the JSON object in a request's body.

    Raises InvalidRequestError for other bodies, and for one that holds too many values.
    """
    if len(body) <= INLINE_BODY_BYTES:
        return parse_object(body, max_values)
    return await asyncio.to_thread(parse_object, body, max_values)


def parse_object(body: bytes, max_values: int = limits.MAX_JSON_VALUES) -> dict[str, Any]:
    """Return the JSON object in a request's body, as ``parse_body`` does.

    Raises InvalidRequestError as it does.
    """
    _check_json_cost(body, max_values)
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object")
    if body.count(b"[") + body.count(b"{") > limits.MAX_JSON_DEPTH and is_too_deep(value):
        raise InvalidRequestError(f"the body has more than {limits.MAX_JSON_DEPTH} levels of lists and objects")
    return value


def validate(
    kind: type[FieldsT],
    body: dict[str, Any],
    *,
    ignored: Collection[str] = (),
    unsupported: Collection[str] | Mapping[str, str] = (),
    prefix: str = "",
) -> FieldsT:
    """Return the fields of a body. A null counts as absent; ``ignored`` fields have no effect.

    An ``unsupported`` field is refused unless its value asks for nothing. Unknown fields are
    ignored with a warning, or refused if the server or ``kind`` says so. ``prefix`` comes before
    their names.

    Raises InvalidRequestError that names the field at fault.
    """
    values: dict[str, Any] = {}
    unknown: list[str] = []
    is_closed = kind.model_config.get("extra") == "forbid" or ignored_fields().is_strict
    for name, value in body.items():
        known = name in kind.model_fields
        if value is None and (known or name in ignored or name in unsupported):
            continue
        if name in unsupported:
            if value in NOTHING:
                continue
            reason = unsupported[name] if isinstance(unsupported, Mapping) else ""
            raise InvalidRequestError(f"{name} is not supported{reason and ': '}{reason}", field=name)
        if known:
            values[name] = value
        elif name in ignored:
            logger.debug("ignored field", extra={"field": name})
        elif is_closed:
            raise _unknown_field(prefix + name, kind)
        elif value is not None:
            unknown.append(prefix + name)
    try:
        fields = kind.model_validate(values)
    except ValidationError as error:
        raise _complaint(error, kind) from None
    nested = list(_unknown_in(fields, prefix))
    if nested and ignored_fields().is_strict:
        raise _unknown_field(nested[0], kind)
    if unknown or nested:
        ignored_fields().add([*unknown, *nested])
    return fields


def _unknown_in(fields: Fields, prefix: str) -> Iterator[str]:
    """Yield the unknown fields of a body's objects, as ``messages.name``."""
    for name, value in fields:
        if isinstance(value, list) and value and type(value[0]) is int:
            # A prompt may have many token ids.
            continue
        for item in value if isinstance(value, list) else (value,):
            if isinstance(item, Fields):
                for extra in item.model_extra or ():
                    yield f"{prefix}{name}.{extra}"
                yield from _unknown_in(item, f"{prefix}{name}.")


def _check_json_cost(body: bytes, max_values: int) -> None:
    """Raise InvalidRequestError for a body whose parsing would take too long.

    Counts without parsing, because a parser holds the GIL from start to end. The error names the
    field that holds most of the body.
    """
    most = {
        b",": (max_values, "values"),
        b'"': (2 * limits.MAX_JSON_STRINGS, "strings"),
        b":": (limits.MAX_JSON_FIELDS, "fields"),
        b"[": (limits.MAX_JSON_CONTAINERS, "lists"),
        b"{": (limits.MAX_JSON_CONTAINERS, "objects"),
    }
    if all(body.count(mark) <= count for mark, (count, _) in most.items()):
        return
    # Marks inside strings do not count. Without escapes, every second piece between quotes is a
    # string.
    body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    pieces = [] if body.count(b'"') > most[b'"'][0] else body.split(b'"')
    outside = b"".join(pieces[::2])
    for mark, (count, name) in most.items():
        if (body if mark == b'"' else outside).count(mark) > count:
            field = _largest_field(pieces)
            most_of_them = count // 2 if mark == b'"' else count
            raise InvalidRequestError(
                f"{field or 'the body'} is too much to read: a body may hold {most_of_them} {name}", field=field
            )


def _largest_field(pieces: list[bytes]) -> str:
    """Return the key whose value holds most of the text between strings; empty if none does."""
    place = max(range(0, len(pieces), 2), key=lambda i: len(pieces[i]), default=0)
    if not place or not pieces[place].startswith(b":") or 2 * len(pieces[place]) < sum(map(len, pieces[::2])):
        return ""
    return pieces[place - 1].decode(errors="replace")[:128]


def one_or_many_strings(field: str, value: object, most: int) -> tuple[str, ...]:
    """Return a string, or a list of at most ``most`` strings, as a tuple; () for None.

    Raises InvalidRequestError for another value, or too many strings.
    """
    if value is None:
        return ()
    items = [value] if isinstance(value, str) else value
    if isinstance(items, list):
        limits.check_count(field, len(items), most)
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise InvalidRequestError(f"{field} must be a string or a list of strings", field=field)
    return tuple(items)


def is_id_list(value: object) -> bool:
    """Return whether ``value`` is a non-empty list of integers."""
    return isinstance(value, list) and set(map(type, value)) == {int}


def token_biases(field: str, value: dict[str, float] | None) -> dict[int, float]:
    """Return ``{"token id": bias}`` with the ids as numbers.

    Raises InvalidRequestError for a key that is no token id, or too many.
    """
    limits.check_count(field, len(value or {}), limits.MAX_LOGIT_BIAS_ENTRIES)
    biases = {}
    for key, bias in (value or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidRequestError(f"{field}: {key[:32]!r} is not a token id", field=field)
        biases[int(key)] = bias
    return biases


def check_in_range(name: str, value: float | None, limit: str | None = None) -> None:
    """Check a request field against the range of the sampling parameter ``limit``."""
    if value is not None:
        limits.check_number(name, value, limits.SAMPLING_RANGES[limit or name])


def draw_seed(given: int | None) -> int:
    """Return the client's seed, or draw one, so that every request can be repeated and resumed."""
    return secrets.randbits(SEED_BITS) if given is None else given


def allowed_ids(value: list[int] | None) -> tuple[int, ...]:
    """Return ``allowed_token_ids`` as a tuple; () if the request allows all tokens."""
    if value is None:
        return ()
    limits.check_count("allowed_token_ids", len(value), limits.MAX_ALLOWED_TOKEN_IDS, least=1)
    return tuple(value)


def text_list(field: str, value: Sequence[str], most: int, max_chars: int) -> tuple[str, ...]:
    """Return at most ``most`` texts of 1 to ``max_chars`` characters as a tuple."""
    limits.check_count(field, len(value), most)
    for text in value:
        limits.check_text(field, text, max_chars, min_chars=1)
    return tuple(value)


def _unknown_field(name: str, kind: type[BaseModel]) -> InvalidRequestError:
    """Return the error for a field of a body of ``kind``.

    It names the known fields if they are few.
    """
    name = name[:128]
    *path, last = name.split(".")
    for part in path:
        if part in (fields := _by_name(kind)):
            kind = next(_models_in(fields[part]), kind)
    known = sorted(_by_name(kind))
    if len(known) > MOST_NAMED:
        known = difflib.get_close_matches(last, known, 1)
    hint = f"; known: {', '.join(known)}" if len(known) > 1 else f"; did you mean {known[0]!r}?" if known else ""
    return InvalidRequestError(f"unknown field {name!r}{hint}", field=name)


def _by_name(kind: type[BaseModel]) -> dict[str, Any]:
    """Return the types of a body's fields by the names that clients write."""
    return {field.alias or name: field.annotation for name, field in kind.model_fields.items()}


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models in the type of a field, as in ``list[Model] | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _models_in(part)


def _complaint(error: ValidationError, kind: type[BaseModel]) -> InvalidRequestError:
    errors = error.errors(include_url=False, include_input=False, include_context=False)
    # A misspelt field may be the one that is missing.
    first = next((each for each in errors if each["type"] == "extra_forbidden"), errors[0])
    field = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return _unknown_field(field, kind)
    if first["type"] == "model_type":
        return InvalidRequestError(f"{field} must be an object", field=field)
    words = first["msg"].removeprefix("Input should be ")
    return InvalidRequestError(
        f"{field} must be {words}" if words != first["msg"] else f"{field}: {words}", field=field
    )
