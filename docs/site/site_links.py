"""Lead the links of the repository's pages to where the site has what they link."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from fenced_blocks import FENCE

ROOT = Path(__file__).parents[2]
DOCS = "docs/"
# Pages from elsewhere in the repository, and where the site has them.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/gpu/README.md": "gpu-benchmarks.md",
    "benchmarks/gpu/servers.md": "gpu-server-benchmarks.md",
    "kernels/README.md": "kernels.md",
    "models/demo/README.md": "demo-model.md",
}
# Where other files are that a page links.
SOURCE = "source/"
# Pages that tell why and when; a search shows those first that say how. The share of
# their score that they keep is so small because a word of a title counts a thousand
# times as much as one of a text.
HISTORY = ("decisions/", "changelog")
HISTORY_BOOST = 0.001
LINK = re.compile(r"\[(?P<words>[^\]]*)\]\((?P<target>[^)\s]+)\)")
TITLE = re.compile(r"^# (.+)", re.MULTILINE)
CODE = re.compile(r"`[^`\n]+`")
IMAGES = (".png", ".svg")


def repository_path(uri: str) -> str:
    """Return the path in the repository of a page of the site."""
    if uri.startswith(SOURCE):
        return uri.removeprefix(SOURCE)
    outside = {site: path for path, site in PAGES.items()}
    return outside.get(uri, DOCS + uri)


def site_uri(path: str) -> str:
    """Return where the site has a file of the repository."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith(DOCS) and not path.startswith("docs/site/"):
        return path.removeprefix(DOCS)
    return SOURCE + (path if path.endswith((".md", *IMAGES)) else f"{path}.md")


def search_options(uri: str) -> dict[str, bool | float]:
    """Return what Material's search is to do with a page of
    the site, as its front matter would say.
    """
    if uri.startswith(SOURCE):
        # Files of the repository are not what a search is for.
        return {"exclude": True}
    return {"boost": HISTORY_BOOST} if uri.startswith(HISTORY) else {}


def linked(page: str, text: str) -> Iterator[str]:
    """Yield the files and folders of the repository that a page links.

    Raises ValueError if one is not there.
    """
    for _, target in LINK.findall(CODE.sub("", FENCE.sub("", text))):
        if (found := _target(page, target)) is not None:
            yield found[0]


def suited(page: str, text: str) -> str:
    """Return a page's text with its links as the site's page needs them.

    Raises ValueError as ``linked`` does.
    """
    here = site_uri(page)
    # "[a][b]" is text, as in a flag's values; a plugin would look for a heading called b.
    return _outside_code(
        text, lambda part: LINK.sub(lambda found: _link(page, here, found), part.replace("][", "]\\["))
    )


def _target(page: str, target: str) -> tuple[str, str] | None:
    """Return the file that a link of a page leads to, and its anchor.

    None means that it is no file of the repository.

    Raises ValueError if there is no such file.
    """
    name, _, anchor = target.partition("#")
    if not name or re.match(r"[a-z]+:", name):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), name))
    if path.startswith("..") or not (ROOT / path).exists():
        raise ValueError(f"{page}: link to {target}: no such file")
    return path, anchor


def _link(page: str, here: str, link: re.Match[str]) -> str:
    """Return a link of a page as the site's page needs it.

    Readers of the site know titles, not files.
    """
    found = _target(page, link["target"])
    if found is None:
        return link[0]
    path, anchor = found
    uri = posixpath.relpath(site_uri(path), posixpath.dirname(here) or ".")
    words = link["words"]
    if path.endswith(".md") and words in (path, posixpath.basename(path)):
        title = TITLE.search((ROOT / path).read_text(encoding="utf-8"))
        words = title[1] if title else words
    return f"[{words}]({uri}#{anchor})" if anchor else f"[{words}]({uri})"


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    """Return the text with everything but blocks and inline code changed."""
    kept: list[str] = []

    def put_away(found: re.Match[str]) -> str:
        # In a table of the repository's host, a pipe in code needs a backslash.
        kept.append(found[0] if found["block"] else found[0].replace(r"\|", "|"))
        return f"\0{len(kept) - 1}\0"

    code = re.compile(f"(?ms)(?P<block>{FENCE.pattern})|{CODE.pattern}")
    return re.sub("\0(\\d+)\0", lambda found: kept[int(found[1])], change(code.sub(put_away, text)))
