"""Fixtures: Chromium, and the page of a real gateway in it; scripts of its verifier.

The page may write nothing to the console.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from foretoken.config import build
from gateway.config import GatewaySettings
from protos import common_pb2
from tests.gateway.conftest import Stack, model_folder, settings, stack, tokenizer
from tests.gateway.scripted_verifier import ABORT, Player, steps

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

__all__ = ["model_folder", "settings", "stack", "tokenizer"]
ROOT = Path(__file__).parents[2]
DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 360, "height": 740}
OPERATOR = "an operator's key"
STATS = common_pb2.SpeculationStats(
    num_decode_steps=4, num_spec_steps=4, num_draft_tokens=10, num_accepted_tokens=6, drafter="ngram"
)
TEXT = "def add(first, second):\n    return first + second"
# Of the console: what a refused call leaves there by itself, whatever the page makes of it.
REFUSED = "Failed to load resource: the server responded with a status of {status}"


class Opened:
    """The page, open in a browser.

    ``refused``: statuses of calls that the test expects to be refused.
    """

    def __init__(self, page: Page) -> None:
        self.page = page
        self.refused: set[int] = set()
        self._messages: list[str] = []
        page.on("console", lambda message: self._messages.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self._messages.append(f"uncaught: {error}"))

    @property
    def complaints(self) -> list[str]:
        """What stands in the console but for expected refusals."""
        expected = [REFUSED.format(status=status) for status in self.refused]
        return [text for text in self._messages if not any(part in text for part in expected)]

    async def violations(self) -> list[str]:
        """Return axe-core's serious and critical findings."""
        found: dict[str, Any] = await self.page.evaluate("() => axe.run()")
        assert found["passes"], "axe-core checked nothing"
        return [
            f"{rule['id']}: {node['html']} {node['failureSummary']}"
            for rule in found["violations"]
            if rule["impact"] in ("serious", "critical")
            for node in rule["nodes"]
        ]


def chromium() -> str | None:
    """Return the path of the system's Chromium; None for Playwright's own."""
    return shutil.which("chromium")


def arguments() -> list[str]:
    """Return Chromium's flags: root, as in containers, cannot use its sandbox."""
    return ["--no-sandbox"] if os.geteuid() == 0 else []


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium(), args=arguments())
        yield browser
        await browser.close()


@pytest.fixture
def view() -> dict[str, Any]:
    """Return the options of the browser's context."""
    return {"viewport": DESKTOP}


@pytest.fixture
async def opened(browser: Browser, stack: Stack, view: dict[str, Any]) -> AsyncIterator[Opened]:
    """Open the page of the scripted verifier's gateway."""
    context = await browser.new_context(**view)
    # As a page's own script it would violate the policy.
    await context.add_init_script(path=ROOT / os.environ["AXE"])
    opened = Opened(await context.new_page())
    await opened.page.goto(stack.url)
    await opened.page.wait_for_selector("#server:not(:text-is('connecting'))")
    yield opened
    await context.close()
    assert opened.complaints == []


def with_operator(settings: GatewaySettings, folder: Path) -> GatewaySettings:
    """Return the settings of a gateway that knows the operator's key."""
    (folder / "operator").write_text(OPERATOR)
    return build(GatewaySettings, settings.model_dump() | {"admin_api_key_file": folder / "operator"})


def drafted(stack: Stack, text: str = TEXT) -> Any:
    """Return a script of steps of four tokens, three of
    them drafts, or of one for a plain request.
    """
    ids = stack.ids(text)
    parts = [ids[:1], *(ids[start : start + 4] for start in range(1, len(ids), 4))]

    async def play(player: Player) -> None:
        if player.sequence.speculation.enabled:
            await steps(*parts, stats=STATS)(player)
        else:
            await steps(*([token] for token in ids))(player)

    return play


async def paused(player: Player, first: list[int], may_end: asyncio.Event) -> None:
    """Play some tokens, and end when the test says so, or the client."""
    player.tokens(first)
    waits = [asyncio.create_task(event.wait()) for event in (may_end, player.aborted)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    if player.aborted.is_set():
        player.finish(ABORT)
    else:
        await steps(first)(player)


async def text_of(opened: Opened, selector: str) -> str:
    return await opened.page.locator(selector).inner_text()
