"""The blocks of pages: each names its language, and commands run or say what they need."""

from __future__ import annotations

import re

import pytest
from fenced_blocks import NEEDS, RUN, Block, blocks, titled

from tests.support.pages import pages

# Words with which a command begins; a block of another language must not hide one.
COMMAND = re.compile(
    r"(\$ |(\.venv/bin/)?foretoken (?!is\b)|(\.venv/bin/)?pip |make |curl |docker |python -m |kubectl )"
)


def test_each_block_names_its_language_and_hides_no_command() -> None:
    found = 0
    for page, text in pages().items():
        for block in blocks(text):
            found += 1
            hidden = [line for line in block.text.splitlines() if COMMAND.match(line)]
            assert block.language in RUN or not hidden, f"{page}:{block.line}: {hidden}"
    assert found > 50


def test_a_block_says_what_it_needs() -> None:
    text = "a\n\n```bash needs=gpu,hub\nmake serve\n```\n\n```text\nb\n```\n"
    assert blocks(text) == [Block(3, "bash", ("gpu", "hub"), "make serve\n"), Block(7, "text", (), "b\n")]
    title = f"needs {NEEDS['gpu']}, {NEEDS['hub']}"
    assert titled(text) == text.replace("bash needs=gpu,hub", f'bash title="{title}"')


@pytest.mark.parametrize(
    ("fence", "fault"),
    [
        ("```", "line 2: the fence has to name one of bash"),
        ("```sh", "line 2: the fence has to name one of bash"),
        ("```bash gpu", "line 2: the fence has to name one of bash"),
        ("```bash needs=gpu,luck", "line 2: luck is not one of cluster"),
    ],
)
def test_other_fences_are_refused(fence: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        blocks(f"a\n{fence}\nmake\n```\n")
