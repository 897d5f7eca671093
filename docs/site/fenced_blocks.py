"""Find the fenced blocks of a page, and what each needs to run.

A block of commands says what it needs beside foretoken, the demo model and a running server:

    ```bash needs=gpu,hub

Commands without such a word are run by the tests.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

FENCE = re.compile(r"^(?P<fence>```+)(?P<info>[^\n]*)\n(?P<text>.*?)^(?P=fence) *$", re.MULTILINE | re.DOTALL)
# What a block may need, as the site says it.
NEEDS = {
    "cluster": "a cluster",
    "containers": "a container engine",
    "gpu": "an NVIDIA GPU",
    "host": "several machines, or a name that others reach",
    "hub": "files from the model hub",
    "index": "a package index",
    "program": "another project's program",
    "rights": "rights that only maintainers have",
    "root": "root",
    "time": "more time than a check has",
}
# Blocks with these languages are run: commands, commands with their output, and programs.
RUN = ("bash", "console", "python")
# All languages; an unmarked block could hide a command.
LANGUAGES = (*RUN, "ini", "json", "text", "toml", "yaml")


@dataclass(frozen=True)
class Block:
    """One fenced block. ``line`` is the number of its fence's line, from 1."""

    line: int
    language: str
    needs: tuple[str, ...]
    text: str


def blocks(text: str) -> list[Block]:
    """Return a page's blocks.

    Raises ValueError if a fence is not ``LANGUAGE`` or ``LANGUAGE needs=A,B``.
    """
    return [_block(found, 1 + text.count("\n", 0, found.start())) for found in FENCE.finditer(text)]


def _block(found: re.Match[str], line: int) -> Block:
    info = re.fullmatch(r"(\w+)(?: needs=([\w,]+))?", found["info"])
    if info is None or info[1] not in LANGUAGES:
        raise ValueError(f"line {line}: the fence has to name one of {', '.join(LANGUAGES)}: {found['info']!r}")
    needs = tuple(info[2].split(",")) if info[2] else ()
    if unknown := set(needs) - NEEDS.keys():
        raise ValueError(f"line {line}: {', '.join(sorted(unknown))} is not one of {', '.join(NEEDS)}")
    return Block(line, info[1], needs, found["text"])


def titled(text: str) -> str:
    """Return a page with what each block needs as the block's title, in the form of MkDocs."""

    def fence(found: re.Match[str]) -> str:
        block = _block(found, 1 + text.count("\n", 0, found.start()))
        if not block.needs:
            return found[0]
        title = "needs " + ", ".join(NEEDS[need] for need in block.needs)
        return found[0].replace(found["info"], f'{block.language} title="{title}"', 1)

    return FENCE.sub(fence, text)
