"""Bring the version of pyproject.toml to every other place
that states it: python docker/set_version.py

With --check it changes nothing, and exits with 1 if a place has another version. --check VERSION
also compares pyproject.toml with that, as a tag without its "v".
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSION = r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?"
# By file: what stands before a version. Each is there at least once.
PLACES: dict[str, tuple[str, ...]] = {
    "foretoken/__init__.py": (r'__version__ = "',),
    "docker/helm/Chart.yaml": (r"^version: ", r"^appVersion: "),
    "docker/Dockerfile": (r"org\.opencontainers\.image\.version=",),
    "docs/kubernetes.md": (r"/foretoken-gateway:", r"/foretoken-engine:"),
    # The newest version comes first; its date follows.
    "CHANGELOG.md": (r"\A# Changelog\n\n## ",),
}


def project_version(root: Path = ROOT) -> str:
    """Return the version in pyproject.toml."""
    version: str = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    return version


def changes(root: Path = ROOT) -> dict[Path, str]:
    """Return each file that states another version than pyproject.toml, with its new text.

    Raises ValueError if a place is gone.
    """
    version = project_version(root)
    found: dict[Path, str] = {}
    for name, befores in PLACES.items():
        path = root / name
        old = text = path.read_text(encoding="utf-8")
        for before in befores:
            text, count = re.subn(f"({before}){VERSION}", rf"\g<1>{version}", text, flags=re.MULTILINE)
            if count == 0:
                raise ValueError(f"{name} states no version after {before!r}")
        if text != old:
            found[path] = text
    return found


def main() -> None:
    """Write the version, or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", nargs="?", const="", metavar="VERSION")
    expected = parser.parse_args().check
    found = changes()
    if expected is None:
        for path, text in found.items():
            path.write_text(text, encoding="utf-8")
        return
    wrong = [f"{path.relative_to(ROOT)} has another version than pyproject.toml" for path in found]
    if expected and expected != project_version():
        wrong.append(f"pyproject.toml has version {project_version()}, not {expected}")
    sys.exit("\n".join(wrong) if wrong else 0)


if __name__ == "__main__":
    main()
