"""The page for axe-core and for the keyboard, on a desktop and on a phone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.config import GatewaySettings
from tests.gateway.conftest import Stack
from tests.page.conftest import DESKTOP, OPERATOR, PHONE, Opened, drafted, with_operator

pytestmark = [pytest.mark.anyio, pytest.mark.page]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", ["desktop", "phone"])
class TestAccessibility:
    @pytest.fixture
    def view(self, scheme: str, size: str) -> dict[str, Any]:
        return {"viewport": PHONE if size == "phone" else DESKTOP, "color_scheme": scheme}

    @pytest.fixture
    def settings(self, settings: GatewaySettings, tmp_path: Path) -> GatewaySettings:
        return with_operator(settings, tmp_path)

    async def test_axe_has_nothing_serious_and_nothing_is_cut_off(self, stack: Stack, opened: Opened) -> None:
        page = opened.page
        stack.verifier.info.drafters.add(name="second", algorithm="EAGLE3", state="broken", reason="nobody listens")
        stack.verifier.script = drafted(stack)

        async def check() -> None:
            assert await opened.violations() == []
            scrolled = await page.evaluate("() => document.documentElement.scrollWidth - window.innerWidth")
            assert scrolled <= 0

        await page.wait_for_selector("#legend .down")
        await check()
        await page.click("summary")
        await page.fill("#prediction", "def")
        await page.check("#trees")
        await page.click("#run")
        await page.wait_for_selector(".verdict.same")
        await check()
        await page.click("#open-key")
        await check()
        await page.keyboard.press("Escape")
        await page.click("#tab-operator")
        await check()
        await page.fill("#operator-key", OPERATOR)
        await page.keyboard.press("Enter")
        await page.wait_for_selector("#requests td:has-text('/v1/completions')")
        await check()
        for table in ("#drafter-table", "#request-table"):
            await self.check_sideways(opened, table)

    async def check_sideways(self, opened: Opened, table: str) -> None:
        """Assert that a table that is wider than the page says so.

        It says so in words, and by a shadow on the side where more is.
        """
        page = opened.page
        region = page.locator(table)
        words = page.locator(f"{table}-hint")

        async def sides() -> tuple[bool, bool]:
            classes = str(await region.get_attribute("class")).split()
            shadow = await region.evaluate("(region) => getComputedStyle(region).boxShadow")
            found = ("more-before" in classes, "more-after" in classes)
            assert (shadow != "none") == any(found)
            return found

        rest = await region.evaluate("(region) => region.scrollWidth - region.clientWidth")
        assert await words.is_visible() == (rest > 1)
        assert await region.get_attribute("aria-describedby") == (f"{table[1:]}-hint" if rest > 1 else None)
        assert await sides() == (False, rest > 1)
        viewport = page.viewport_size
        assert viewport is not None and (rest > 1 or viewport != PHONE)
        if rest > 1:
            # The region is reached by keyboard, and moved by it.
            await region.focus()
            await page.keyboard.press("ArrowRight")
            await page.wait_for_selector(f"{table}.more-before")
            await region.evaluate("(region) => region.scrollTo(region.scrollWidth, 0)")
            await page.wait_for_selector(f"{table}:not(.more-after)")
            assert await sides() == (True, False)


async def test_everything_is_reached_by_keyboard(stack: Stack, opened: Opened) -> None:
    page = opened.page
    stack.verifier.script = drafted(stack)
    await page.keyboard.press("Tab")
    reached = []
    for _ in range(20):
        reached.append(await page.evaluate("() => document.activeElement.id || document.activeElement.className"))
        await page.keyboard.press("Tab")
    order = ["skip", "open-key", "tab-completion", "prompt", "run", "compare", "trees", "drafter", "max-tokens"]
    assert [name for name in reached if name in order][: len(order)] == order
    await page.focus("#run")
    await page.keyboard.press("Enter")
    await page.wait_for_selector(".verdict.same")
    # A long output scrolls by keyboard.
    assert await page.locator(".output").first.get_attribute("tabindex") == "0"
