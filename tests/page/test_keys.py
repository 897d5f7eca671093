"""The page asks for keys, a user's and the operator's, and forgets them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foretoken.config import build
from gateway.access.key_file import entry_text
from gateway.config import GatewaySettings
from protos import verifier_pb2
from tests.gateway.conftest import Stack
from tests.gateway.scripted_verifier import ScriptedVerifier
from tests.page.conftest import OPERATOR, Opened, drafted, text_of

pytestmark = [pytest.mark.anyio, pytest.mark.page]
SECRET = "alice's secret"


class TestKeys:
    @pytest.fixture
    def settings(self, settings: GatewaySettings, tmp_path: Path) -> GatewaySettings:
        (tmp_path / "keys.toml").write_text(entry_text("alice", SECRET))
        (tmp_path / "operator").write_text(OPERATOR)
        more = {"api_key_file": tmp_path / "keys.toml", "admin_api_key_file": tmp_path / "operator"}
        return build(GatewaySettings, settings.model_dump() | more)

    @pytest.fixture
    def changes(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Let scripted verifiers attach and detach; return what they were asked to."""
        calls: list[str] = []

        async def attach(verifier: ScriptedVerifier, request: Any, context: Any) -> verifier_pb2.AttachDrafterResponse:
            calls.append(f"+{request.name} {request.address} {request.transport}")
            drafter = verifier.info.drafters.add(name=request.name, address=request.address, state="connecting")
            return verifier_pb2.AttachDrafterResponse(drafter=drafter)

        async def detach(verifier: ScriptedVerifier, request: Any, context: Any) -> verifier_pb2.DetachDrafterResponse:
            calls.append(f"-{request.name}")
            next(drafter for drafter in verifier.info.drafters if drafter.name == request.name).state = "detached"
            return verifier_pb2.DetachDrafterResponse()

        monkeypatch.setattr(ScriptedVerifier, "AttachDrafter", attach)
        monkeypatch.setattr(ScriptedVerifier, "DetachDrafter", detach)
        return calls

    async def test_the_page_asks_for_a_key_and_forgets_it_with_the_tab(self, stack: Stack, opened: Opened) -> None:
        page = opened.page
        opened.refused = {401}
        stack.verifier.script = drafted(stack)
        dialog = page.locator("dialog[open]")
        await dialog.wait_for()
        asked = await dialog.inner_text()
        assert "This server needs a key." in asked and "Paste the key" in asked
        # Headers are for programs.
        shown = asked + await text_of(opened, "#server")
        assert "Bearer" not in shown and "x-api-key" not in shown
        await page.fill("#key", "wrong")
        await page.keyboard.press("Enter")
        # A narrow header cuts the reason off, so the dialog has it too.
        await page.wait_for_selector("dialog[open] #key-reason:has-text('not one of this server')")
        await page.fill("#key", SECRET)
        await page.keyboard.press("Enter")
        await page.wait_for_selector("#server:has-text('tiny')")
        await page.click("#run")
        await page.wait_for_selector(".verdict.same")
        kept = "() => [JSON.stringify(localStorage), document.cookie, Object.values(sessionStorage).join()]"
        assert await page.evaluate(kept) == ["{}", "", SECRET]
        assert SECRET not in page.url
        other = await page.context.new_page()
        await other.goto(stack.url)
        await other.wait_for_selector("dialog[open]")

    async def test_the_operator_attaches_and_detaches(self, changes: list[str], stack: Stack, opened: Opened) -> None:
        page = opened.page
        opened.refused = {401, 403}
        await page.locator("dialog[open]").wait_for()
        await page.keyboard.press("Escape")
        await page.click("#tab-operator")
        await page.fill("#operator-key", SECRET)
        await page.keyboard.press("Enter")
        await page.wait_for_selector("#operator-alert:has-text('not the operator')")
        assert not await page.is_visible("#operator-view")
        await page.fill("#operator-key", OPERATOR)
        await page.keyboard.press("Enter")
        await page.wait_for_selector("#drafters .state-attached")
        load = await text_of(opened, "#load")
        assert "60 %" in load and "3" in load
        await page.fill("#attach-name", "late")
        await page.fill("#attach-address", "unix:/run/late")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("#drafters tr:has-text('late') .state-connecting")
        await page.click("[aria-label='Detach late']")
        await page.wait_for_selector("#drafters tr:has-text('late') .state-detached")
        assert changes == ["+late unix:/run/late auto", "-late"]
        opened.refused |= {400}
        await page.fill("#attach-name", "a bad name")
        await page.fill("#attach-address", "unix:/run/late")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("#operator-alert:has-text('name')")
        async with page.expect_response("**/v1/activity"):
            pass
        async with page.expect_response("**/v1/activity"):
            # The answer before this one has been drawn.
            assert await page.is_visible("#operator-alert"), "it stays until the next action"
        await page.fill("#attach-name", "later")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("#operator-alert", state="hidden")
        await page.click("#forget")
        assert await page.evaluate("() => sessionStorage.length") == 0
        assert not await page.is_visible("#operator-view")


async def test_without_an_operator_the_tab_says_so(stack: Stack, opened: Opened) -> None:
    opened.refused = {404}
    await opened.page.click("#tab-operator")
    await opened.page.fill("#operator-key", OPERATOR)
    await opened.page.keyboard.press("Enter")
    await opened.page.wait_for_selector("#operator-alert:has-text('--admin-api-key-file')")
