"""The site: its links lead to its own pages, and its pictures are drawn from what is committed."""

from __future__ import annotations

import pytest
import site_pictures
from site_links import HISTORY_BOOST, linked, repository_path, search_options, site_uri, suited

from tests.support.pages import ROOT


@pytest.mark.parametrize(
    ("page", "link", "on_the_site"),
    [
        ("README.md", "[the chart](docs/kubernetes.md#gpus)", "[the chart](kubernetes.md#gpus)"),
        ("README.md", "![a](docs/images/page.png)", "![a](images/page.png)"),
        ("README.md", "[docs/gpu.md](docs/gpu.md)", "[On a GPU](gpu.md)"),
        ("docs/gpu.md", "[gpu.md](gpu.md#mps)", "[On a GPU](gpu.md#mps)"),
        ("docs/gpu.md", "[below](#mps)", "[below](#mps)"),
        ("docs/gpu.md", "[a](../SECURITY.md)", "[a](security.md)"),
        ("docs/gpu.md", "[`LICENSE`](../LICENSE)", "[`LICENSE`](source/LICENSE.md)"),
        ("docs/gpu.md", "[a](../examples)", "[a](source/examples.md)"),
        ("docs/gpu.md", "![a](../models/demo/loss.png)", "![a](source/models/demo/loss.png)"),
        ("docs/decisions/README.md", "[a](../gpu.md)", "[a](../gpu.md)"),
        ("docs/decisions/README.md", "[a](../../README.md#ask)", "[a](../index.md#ask)"),
        ("models/demo/README.md", "[a](corpus.md)", "[a](source/models/demo/corpus.md)"),
        ("README.md", "[a](https://example.org/b.md)", "[a](https://example.org/b.md)"),
        ("README.md", "`[a](b.md)`", "`[a](b.md)`"),
        ("README.md", "```text\n[a](b.md)\n```\n", "```text\n[a](b.md)\n```\n"),
        ("README.md", r"| `a\|b` | c\|d[e][f] |", r"| `a|b` | c\|d[e]\[f] |"),
    ],
)
def test_links_lead_to_pages_of_the_site(page: str, link: str, on_the_site: str) -> None:
    assert suited(page, link) == on_the_site


@pytest.mark.parametrize(
    ("page", "options"),
    [
        ("docs/decisions/0006-new-requests-wait.md", {"boost": HISTORY_BOOST}),
        ("CHANGELOG.md", {"boost": HISTORY_BOOST}),
        ("docs/changelog-gateway.md", {"boost": HISTORY_BOOST}),
        ("docs/tune.md", {}),
        ("README.md", {}),
        ("examples/openai_stream.py", {"exclude": True}),
    ],
)
def test_a_search_ranks_guides_before_records(page: str, options: dict[str, object]) -> None:
    assert search_options(site_uri(page)) == options and HISTORY_BOOST < 1


def test_a_link_to_no_file_is_an_error() -> None:
    for target in ("none.md", "../none.md", "../../elsewhere"):
        with pytest.raises(ValueError, match="no such file"):
            suited("docs/gpu.md", f"[a]({target})")
        with pytest.raises(ValueError, match="no such file"):
            list(linked("docs/gpu.md", f"[`a`]({target})"))


def test_a_page_of_the_site_comes_from_one_file() -> None:
    for path in ("README.md", "docs/gpu.md", "docs/decisions/README.md", "models/demo/corpus.md"):
        assert repository_path(site_uri(path)) == path


def test_pictures_are_those_that_the_command_draws() -> None:
    """If this fails: make docs."""
    for name, text in site_pictures.pictures().items():
        assert (ROOT / "docs" / "images" / name).read_text(encoding="utf-8") == text, name


def test_a_trees_accepted_path_runs_straight() -> None:
    tree = site_pictures.read_tree(
        {"token_texts": list("abcd"), "parents": [-1, 0, 0, 2], "accepted": [2, 3], "added": "e"}
    )
    assert site_pictures.lanes_of(tree) == {0: 0, 2: 0, 3: 0, 1: 1}
    assert "2 accepted, and one that the target adds: 3 tokens in one step" in site_pictures.draft_tree(tree)
