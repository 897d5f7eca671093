"""``python -m foretoken.train ALGORITHM TARGET --data FOLDER --output FOLDER``, which is ``foretoken train`` too.

The flags are the fields of ``TrainOptions``, read by argparse: a machine with a GPU may have nothing of the server's.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foretoken import hub
from foretoken.errors import ConfigError, ForetokenError
from foretoken.train.options import ALGORITHMS, TrainOptions

_SUMMARIES = {
    "eagle3": "an EAGLE-3 head, by training-time test",
    "eagle2": "an EAGLE-2 head, by feature regression",
    "standalone": "a small Llama with the target's tokenizer",
}


def make_parser(program: str) -> argparse.ArgumentParser:
    """One sub-command an algorithm, with the flags that have a meaning for it."""
    parser = argparse.ArgumentParser(program, description="Train a drafter against a target on a folder of text.")
    commands = parser.add_subparsers(dest="algorithm", required=True, metavar="|".join((*ALGORITHMS, "self-text")))
    commands.add_parser("self-text", add_help=False, help="write text of the target's own, to train on")
    for algorithm in ALGORITHMS:
        command = commands.add_parser(
            algorithm, help=_SUMMARIES[algorithm], description=f"Train {_SUMMARIES[algorithm]}."
        )
        command.add_argument(
            "target", type=Path, metavar="TARGET", help="folder of the target's checkpoint, or its id on the hub"
        )
        command.add_argument("--data", type=Path, required=True, help="folder of text files, or a token file (.npy)")
        command.add_argument("--output", type=Path, required=True, help="folder of the drafter's checkpoint")
        for field in dataclasses.fields(TrainOptions):
            if algorithm in field.metadata.get("only", ()):
                _add_flag(command, field)
    return parser


def parse(arguments: Sequence[str], program: str) -> TrainOptions:
    """The options that ``arguments`` give. Raises ConfigError for values, SystemExit for usage."""
    given: dict[str, Any] = vars(make_parser(program).parse_args(arguments))
    given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    return TrainOptions(**given)


def run(arguments: Sequence[str], program: str) -> None:
    """Parse and train, or write the target's own text; a hub id as TARGET is downloaded."""
    if arguments[:1] == ["self-text"]:
        from foretoken.train import self_text

        self_text.run(arguments[1:], f"{program} self-text")
        return
    options = parse(arguments, program)
    from foretoken.train.trainer import train

    train(dataclasses.replace(options, target=hub.resolve(str(options.target))))


def _add_flag(command: argparse.ArgumentParser, field: dataclasses.Field[Any]) -> None:
    flag = "--" + field.name.replace("_", "-")
    kind, items = _kind(field.name)
    help_text = field.metadata["help"].replace("%", "%%")
    if field.default is not None and kind is not bool:
        shown = " ".join(field.default) if isinstance(field.default, tuple) else field.default
        help_text += f" (default: {shown})"
    if kind is bool:
        action: Any = "store_true" if field.default is False else argparse.BooleanOptionalAction
        command.add_argument(flag, action=action, default=argparse.SUPPRESS, help=help_text)
    elif kind is tuple:
        command.add_argument(flag, action="extend", nargs="+", type=items, default=argparse.SUPPRESS, help=help_text)
    else:
        command.add_argument(flag, type=kind, default=argparse.SUPPRESS, help=help_text)


def _kind(name: str) -> tuple[Any, Any]:
    """The type of a field without its None, and that of its items if it has any."""
    declared = typing.get_type_hints(TrainOptions)[name]
    if isinstance(declared, types.UnionType):
        declared = next(each for each in typing.get_args(declared) if each is not types.NoneType)
    return typing.get_origin(declared) or declared, next(iter(typing.get_args(declared)), None)


def main() -> None:
    try:
        run(sys.argv[1:], "python -m foretoken.train")
    except ForetokenError as error:
        print(f"foretoken: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


if __name__ == "__main__":
    main()
