"""Every link of a page leads to a file and a heading, and every module that a page names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.pages import ROOT, pages, walk

# Longer pages are split.
MOST_LINES = 200
MOST_COLUMNS = 100
FENCE = re.compile(r"^ *(```+|~~~+).*?^ *\1", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
# A module or its path: `gate.py`, `verifier_svc/speculation/gate.py`; not `*.py`, nor a path in
# a user's home.
MODULE = re.compile(r"(?<![\w/.*~-])(?:[\w.-]+/)*[\w-]+\.(?:py|proto)\b")


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to a page's headings."""
    found: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", text)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        number = 0
        while (numbered := f"{anchor}-{number}" if number else anchor) in found:
            number += 1
        found.add(numbered)
    return found


def faults(root: Path, page: Path, files: set[Path]) -> list[str]:
    """Return a page's links that lead nowhere, and its modules that do not exist."""
    text = (root / page).read_text(encoding="utf-8")
    found = []
    for target in LINK.findall(FENCE.sub("", text)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        linked = root / page.parent / name if name else root / page
        if not linked.exists():
            found.append(f"{page}: link to {target}: no such file")
        elif anchor and anchor not in anchors(linked.read_text(encoding="utf-8")):
            found.append(f"{page}: link to {target}: no such heading")
    ends = {"/".join(path.parts[start:]) for path in files for start in range(len(path.parts))}
    # A link's file was looked at above.
    named = MODULE.findall(re.sub(r"\]\([^)\s]+\)", "]", text))
    found += [f"{page}: names {name}, which does not exist" for name in named if name not in ends]
    return found


def test_links_and_modules_of_all_pages_exist() -> None:
    files = set(walk(ROOT))
    assert {Path("README.md"), Path("docs/architecture.md"), Path("kernels/README.md")} <= set(pages())
    found = [fault for page in pages() for fault in faults(ROOT, page, files)]
    assert not found, "\n".join(found)


def test_no_page_is_long() -> None:
    lengths = {page: text.count("\n") for page, text in pages().items()}
    assert {page: length for page, length in lengths.items() if length > MOST_LINES} == {}


def test_no_line_of_prose_is_long() -> None:
    """Tables, pictures and fenced blocks may be wider."""
    long = [
        f"{page}: {line}"
        for page, text in pages().items()
        if page.parts[0] == "docs" or len(page.parts) == 1
        for line in FENCE.sub("", text).splitlines()
        if len(line) > MOST_COLUMNS and not line.lstrip().startswith(("|", "!["))
    ]
    assert not long, "\n".join(long)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("[a](other.md)", ""),
        ("[a](other.md#two-words)", ""),
        ("[a](#the-page)", ""),
        ("[a](https://example.org/none.md#none)", ""),
        ("`engine.py` and `svc/engine.py`, but not `*.py` or `~/other.py`", ""),
        ("```\n[a](none.md)\n```", ""),
        ("[a](none.md)", "link to none.md: no such file"),
        ("[a](other.md#none)", "link to other.md#none: no such heading"),
        ("[a](#none)", "link to #none: no such heading"),
        ("`engines.py`", "names engines.py, which does not exist"),
        ("`src/engine.py`", "names src/engine.py, which does not exist"),
    ],
)
def test_faults_of_a_page(tmp_path: Path, line: str, fault: str) -> None:
    (tmp_path / "svc").mkdir()
    (tmp_path / "svc" / "engine.py").touch()
    (tmp_path / "other.md").write_text("# Two, `words`\n```\n# none\n```\n## Two words\n", encoding="utf-8")
    (tmp_path / "page.md").write_text(f"# The page\n{line}\n", encoding="utf-8")
    found = faults(tmp_path, Path("page.md"), set(walk(tmp_path)))
    assert found == ([f"page.md: {fault}"] if fault else [])


def test_anchors() -> None:
    assert anchors("# FlashInfer's times (a, b)\n## Twice\n## Twice\n### [A link](x.md)\n") == {
        "flashinfers-times-a-b",
        "twice",
        "twice-1",
        "a-link",
    }
