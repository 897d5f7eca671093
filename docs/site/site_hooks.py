"""Hooks of MkDocs: pages and files from outside of docs/, links that suit
the site, the REST API's page, llms.txt.

The pages are written for the repository: their links lead to files. Here each link to a page of the
site stays one, and any other file that a page links becomes a page of its own. For language models
all pages are there as Markdown: llms.txt lists them, llms-full.txt is all of them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fenced_blocks import titled
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure import StructureItem
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page
from site_links import IMAGES, PAGES, ROOT, linked, repository_path, search_options, site_uri, suited

REST = "rest-api.md"
# Where ``make serve`` answers.
USUAL_ADDRESS = "http://127.0.0.1:8000"
HIGHLIGHTED = {".json": "json", ".proto": "protobuf", ".py": "python", ".toml": "toml", ".yaml": "yaml"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put all decision records into the navigation."""
    records = sorted(path.name for path in (ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    for section in config.nav or ():
        for entries in section.values():
            if isinstance(entries, list):
                for entry in entries:
                    if isinstance(entry, dict) and entry.get("Decisions"):
                        entry["Decisions"] += [f"decisions/{name}" for name in records]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the repository's other pages, what all pages link, and the REST API."""
    for path, uri in PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    pages = {repository_path(file.src_uri): file.content_string for file in files.documentation_pages()}
    while pages:
        new = {target for page, text in pages.items() for target in linked(page, text)}
        sources = {target: _source(config, target) for target in new if site_uri(target) not in files.src_uris}
        for file in sources.values():
            files.append(file)
        pages = {target: file.content_string for target, file in sources.items() if target.endswith(".md")}
    for name, content in _rest(config).items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to the site's pages, say what blocks need, and how a search ranks the page."""
    here = page.file.src_uri
    path = repository_path(here)
    page.meta["search"] = search_options(here)
    if not (ROOT / path).exists():
        return markdown
    # The first page is alone in its section; wide tables want the room
    # of an empty table of contents.
    empty = {"navigation": here == "index.md", "toc": "\n## " not in markdown}
    page.meta["hide"] = [part for part, is_empty in empty.items() if is_empty]
    return titled(suited(path, markdown))


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Keep the navigation, whose order llms.txt has."""
    config.extra["sections"] = [
        (item.title, [item] if isinstance(item, Page) else list(_pages_of(item))) for item in nav.items
    ]
    return nav


def on_post_build(config: MkDocsConfig) -> None:
    """Write each page as Markdown beside its HTML, llms.txt and llms-full.txt."""
    folder, base = Path(config.site_dir), config.site_url or ""
    index, everything = [f"# {config.site_name}", "", f"> {config.site_description}"], []
    for title, pages in config.extra["sections"]:
        index += ["", f"## {title}", ""]
        for page in pages:
            (folder / page.file.src_uri).write_text(page.markdown, encoding="utf-8")
            index.append(f"- [{page.title}]({base}{page.file.src_uri})")
            everything.append(page.markdown.strip())
    (folder / "llms.txt").write_text("\n".join(index) + "\n", encoding="utf-8")
    (folder / "llms-full.txt").write_text("\n\n---\n\n".join(everything) + "\n", encoding="utf-8")


def _pages_of(section: StructureItem) -> Iterator[Page]:
    """Yield the pages of a section and of the sections in it."""
    for child in section.children or ():
        if isinstance(child, Page):
            yield child
        else:
            yield from _pages_of(child)


def _source(config: MkDocsConfig, path: str) -> File:
    """Return a page that shows a file, or lists a folder; pages and images as they are."""
    file = ROOT / path
    if path.endswith((".md", *IMAGES)):
        return File.generated(config, site_uri(path), abs_src_path=str(file))
    if file.is_dir():
        names = sorted(entry.name + "/" * entry.is_dir() for entry in file.iterdir() if entry.name[0] not in "._")
        text = "\n".join(f"- `{name}`" for name in names)
    else:
        text = f"````{HIGHLIGHTED.get(file.suffix, 'text')}\n{file.read_text(encoding='utf-8')}````"
    return File.generated(config, site_uri(path), content=f"# {path}\n\n{text}\n")


def _rest(config: MkDocsConfig) -> dict[str, str]:
    """Return the REST API's page, its OpenAPI document, and the document as the server shows it."""
    from gateway.openapi.page import page

    document = asyncio.run(_document())
    lines = [
        "# REST",
        "",
        "All calls, with their fields and answers: [as a running server shows them at `/docs`](openapi.html); as a",
        "document for programs: [openapi.json](openapi.json). [The APIs](apis.md) explains them.",
        "",
        "| call | what it does |",
        "| --- | --- |",
    ]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            first = operation["description"].partition("\n\n")[0].replace("\n", " ")
            lines.append(f"| `{method.upper()} {path}` | {first} |")
    return {
        REST: "\n".join(lines) + "\n",
        "openapi.json": json.dumps(document, indent=1),
        "openapi.html": page(document, USUAL_ADDRESS),
    }


async def _document() -> dict[str, Any]:
    """Return the OpenAPI document of a gateway of the demo model with all calls.

    It needs no verifier.
    """
    from gateway.app import create_app
    from gateway.assembly import assembled
    from gateway.config import GatewaySettings
    from gateway.discovery.fixed_list import FixedList

    demo = ROOT / "models/demo/target"
    settings = GatewaySettings(model=demo, served_model_names=("foretoken-demo",), verifiers=("unix:/none",))
    async with assembled(settings, FixedList(())) as parts:
        # Calls of the operator are there only with a key.
        parts.core.admin_key = "shown"
        return create_app(parts.core).openapi()
