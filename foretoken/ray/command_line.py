"""Turn a Ray Serve application's arguments into a ``foretoken serve`` command line, and read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from foretoken import cli
from foretoken.commands.given import Given
from foretoken.commands.serve_command import ServeCommand
from foretoken.errors import ConfigError


def to_words(arguments: Mapping[str, Any]) -> list[str]:
    """Return the command line of arguments: names of flags without dashes, and ``model``.

    Raises ConfigError for a value that is neither a text, a number, true, false nor a list.
    """
    words: list[str] = []
    for key, value in arguments.items():
        items = value if isinstance(value, list) else [value]
        if key == "model":
            words.insert(0, str(value))
        elif not items or not all(isinstance(item, str | int | float) for item in items):
            raise ConfigError(f"{key}: expected text, a number, true, false or a list, got {value!r}")
        else:
            for item in items:
                if item is not False:
                    words += [f"--{key}"] if item is True else [f"--{key}", str(item)]
    return words


def parse(words: Sequence[str]) -> Given:
    """Return what a command line of ``foretoken serve`` gives. Raises ConfigError."""
    command = cli.serve
    assert isinstance(command, ServeCommand)
    try:
        return command.given(command.make_context(str(command.name), list(words)))
    except click.ClickException as error:
        raise ConfigError(error.format_message()) from None
