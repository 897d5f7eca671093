"""Translate SGLang's command lines to ours, by the table in foretoken.commands.sglang_flags."""

from __future__ import annotations

from collections.abc import Collection

from foretoken.commands.sglang_flags import (
    INSTEAD_OF_VALUES,
    RENAMED_VALUES,
    SAID_OF_RENAMED,
    SGLANG_FLAGS,
    SglangFlag,
)
from foretoken.errors import ConfigError

_BY_NAME = {name: row for row in SGLANG_FLAGS for name in row.names}


def translate(words: list[str], own: Collection[str]) -> tuple[list[str], list[str]]:
    """Return our command line for SGLang's, and what to say about flags that have no use here.

    As with argparse, a flag may be shortened while its beginning fits one flag only.

    Args:
        own: our own flags.

    Raises:
        ConfigError: a flag's meaning cannot be kept, a value is missing, or a short form fits
            several flags.
    """
    found: list[str] = []
    notices: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            return [*found, word, *left], notices
        if not word.startswith("--"):
            found.append(word)
            continue
        typed, equals, value = word.partition("=")
        name = _whole(typed, own)
        if equals:
            left.insert(0, value)
        if name in own or name not in _BY_NAME:
            ours, notice = _own(name, left, has_value=bool(equals))
        else:
            ours, notice = _apply(_BY_NAME[name], name, left, has_value=bool(equals))
        found += ours
        if notice and notice not in notices:
            notices.append(notice)
    return found, notices


def _whole(typed: str, own: Collection[str]) -> str:
    """Return the flag that ``typed`` abbreviates, or ``typed`` if there is none."""
    if typed in own or typed in _BY_NAME:
        return typed
    # Names of one row are one flag.
    found = {
        _BY_NAME[name].names[0] if name in _BY_NAME else name: name
        for name in sorted({*own, *_BY_NAME})
        if name.startswith(typed)
    }
    if len(found) > 1:
        raise ConfigError(f"{typed} is short for several flags: {', '.join(sorted(found))}")
    return next(iter(found.values()), typed)


def _own(name: str, left: list[str], *, has_value: bool) -> tuple[list[str], str]:
    """Return the words of one of our own flags; take them from ``left``."""
    value = left[0] if left else ""
    values, instead = INSTEAD_OF_VALUES.get(name, ((), ""))
    if value in values:
        left.pop(0)
        return [], f"{name} {value}: {instead}"
    if value in RENAMED_VALUES.get(name, {}):
        left.pop(0)
        ours = RENAMED_VALUES[name][value]
        said = SAID_OF_RENAMED.get(name)
        return [name, ours], f"{name} {value} is {ours} here: {said}" if said else ""
    if has_value:
        # Keep it in one word: the value may be empty or look like a flag.
        return [f"{name}={left.pop(0)}"], ""
    return [name], ""


def _apply(row: SglangFlag, name: str, left: list[str], *, has_value: bool) -> tuple[list[str], str]:
    """Return our words for a flag of the table, and what to say; take its values from ``left``."""
    values: list[str] = []
    most = {0: 0, 1: 1, "many": len(left)}[row.num_values]
    while left and len(values) < most and (has_value or not left[0].startswith("--")):
        values.append(left.pop(0))
        has_value = False
    if has_value:
        raise ConfigError(f"{name} takes no value")
    if row.num_values and not values:
        raise ConfigError(f"{name} needs a value")
    if values and row.choices and values[0] not in row.choices:
        raise ConfigError(f"{name}: {values[0]!r} is not one of {', '.join(row.choices)}")
    if values and values[0] in row.silent:
        return [], ""
    if row.refused:
        raise ConfigError(f"{' '.join([name, *values])}: {row.refused}")
    if row.instead:
        return [], f"{' '.join([name, *values])}: {row.instead}"
    value = row.renamed.get(values[0], values[0]) if values else ""
    return [word.replace("{}", value) for word in row.to], ""
