"""Print docs/settings.md: ``python -m foretoken.commands.settings_table``."""

from __future__ import annotations

from typing import Literal, get_args, get_origin

from foretoken.commands.options import COMMANDS, TuneOptions, settings_of_command
from foretoken.config import Setting, settings_of

_HEAD = """# Settings

Each setting of `foretoken serve`, `gateway`, `verifier`, `drafter`, `bench` and `tune` is a flag.
It is also a key of the file that `--config FILE` names: the flag without its dashes. A flag wins
over the environment, the environment over the file, the file over the default. A repeated flag is a
list in the file. `foretoken tune` takes the settings of `serve`, too.

`serve`, `doctor` and `tune` take a shortened flag as long as only one flag begins so, as SGLang
does: `--speculative-num-st 3`. Keys of a file are written in full.

```yaml
model: /absolute/path/of/a/model   # or a hub id, or demo
port: 8080
drafter:
  - name=a,algorithm=NGRAM
```

A file whose name ends in `.yaml` or `.yml` is YAML, any other TOML (`port = 8080`). Values are read
as written, so `mps: off` needs no quotes. A key that is unknown, there twice, or without a value is
refused.

`make docs` writes this page from the settings classes (`config.py` of each service,
`foretoken/common_settings.py`, `foretoken/commands/options.py`, `foretoken/bench/settings.py`,
`foretoken/tune/settings.py`).

| setting | command | default | values | meaning |
| --- | --- | --- | --- | --- |"""


def rows() -> list[str]:
    """Return a row per setting; several if its default or meaning differs between commands."""
    commands: dict[tuple[str, str, str, str], list[str]] = {}
    found = {command: settings_of_command(command) for command in COMMANDS} | {"tune": settings_of(TuneOptions)}
    for command, settings in found.items():
        for setting in settings:
            if not setting.shown.hidden:
                commands.setdefault(_cells(setting), []).append(command)
    return [
        f"| `{flag}` | {', '.join(names)} | {default} | {values} | {meaning} |"
        for (flag, default, values, meaning), names in sorted(commands.items())
    ]


def _cells(setting: Setting) -> tuple[str, str, str, str]:
    meaning = f"{setting.field.description}"
    if setting.shown.env:
        meaning += f" Environment: `{setting.shown.env}`."
    return setting.flag, _default(setting), _values(setting), meaning.replace("|", "\\|")


def _default(setting: Setting) -> str:
    if setting.is_required:
        return "required"
    if setting.shown.unset:
        return setting.shown.unset
    return "off" if setting.default is False else f"`{setting.default}`"


def _values(setting: Setting) -> str:
    kind = setting.type
    choices = setting.shown.choices or (get_args(kind) if get_origin(kind) is Literal else ())
    numbers = {int: "whole number", float: "number"}
    if kind in numbers:
        word = f"{setting.shown.zero} or " if setting.shown.zero else ""
        return word + " ".join((numbers[kind], setting.bounds)).strip()
    if kind is bool:
        return "off, on"
    return ", ".join(choices) or (setting.shown.metavar or "text").replace("|", "\\|")


if __name__ == "__main__":
    print(_HEAD, *rows(), sep="\n")
