"""The operator's view of drafters and requests."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.config import GatewaySettings
from tests.gateway.conftest import Stack
from tests.page.conftest import OPERATOR, Opened, paused, with_operator

pytestmark = [pytest.mark.anyio, pytest.mark.page]


class TestOperatorAtWidths:
    @pytest.fixture
    def settings(self, settings: GatewaySettings, tmp_path: Path) -> GatewaySettings:
        return with_operator(settings, tmp_path)

    async def open_tab(self, opened: Opened) -> None:
        await opened.page.click("#tab-operator")
        await opened.page.fill("#operator-key", OPERATOR)
        await opened.page.keyboard.press("Enter")
        await opened.page.wait_for_selector("#drafters .state-attached")

    async def test_long_addresses_need_no_scrolling_and_detach_is_in_sight(self, stack: Stack, opened: Opened) -> None:
        page = opened.page
        address = "unix:/home/someone/.cache/foretoken/run/0123456789abcdef/drafters/second-drafter.sock"
        stack.verifier.info.drafters.add(name="second", algorithm="EAGLE3", state="attached", address=address)
        # The gateway learns of it.
        assert (await stack.http.get("/version")).status_code == 200
        await self.open_tab(opened)
        cell = page.locator("#drafters tr:has-text('second') .address").first
        await cell.wait_for()
        assert await cell.text_content() == address
        region = page.locator("#drafter-table")
        assert await region.evaluate("(region) => region.scrollWidth - region.clientWidth") <= 1
        await page.set_viewport_size({"width": 375, "height": 740})
        box = await page.locator("[aria-label='Detach second']").bounding_box()
        around = await region.bounding_box()
        assert box and around and box["x"] + box["width"] <= around["x"] + around["width"] <= 375
        assert await opened.violations() == []

    async def test_an_error_stands_apart_from_the_tabs(self, opened: Opened) -> None:
        opened.refused = {401, 403}
        page = opened.page
        await page.click("#tab-operator")
        await page.fill("#operator-key", "wrong")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("#operator-alert:visible")
        tabs = await page.locator("[role=tablist]").bounding_box()
        alert = await page.locator("#operator-alert").bounding_box()
        assert tabs and alert and alert["y"] - (tabs["y"] + tabs["height"]) >= 8

    async def test_a_stopped_request_is_no_failure(self, stack: Stack, opened: Opened) -> None:
        page = opened.page
        never = asyncio.Event()
        stack.verifier.script = lambda player: paused(player, stack.ids("hello world"), never)
        await page.click("#run")
        await page.wait_for_selector(".output:has-text('hello world')")
        await page.click("#stop")
        await self.open_tab(opened)
        outcome = page.locator("#requests td span:text-is('cancelled')").first
        await outcome.wait_for()
        assert not await outcome.get_attribute("class")
