"""Prints what foretoken needs, one requirement a line, without the packages that are named as arguments.

An image's dependencies are installed from this before the source is there, so that a change of the source installs
nothing again. Needs Python's own library only.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, without: set[str]) -> list[str]:
    """The project's dependencies in their order. Raises SystemExit if one of ``without`` is not among them."""
    dependencies: list[str] = tomllib.loads(pyproject.read_text())["project"]["dependencies"]
    by_name = {re.split(r"[<>=!~\[; ]", requirement)[0]: requirement for requirement in dependencies}
    if unknown := without - by_name.keys():
        raise SystemExit(f"not among the dependencies of {pyproject}: {', '.join(sorted(unknown))}")
    return [requirement for name, requirement in by_name.items() if name not in without]


if __name__ == "__main__":
    print(*requirements(Path("pyproject.toml"), set(sys.argv[1:])), sep="\n")
