"""Read the file of hashed API keys, and write an entry of it.

```toml
[[keys]]
name = "alice"
sha256 = "5e88...1d1d"
requests_per_minute = 60
```
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from foretoken import limits
from foretoken.errors import ConfigError
from gateway.access.key import ApiKey, digest_of

FLAG = "--api-key-file"
MAX_KEYS = 4096
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
Limit = Annotated[int, Field(ge=1, le=10**12)]


class KeyEntry(BaseModel):
    """One entry of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    sha256: str
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    max_concurrent_requests: Limit | None = None
    models: list[str] = Field(default_factory=list)
    priority: int = Field(0, ge=int(limits.PRIORITY_RANGE.low), le=int(limits.PRIORITY_RANGE.high))
    metrics: bool = False

    @field_validator("name")
    @classmethod
    def _is_name(cls, name: str) -> str:
        if not limits.is_name(name):
            raise ValueError(f"must be {limits.NAME_RULE}")
        return name

    @field_validator("sha256")
    @classmethod
    def _is_digest(cls, digest: str) -> str:
        if not _DIGEST.fullmatch(digest):
            raise ValueError("must be 64 hexadecimal digits, the SHA-256 of the key: foretoken key prints it")
        return digest

    def key(self) -> ApiKey:
        """Return the key that this entry describes."""
        values = self.model_dump(exclude={"sha256", "models"})
        return ApiKey(**values, digest=bytes.fromhex(self.sha256), models=frozenset(self.models))


def read_keys(path: Path) -> list[ApiKey]:
    """Read the keys of a file. Raises ConfigError that names the file and the field at fault.

    No message quotes a value: a secret may stand where its hash belongs.
    """
    entries = _entries(path)
    keys: list[ApiKey] = []
    for number, entry in enumerate(entries, 1):
        where = f"{FLAG}: {path}: key {number}"
        if not isinstance(entry, dict):
            raise ConfigError(f"{where} must be a table")
        try:
            keys.append(KeyEntry.model_validate(entry).key())
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            field = ".".join(str(part) for part in first["loc"])
            raise ConfigError(f"{where}: {field}: {_words(first)}") from None
    check_distinct(keys, f"{FLAG}: {path}")
    return keys


def check_distinct(keys: list[ApiKey], where: str) -> None:
    """Raise ConfigError if two keys have the same name or the same secret."""
    names: set[str] = set()
    digests: dict[bytes, str] = {}
    for key in keys:
        if key.name in names:
            raise ConfigError(f"{where}: name: {key.name} is there twice")
        if (other := digests.get(key.digest)) is not None:
            raise ConfigError(f"{where}: sha256: {other} and {key.name} have the same key")
        names.add(key.name)
        digests[key.digest] = key.name


def entry_text(name: str, secret: str, **limits_given: int | list[str] | bool | None) -> str:
    """Return the entry of a new key, to append to a file. Raises ConfigError for a bad value."""
    # By identity: 0 equals False, and a limit of 0 is a mistake to name.
    given = {
        field: value for field, value in limits_given.items() if not (value is None or value is False or value == [])
    }
    values: dict[str, Any] = {"name": name, "sha256": digest_of(secret.encode()).hex(), **given}
    try:
        KeyEntry.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise ConfigError(f"{first['loc'][0]}: {_words(first)}") from None
    # Text, whole numbers, lists of text and true are written alike in JSON and TOML.
    return "".join(["[[keys]]\n", *(f"{field} = {json.dumps(value)}\n" for field, value in values.items())])


def _entries(path: Path) -> list[Any]:
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{FLAG}: cannot read {path}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{FLAG}: {path} is not TOML: {error}") from None
    if unknown := sorted(found.keys() - {"keys"}):
        raise ConfigError(f"{FLAG}: {path}: there is no field {unknown[0]!r}; each key is a table [[keys]]")
    entries = found.get("keys")
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{FLAG}: {path}: keys: must hold at least one table [[keys]]")
    if len(entries) > MAX_KEYS:
        raise ConfigError(f"{FLAG}: {path}: keys: at most {MAX_KEYS} keys")
    return entries


def _words(error: Any) -> str:
    words = {"missing": "must be given", "extra_forbidden": "there is no such field"}
    message: str = words.get(
        error["type"], error["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    )
    return message[:1].lower() + message[1:]
