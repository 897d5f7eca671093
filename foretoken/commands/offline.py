"""Commands that serve nothing: training a drafter, converting a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_GIB = 1024**3


def add_commands(app: typer.Typer) -> None:
    """Give ``app`` the commands of this module."""
    # The trainer reads its own flags, --help among them: it also runs where nothing of the command line is installed.
    untouched = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command(context_settings=untouched)(train)
    app.command()(convert)


def train(context: typer.Context) -> None:
    """Train a drafter (EAGLE3, EAGLE2, STANDALONE) for a target on a folder of text."""
    from foretoken.train.__main__ import run

    run(context.args, "foretoken train")


def convert(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="Folder with a .bin or .pt checkpoint, or one such file.")
    ],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="New folder, or .safetensors file for a file.")],
    max_gib: Annotated[float, typer.Option(help="A file, or its tensors, larger than this is refused.")] = 32.0,
    timeout: Annotated[int, typer.Option(help="Seconds that reading one file may take.")] = 600,
) -> None:
    """Convert pickled checkpoints and FR-Spec token maps to safetensors; code in them is refused, never run."""
    from foretoken.commands.convert import ConvertLimits
    from foretoken.commands.convert import convert as run
    from foretoken.errors import ConfigError

    if max_gib <= 0 or timeout < 1:
        raise ConfigError("--max-gib and --timeout must be more than 0")
    for file in run(source, destination, ConvertLimits(max_bytes=int(max_gib * _GIB), timeout_s=timeout)):
        print(file)
