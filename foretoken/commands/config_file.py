"""Read and write files of settings, TOML or YAML.

A key is a flag's name without dashes in front.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from foretoken.errors import ConfigError
from foretoken.output_file import write_file

YAML_SUFFIXES = (".yaml", ".yml")
# What YAML calls no value.
_NULLS = ("", "~", "null", "Null", "NULL")

# A text, or the texts of a repeated flag.
Value = str | list[str]


def read_config(path: Path) -> dict[str, Value]:
    """Return a file's settings by key. Values are texts, as on a command line.

    The suffix .yaml or .yml says YAML; any other file is TOML.

    Raises:
        ConfigError: the file cannot be read, or is not what its name says.
    """
    try:
        text = path.read_text(encoding="utf-8")
        found: Mapping[Any, Any] = _read_yaml(text) if path.suffix in YAML_SUFFIXES else tomllib.loads(text)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
        raise ConfigError(f"--config: cannot read {path}: {reason}") from None
    values: dict[str, Value] = {}
    for key, value in found.items():
        items = value if isinstance(value, list) else [value]
        if any(item is None or isinstance(item, (dict, list)) for item in items):
            raise ConfigError(f"--config: {path}: {key}: expected one value, or a list of values")
        # Not a number: click would cut it off where it expects a whole one.
        texts = [str(item) for item in items]
        values[key] = texts if isinstance(value, list) else texts[0]
    return values


def write_config(path: Path, flag: str, comments: Iterable[str], values: Mapping[str, Value | bool]) -> None:
    """Write a YAML file that ``read_config`` reads. Raises ConfigError naming ``flag``."""
    lines = [f"# {comment}".rstrip() for comment in comments]
    for key, value in values.items():
        if isinstance(value, bool):
            lines.append(f"{key}: {str(value).lower()}")
        elif isinstance(value, str):
            lines.append(f"{key}: {_quoted(value)}")
        else:
            lines += [f"{key}:", *(f"  - {_quoted(item)}" for item in value)]
    write_file(path, "\n".join(lines) + "\n", flag)


def _quoted(text: str) -> str:
    """Return a scalar of YAML that is read as this text."""
    import yaml

    # A line of dumped scalars ends in a document's end, which is not part of the scalar.
    dumped: str = yaml.safe_dump(text, width=2**31, allow_unicode=True)
    return dumped.removesuffix("...\n").strip()


def _read_yaml(text: str) -> dict[str, Any]:
    """Return a YAML mapping whose scalars are texts as written, None where YAML says no value.

    YAML 1.1 would make false of ``off``, 43200 of ``12:00:00`` and 8 of ``010``. Raises ValueError.
    """
    import yaml

    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise ValueError(error) from None
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise ValueError("expected a mapping of settings")
    found: dict[str, Any] = {}
    for key_node, value_node in root.value:
        key = _value(key_node)
        if not isinstance(key, str):
            raise ValueError(f"line {key_node.start_mark.line + 1}: expected a setting's name")
        if key in found:
            raise ValueError(f"line {key_node.start_mark.line + 1}: {key} is there twice")
        found[key] = _value(value_node)
    return found


def _value(node: Any) -> str | list[Any] | dict[str, Any] | None:
    import yaml

    if isinstance(node, yaml.ScalarNode):
        is_null = node.style is None and node.value in _NULLS
        return None if is_null else str(node.value)
    if isinstance(node, yaml.SequenceNode):
        items: Sequence[Any] = node.value
        return [_value(item) for item in items]
    return {}
