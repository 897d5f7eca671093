"""Print foretoken's requirements, one per line, without the packages named as arguments.

Of these `docker/lock.py` makes the locks that images install.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, without: set[str]) -> list[str]:
    """Return the project's dependencies in order. Raises SystemExit for an unknown ``without``."""
    dependencies: list[str] = tomllib.loads(pyproject.read_text())["project"]["dependencies"]
    by_name = {re.split(r"[<>=!~\[; ]", requirement)[0]: requirement for requirement in dependencies}
    if unknown := without - by_name.keys():
        raise SystemExit(f"not among the dependencies of {pyproject}: {', '.join(sorted(unknown))}")
    return [requirement for name, requirement in by_name.items() if name not in without]


def extra(pyproject: Path, name: str) -> list[str]:
    """Return the requirements of one of the project's extras."""
    found: list[str] = tomllib.loads(pyproject.read_text())["project"]["optional-dependencies"][name]
    return found


if __name__ == "__main__":
    print(*requirements(Path("pyproject.toml"), set(sys.argv[1:])), sep="\n")
