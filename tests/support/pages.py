"""The repository's pages, which are Markdown files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILT = {"__pycache__", "build", "dist"}
# The demo model wrote this and invented the names.
NOT_OURS = {Path("models/demo/samples.md")}


def walk(root: Path) -> Iterator[Path]:
    """Yield the files below ``root``, relative to it, without hidden folders."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in BUILT]
        yield from (Path(folder, name).relative_to(root) for name in names)


def pages() -> dict[Path, str]:
    """Return the text of each page by its path in the repository."""
    found = sorted(path for path in walk(ROOT) if path.suffix == ".md" and path not in NOT_OURS)
    return {path: (ROOT / path).read_text(encoding="utf-8") for path in found}
