"""Run ``python -m foretoken.train ALGORITHM TARGET --data FOLDER --output FOLDER``.

``foretoken train`` does the same.

The flags are the fields of ``TrainOptions``. argparse reads them, because a training machine may
lack the server's packages.
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

# The command that writes a text to train on; the other commands are the algorithms.
_SELF_TEXT = "self-text"
_SUMMARIES = {
    "eagle3": "an EAGLE-3 head, by training-time test",
    "eagle2": "an EAGLE-2 head, by regression on hidden states",
    "standalone": "a small Llama with the target's tokenizer",
}


def make_parser(program: str) -> argparse.ArgumentParser:
    """Return a parser with one sub-command for each algorithm and the flags that apply to it."""
    parser = argparse.ArgumentParser(program, description="Train a drafter against a target on a folder of text.")
    names = [algorithm.upper() for algorithm in ALGORITHMS]
    commands = parser.add_subparsers(dest="algorithm", required=True, metavar="|".join((*names, _SELF_TEXT)))
    commands.add_parser(_SELF_TEXT, add_help=False, help="write text of the target's own, to train on")
    for algorithm, name in zip(ALGORITHMS, names, strict=True):
        command = commands.add_parser(name, help=_SUMMARIES[algorithm], description=f"Train {_SUMMARIES[algorithm]}.")
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
    """Return the options in ``arguments``.

    Raises ConfigError for invalid values, SystemExit for wrong usage.
    """
    given: dict[str, Any] = vars(make_parser(program).parse_args(_in_capitals(arguments)))
    given["algorithm"] = given["algorithm"].lower()
    given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    return TrainOptions(**given)


def run(arguments: Sequence[str], program: str) -> None:
    """Parse and train, or write the target's own text. If TARGET is a hub id, download it."""
    if [word.lower() for word in arguments[:1]] == [_SELF_TEXT]:
        from foretoken.train import self_text

        self_text.run(arguments[1:], f"{program} {_SELF_TEXT}")
        return
    options = parse(arguments, program)
    from foretoken.train.trainer import train

    train(dataclasses.replace(options, target=hub.resolve(str(options.target))))


def _in_capitals(arguments: Sequence[str]) -> list[str]:
    """Spell the algorithm as the parser knows it.

    Any case is accepted, and EAGLE means EAGLE-2's layout.
    """
    words = list(arguments)
    if words and words[0].lower() in ("eagle", *ALGORITHMS):
        words[0] = {"EAGLE": "EAGLE2"}.get(words[0].upper(), words[0].upper())
    return words


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
    """Return the type of a field without None, and the type of its items if it has any."""
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
