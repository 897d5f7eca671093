"""Define the commands that do not serve: train a drafter, convert a checkpoint."""

from __future__ import annotations

from pathlib import Path

import click

_GIB = 1024**3


# The trainer parses its own flags, --help included: it also runs without the command line's
# packages.
@click.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
@click.pass_context
def train(context: click.Context) -> None:
    """Train a drafter (EAGLE3, EAGLE2, STANDALONE) for a target model."""
    from foretoken.train.__main__ import run

    run(context.args, "foretoken train")


@click.command()
@click.argument(
    "source", metavar="SRC", type=click.Path(path_type=Path), help="Folder with a .bin or .pt checkpoint, or one file."
)
@click.argument(
    "destination",
    metavar="DST",
    type=click.Path(path_type=Path),
    help="New folder, or .safetensors file for a file.",
)
@click.option("--max-gib", default=32.0, show_default=True, help="Refuse a file if it or its tensors are larger.")
@click.option("--timeout", default=600, show_default=True, help="Seconds that reading one file may take.")
def convert(source: Path, destination: Path, max_gib: float, timeout: int) -> None:
    """Convert pickled checkpoints and token maps to safetensors.

    Code in them is never run. A token map is a list of token ids, as FR-Spec has them.
    """
    from foretoken.commands.convert import ConvertLimits
    from foretoken.commands.convert import convert as run
    from foretoken.errors import ConfigError

    if max_gib <= 0 or timeout < 1:
        raise ConfigError("--max-gib and --timeout must be more than 0")
    for file in run(source, destination, ConvertLimits(max_bytes=int(max_gib * _GIB), timeout_s=timeout)):
        print(file)


COMMANDS = (train, convert)
