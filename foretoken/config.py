"""Map settings classes to flags, config files and docs, and report mistakes by flag.

Settings are frozen pydantic classes. A field states its type, bounds, default and help text once;
it is a flag, a key of the config file and a row of docs/settings.md. This module knows no service.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from foretoken.errors import ConfigError
from foretoken.spelling import did_you_mean

Kind = TypeVar("Kind", bound=BaseModel)


class Settings(BaseModel):
    """Base of all settings classes."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True)
class Flag:
    """Describes a field's flag where the field's name and type do not."""

    # By default the field's name with dashes. Without leading dashes: an argument. For nested
    # settings: their prefix.
    name: str = ""
    metavar: str | None = None
    # Shown as the default, for a field whose default does not say what happens.
    unset: str = ""
    env: str | None = None
    # The word that the flag takes for 0, where 0 lets the program choose.
    zero: str = ""
    # Names that the flag accepts in any case, for a field that converts some of them.
    choices: tuple[str, ...] = ()
    hidden: bool = False
    # Whether one value may stand for the list of a repeated flag in a config file.
    one_or_many: bool = False
    # Always the first of a service's flags: it distinguishes processes of one kind.
    leads: bool = False
    # Never printed, and handed to child processes in ``env``: command lines are public.
    secret: bool = False


# The flag of a whole number that the program chooses if it is 0.
AUTO = Flag(unset="auto", zero="auto")


@dataclass(frozen=True)
class Setting:
    """One field of a settings class or of a nested class."""

    path: tuple[str, ...]
    flag: str
    field: FieldInfo
    shown: Flag

    @property
    def is_argument(self) -> bool:
        return not self.flag.startswith("--")

    @property
    def key(self) -> str:
        """The name in a config file."""
        return self.flag.removeprefix("--").lower()

    @property
    def is_required(self) -> bool:
        return self.field.is_required() and not self.shown.unset

    @property
    def default(self) -> Any:
        return None if self.field.is_required() else self.field.get_default(call_default_factory=True)

    @property
    def is_repeated(self) -> bool:
        return get_origin(self.field.annotation) is tuple

    @property
    def type(self) -> Any:
        """The type of one value, without None."""
        kinds = [kind for kind in get_args(self.field.annotation) if kind is not NoneType]
        is_optional = len(kinds) < len(get_args(self.field.annotation))
        return kinds[0] if is_optional else self.field.annotation

    @property
    def bounds(self) -> str:
        """The range of a number, such as ``>= 1, <= 64``; empty if there is none."""
        signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
        found = ((sign, getattr(item, name, None)) for item in self.field.metadata for name, sign in signs.items())
        return ", ".join(f"{sign} {bound}" for sign, bound in found if bound is not None)


def settings_of(kind: type[BaseModel]) -> Iterator[Setting]:
    """Yield all settings of a class; a nested class yields its settings."""
    for name, field in kind.model_fields.items():
        if (nested := _nested(field)) is None:
            yield Setting((name,), flag_of(kind, name), field, _shown(field))
            continue
        for setting in settings_of(nested):
            path = (name, *setting.path)
            yield Setting(path, flag_of(kind, *path), setting.field, setting.shown)


def flag_of(kind: type[BaseModel], name: str, *rest: str) -> str:
    """Return the flag of a field.

    ``rest`` names a field of nested settings; without it, their prefix.
    """
    field = kind.model_fields.get(name)
    flag = (field and _shown(field).name) or f"--{name.replace('_', '-')}"
    if field is None or (nested := _nested(field)) is None:
        return flag
    return flag + (flag_of(nested, *rest).removeprefix("--") if rest else "...")


def build(kind: type[Kind], values: Mapping[str, Any], flag: str = "") -> Kind:
    """Return settings built from ``values``. Raises ConfigError that names the flag at fault.

    ``flag``: the single flag whose key=value pairs these are; otherwise each field is a flag.
    """
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError("; ".join(_describe(item, kind, flag) for item in error.errors())) from None


@contextlib.contextmanager
def at_fault(option: str) -> Iterator[None]:
    """Prefix ConfigErrors of the block with ``option``."""
    try:
        yield
    except ConfigError as error:
        raise type(error)(f"{option}: {error.message}", advice=error.advice) from error


def to_flags(settings: BaseModel) -> list[str]:
    """Return the command line of ``settings``: arguments, then flags not at their default.

    Secrets are left out: see ``to_environment``.
    """
    words: list[str] = []
    for setting in settings_of(type(settings)):
        value: Any = reduce(getattr, setting.path, settings)
        if setting.shown.secret:
            continue
        if setting.is_argument or setting.shown.leads:
            words[:0] = [str(value)] if setting.is_argument else [setting.flag, str(value)]
        elif value == setting.default:
            continue
        elif value is True:
            words.append(setting.flag)
        else:
            for item in value if isinstance(value, tuple) else (value,):
                words += [setting.flag, pairs_text(item) if isinstance(item, BaseModel) else str(item)]
    return words


def to_environment(settings: BaseModel) -> dict[str, str]:
    """Return the variables that hand the secrets of ``settings`` to a child process."""
    variables = {}
    for setting in settings_of(type(settings)):
        value: Any = reduce(getattr, setting.path, settings)
        if setting.shown.secret and setting.shown.env and value:
            secrets = value if isinstance(value, tuple) else (value,)
            variables[setting.shown.env] = " ".join(secret.get_secret_value() for secret in secrets)
    return variables


def pairs_text(item: BaseModel) -> str:
    """Return a flat model as ``key=value,key=value``."""
    return ",".join(f"{key}={value}" for key, value in item.model_dump().items())


def parse_pairs(text: str, flag: str) -> dict[str, str]:
    """Parse ``key=value,key=value``. Raises ConfigError that names ``flag``."""
    pairs: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if not equals or not key or key in pairs:
            raise ConfigError(f"{flag}: expected key=value,key=value with each key once, got {text!r}")
        pairs[key] = value
    return pairs


def _shown(field: FieldInfo) -> Flag:
    return next((item for item in field.metadata if isinstance(item, Flag)), Flag())


def _nested(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _describe(item: Any, kind: type[BaseModel], flag: str) -> str:
    """Return one line for one of pydantic's errors about ``kind``."""
    message = _words(item)
    path = [str(part) for part in item["loc"]]
    if not path:
        return f"{flag} {message}" if flag else message
    if item["type"] == "extra_forbidden":
        # Without one flag at fault, the key may belong to another class, so keys are not listed.
        known = kind.model_fields
        message += f"; known keys: {', '.join(known)}{did_you_mean(path[0], known)}" if flag else ""
    elif isinstance(item["input"], (str, int, float)) and not _is_secret(kind, path):
        message += f", got {item['input']!r}"
    if flag:
        return f"{flag} {path[0]}: {message}"
    # A repeated flag's path also holds its number and the pair's key.
    is_pair = len(path) > 2
    return f"{flag_of(kind, *path[: 1 if is_pair else None])}{f' {path[2]}' if is_pair else ''}: {message}"


def _is_secret(kind: type[BaseModel], path: list[str]) -> bool:
    field = kind.model_fields.get(path[0])
    return field is not None and _shown(field).secret


def _words(item: Any) -> str:
    """Return what was expected, reworded where pydantic's message is about models and schemas."""
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
