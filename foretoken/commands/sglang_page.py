"""Print docs/sglang.md: ``python -m foretoken.commands.sglang_page``."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from foretoken.commands.sglang_flags import (
    INSTEAD_OF_VALUES,
    RENAMED_VALUES,
    SAID_OF_RENAMED,
    SAME_FLAGS,
    SGLANG_FLAGS,
    SglangFlag,
)

# Prose lines of a page have at most so many.
_COLUMNS = 100

_HEAD = """# SGLang's command lines

A command line of SGLang starts foretoken as typed, with `foretoken serve` or
`python -m foretoken.launch_server` in the place of `python3 -m sglang.launch_server`:

```bash
python -m foretoken.launch_server --model M --speculative-algo EAGLE --speculative-draft D --speculative-num-steps 5 \\
  --speculative-eagle-topk 8 --speculative-num-draft-tokens 64 --mem-fraction 0.7 --port=30020
```

- `launch_server` listens on port 30000 unless `--port` says otherwise, `foretoken serve` on 8000.
- A flag may be shortened as long as only one flag begins so: `--mem-fraction`,
  `--speculative-algo`.
- A flag that has no use here is taken, and said once at the start. One whose meaning cannot be kept
  is refused with the reason. Unknown flags are refused.
- `--dry-run` checks a command line and the checkpoints that it names, and starts nothing.
- `EAGLE` and `NEXTN` mean what they mean to SGLang: without a draft model, or with the target as
  its own draft model, the MTP layers of the target's checkpoint draft. `LOOKAHEAD` is the old name
  of `NGRAM`.
- `--speculative-token-map` takes a file or `ORG/NAME/FILE` on the hub. From a `.pt` file foretoken
  reads a list or a flat tensor of whole numbers, and nothing else; no code in it is run.
- `--host 0.0.0.0` needs keys ([access.md](access.md)), or `--insecure`.
- `--config` names a YAML or TOML file of foretoken's own flags ([settings.md](settings.md)).

`make docs` writes this page from the table in `foretoken/commands/sglang_flags.py`.

## Flags with the same name and meaning

[settings.md](settings.md) has their defaults and bounds.
"""


def lines() -> Iterator[str]:
    """Yield the lines after the head."""
    same = ", ".join(f"`{flag}`" for flag in SAME_FLAGS) + "."
    yield from textwrap.wrap(same, _COLUMNS, break_long_words=False, break_on_hyphens=False)
    yield from ("", "## All others", "", "| flag of SGLang | here |", "| --- | --- |")
    for row in SGLANG_FLAGS:
        yield f"| {', '.join(f'`{name}`' for name in row.names)} | {_meaning(row)} |"
    for flag, renamed in RENAMED_VALUES.items():
        for theirs, ours in renamed.items():
            said = f": {SAID_OF_RENAMED[flag]}" if flag in SAID_OF_RENAMED else ""
            yield f"| `{flag} {theirs}` | is `{flag} {ours}`{said} |"
    for flag, (values, instead) in INSTEAD_OF_VALUES.items():
        yield f"| `{flag}` {', '.join(values)} | taken: {instead} |"


def _meaning(row: SglangFlag) -> str:
    if row.to:
        words = " ".join(word.replace("{}", "VALUE") for word in row.to)
        renamed = "".join(f"; {theirs} is {ours}" for theirs, ours in row.renamed.items())
        return f"is {'MODEL' if words == 'VALUE' else f'`{words}`'}{renamed}"
    fine = f"; `{'`, `'.join(row.silent)}` {'are' if len(row.silent) > 1 else 'is'} fine" if any(row.silent) else ""
    return f"refused: {row.refused}{fine}" if row.refused else f"taken: {row.instead}"


if __name__ == "__main__":
    print(_HEAD, *lines(), sep="\n")
