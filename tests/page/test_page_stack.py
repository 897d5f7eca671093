"""The page of a whole stack: a drafter is killed while the
page streams, and the text stays the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import checkpoint
from tests.integration.stack import LONG, OUTSIDE, Stack, running
from tests.page.conftest import ROOT, arguments, chromium

__all__ = ["checkpoint"]
pytestmark = pytest.mark.page


@pytest.fixture(scope="module")
def stack(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(checkpoint, tmp_path_factory.mktemp("served") / "log", *OUTSIDE) as stack:
        yield stack


def test_a_killed_drafter_changes_nothing_but_the_speed(stack: Stack) -> None:
    from playwright.sync_api import sync_playwright

    complaints: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=arguments())
        page = browser.new_page()
        page.add_init_script(path=ROOT / os.environ["AXE"])
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(stack.url)
        page.wait_for_selector("#legend:has-text('ngram')")
        page.fill("#prompt", LONG["prompt"])
        page.fill("#max-tokens", str(LONG["max_tokens"]))
        page.click("#run")
        page.wait_for_selector(".output .d0", state="attached")
        drafter = stack.service("drafter")
        drafter.kill()
        assert page.is_disabled("#run"), "the text was complete before the drafter died"
        page.wait_for_selector(".verdict.same", timeout=300_000)
        assert stack.service("drafter").pid != drafter.pid
        texts = page.locator(".output").all_text_contents()
        assert texts[0] == texts[1] and len(texts[0]) > 1000
        page.click("#tab-operator")
        assert page.evaluate("async () => (await axe.run()).violations.length") == 0
        browser.close()
    assert complaints == []
