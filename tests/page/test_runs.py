"""Test the page at / in Chromium, on a scripted verifier.

It types, streams, stops and compares; errors, keys and the operator's view are tested too.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from foretoken.config import build
from gateway.access.key_file import entry_text
from gateway.config import GatewaySettings
from protos import common_pb2, verifier_pb2
from tests.gateway.conftest import Stack
from tests.gateway.scripted_verifier import ABORT, LENGTH, STOP, Player, ScriptedVerifier, steps
from tests.page.conftest import DESKTOP, PHONE, Opened

pytestmark = [pytest.mark.anyio, pytest.mark.page]
SECRET, OPERATOR = "alice's secret", "an operator's key"
STATS = common_pb2.SpeculationStats(
    num_decode_steps=4, num_spec_steps=4, num_draft_tokens=10, num_accepted_tokens=6, drafter="ngram"
)
TEXT = "def add(first, second):\n    return first + second"


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


async def test_a_typed_prompt_streams_in_colours(stack: Stack, opened: Opened) -> None:
    page = opened.page
    stack.verifier.script = drafted(stack)
    await page.uncheck("#compare")
    await page.fill("#prompt", "hello world")
    await page.press("#prompt", "Control+Enter")
    await page.wait_for_selector(".panel .row p:has-text('done')")
    assert await page.locator(".output").text_content() == TEXT
    (sequence,) = stack.verifier.submitted
    assert list(sequence.prompt_token_ids) == stack.ids("hello world")
    coloured = "".join(await page.locator(".output .d0").all_text_contents())
    ids = stack.ids(TEXT)
    sources = [
        0,
        *(source for start in range(1, len(ids), 4) for source in [1] * (len(ids[start : start + 4]) - 1) + [0]),
    ]
    wanted = "".join(stack.tokenizer.token_text(i)[0] for i, source in zip(ids, sources, strict=True) if source)
    assert coloured == wanted and 0 < len(wanted) < len(TEXT)
    figures = await text_of(opened, ".figures")
    assert "60 % of 10" in figures and "tokens a step" in figures
    assert "ngram" in await text_of(opened, "#legend")
    assert "Done" in await text_of(opened, "#status")


async def test_a_drafter_has_one_colour_however_its_verifier_numbers_it(stack: Stack, opened: Opened) -> None:
    """The verifier starts again, with other numbers, between two runs."""
    page = opened.page
    await page.uncheck("#compare")
    ids = stack.ids("hello world stop")
    colours: dict[str, set[str]] = {"ngram": set(), "eagle3": set()}
    for names in (("ngram", "eagle3"), ("eagle3", "ngram")):
        del stack.verifier.info.drafters[:]
        for name in names:
            stack.verifier.info.drafters.add(name=name, state="attached")
        numbers = [0, *(names.index(name) + 1 for name in ["eagle3"] + ["ngram"] * (len(ids) - 2))]

        async def play(player: Player, numbers: list[int] = numbers) -> None:
            player.tokens(ids, sources=numbers)
            player.finish()

        stack.verifier.script = play
        # The gateway learns of the new verifier, as it does when its session breaks.
        assert (await stack.http.get("/version")).status_code == 200
        await page.wait_for_selector("#legend:has-text('eagle3')")
        await page.click("#run")
        await page.wait_for_selector(".panel .row p:has-text('done')")
        texts = [stack.tokenizer.token_text(token)[0] for token in ids]
        for name, wanted in (("eagle3", texts[1:2]), ("ngram", texts[2:])):
            legend = page.locator(f"#legend li:has-text('{name}') .token")
            (colour,) = set(str(await legend.get_attribute("class")).split()) - {"token"}
            shown = await page.locator(f".output .{colour}").all_text_contents()
            assert "".join(shown) == "".join(wanted) != ""
            colours[name].add(colour)
    assert [len(found) for found in colours.values()] == [1, 1]


async def test_both_runs_stand_side_by_side_with_the_same_text(stack: Stack, opened: Opened) -> None:
    page = opened.page
    stack.verifier.script = drafted(stack)
    await page.click("#run")
    verdict = await page.wait_for_selector(".verdict.same")
    count = len(stack.ids(TEXT))
    assert f"all {count} tokens are equal" in await verdict.inner_text()
    assert await page.locator(".output").all_text_contents() == [TEXT, TEXT]
    boxes = [await page.locator(".panel").nth(number).bounding_box() for number in range(2)]
    assert boxes[0] and boxes[1] and boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] < boxes[1]["x"]
    ours, plain = stack.verifier.submitted
    assert (ours.speculation.enabled, plain.speculation.enabled) == (True, False)
    assert ours.sampling.seed == plain.sampling.seed and ours.cache_salt != plain.cache_salt


async def test_a_text_that_differs_is_shown_as_such(stack: Stack, opened: Opened) -> None:
    async def play(player: Player) -> None:
        await steps(stack.ids("hello"), stack.ids(" world" if player.sequence.speculation.enabled else " stop"))(player)

    stack.verifier.script = play
    await opened.page.click("#run")
    verdict = await opened.page.wait_for_selector(".verdict:visible")
    assert f"differ from token {len(stack.ids('hello')) + 1} on" in await verdict.inner_text()
    assert await opened.page.locator(".verdict.same").count() == 0


async def test_a_models_text_never_becomes_html(stack: Stack, opened: Opened) -> None:
    hostile = '<img src=x onerror="document.title=1"><script>document.title=1</script>&lt;b&gt;'
    stack.verifier.script = drafted(stack, hostile)
    await opened.page.click("#run")
    await opened.page.wait_for_selector(".verdict.same")
    assert await opened.page.locator(".output").all_text_contents() == [hostile, hostile]
    assert await opened.page.locator(".output *:not(span)").count() == 0
    assert await opened.page.title() == "foretoken"


async def notes(opened: Opened) -> list[str]:
    """Return what is said beside each run."""
    return await opened.page.locator(".panel .row p").all_inner_texts()


async def test_each_run_says_how_it_ended(stack: Stack, opened: Opened) -> None:
    page = opened.page
    ids = stack.ids("hello world")
    for reason, ending in ((LENGTH, "done at the length limit"), (STOP, "done")):
        stack.verifier.script = steps(ids, reason=reason)
        await page.click("#run")
        await page.wait_for_selector(".verdict.same")
        assert await notes(opened) == [f"{len(ids)} tokens, {ending}"] * 2
    # The plain run never began.
    never = asyncio.Event()
    stack.verifier.script = lambda player: paused(player, ids, never)
    await page.click("#run")
    await page.wait_for_selector(".output:has-text('hello world')")
    await page.click("#stop")
    await page.wait_for_selector(".panel .row p:has-text('stopped')")
    assert await notes(opened) == [f"{len(ids)} tokens, stopped", "not run"]

    # The drafters' run is over when the plain one is stopped.
    async def only_drafted(player: Player) -> None:
        await (steps(ids)(player) if player.sequence.speculation.enabled else paused(player, ids[:1], never))

    stack.verifier.script = only_drafted
    await page.click("#run")
    await page.wait_for_selector(".panel:nth-child(2) .row p:has-text('1 tokens, running')")
    await page.keyboard.press("Escape")
    await page.wait_for_selector(".panel .row p:has-text('stopped')")
    assert await notes(opened) == [f"{len(ids)} tokens, done at the length limit", "1 tokens, stopped"]


async def test_ctrl_enter_runs_from_anywhere_on_the_tab(stack: Stack, opened: Opened) -> None:
    page = opened.page
    await page.uncheck("#compare")
    for count, place in enumerate(("#max-tokens", "#run", "#drafter", "#tab-completion", "body"), start=1):
        stack.verifier.script = steps(stack.ids(f"run {count}"))
        await (page.evaluate("() => document.activeElement.blur()") if place == "body" else page.focus(place))
        await page.keyboard.press("Control+Enter")
        await page.wait_for_selector(f".output:has-text('run {count}')")
        await page.wait_for_function("() => !document.getElementById('run').disabled")
        assert len(stack.verifier.submitted) == count
    # Neither behind a dialog nor on another tab.
    await page.click("#open-key")
    await page.keyboard.press("Control+Enter")
    await page.keyboard.press("Escape")
    await page.click("#tab-operator")
    await page.keyboard.press("Control+Enter")
    await page.click("#tab-completion")
    assert await page.is_enabled("#run") and len(stack.verifier.submitted) == count


async def test_stop_ends_the_run_and_keeps_the_text(stack: Stack, opened: Opened) -> None:
    never = asyncio.Event()
    stack.verifier.script = lambda player: paused(player, stack.ids("hello world"), never)
    for stop in ("#stop", "Escape"):
        await opened.page.click("#run")
        await opened.page.wait_for_selector(".output:has-text('hello world')")
        assert await opened.page.is_disabled("#run")
        await (opened.page.click(stop) if stop == "#stop" else opened.page.keyboard.press(stop))
        await opened.page.wait_for_selector(".panel .row p:has-text('stopped')")
        assert "hello world" in await text_of(opened, ".output >> nth=0") and await opened.page.is_enabled("#run")
    await stack.verifier.until(lambda: len(stack.verifier.aborts) == 2)


async def test_a_refusal_and_a_failure_are_shown(stack: Stack, opened: Opened) -> None:
    page = opened.page
    await page.uncheck("#compare")
    opened.refused = {400}
    await page.fill("#temperature", "9")
    await page.click("#run")
    alert = page.locator("#alert")
    await alert.wait_for()
    assert "temperature" in await alert.inner_text() and not stack.verifier.submitted
    await page.fill("#temperature", "0")

    may_fail = asyncio.Event()

    async def fail(player: Player) -> None:
        player.tokens(stack.ids("hello"))
        await may_fail.wait()
        player.error(grpc.StatusCode.DEADLINE_EXCEEDED, "the request's deadline has passed")

    stack.verifier.script = fail
    await page.click("#run")
    await page.wait_for_selector(".output:has-text('hello')")
    may_fail.set()
    await page.wait_for_selector("#alert:has-text('deadline')")
    assert "hello" in await text_of(opened, ".output") and await page.is_enabled("#run")
    stack.verifier.script = steps(stack.ids("stop here"))
    await page.click("#run")
    await page.wait_for_selector(".output:has-text('stop here')")
    assert not await alert.is_visible()


async def test_a_drafter_that_dies_while_a_text_streams_is_named(stack: Stack, opened: Opened) -> None:
    may_end = asyncio.Event()
    stack.verifier.script = lambda player: paused(player, stack.ids("hello world"), may_end)
    await opened.page.uncheck("#compare")
    await opened.page.click("#run")
    await opened.page.wait_for_selector(".output:has-text('hello world')")
    stack.verifier.info.drafters[0].state = "broken"
    await opened.page.wait_for_selector("#legend .down:has-text('broken')")
    may_end.set()
    await opened.page.wait_for_selector(".panel .row p:has-text('done')")
    assert await opened.page.locator(".output").text_content() == "hello worldhello world"


async def test_the_drafter_is_chosen_for_each_request(stack: Stack, opened: Opened) -> None:
    page = opened.page
    stack.verifier.script = drafted(stack)
    for choice, enabled in (("ngram", True), ("none", False)):
        await page.select_option("#drafter", choice)
        if await page.is_enabled("#compare"):
            await page.uncheck("#compare")
        await page.click("#run")
        await page.wait_for_selector(".panel .row p:has-text('done')")
        sent = stack.verifier.submitted[-1].speculation
        assert (sent.enabled, sent.drafter if enabled else "") == (enabled, "ngram" if enabled else "")
    assert await page.is_disabled("#compare")


async def test_the_last_draft_tree_is_drawn_on_demand(stack: Stack, opened: Opened) -> None:
    page = opened.page
    root, first, second, other = (stack.ids(word)[0] for word in "abcd")
    tree = verifier_pb2.VerifiedTree(
        token_ids=[root, first, other, second], parents=[-1, 0, 0, 1], sources=[0, 1, 1, 1], accepted=[1, 3]
    )

    async def play(player: Player) -> None:
        player.tokens([root])
        player.tokens([first, second, other], tree=tree if player.sequence.return_trees else None)
        player.finish()

    stack.verifier.script = play
    await page.uncheck("#compare")
    await page.click("#run")
    await page.wait_for_selector(".panel .row p:has-text('done')")
    assert await page.locator("svg").count() == 0
    await page.check("#trees")
    await page.click("#run")
    picture = page.locator(".tree svg")
    await picture.wait_for()
    assert await picture.get_attribute("aria-label") == "Draft tree: 3 drafted tokens, 2 kept: bc"
    assert await page.locator(".tree g.kept text").all_text_contents() == ["a", "b", "c"]
    assert await page.locator(".tree path.kept").count() == 2 and await page.locator(".tree path").count() == 3


async def test_predicted_tokens_have_a_colour_of_their_own(stack: Stack, opened: Opened) -> None:
    page = opened.page
    ids = stack.ids(TEXT)
    stack.verifier.script = steps(ids[:1], ids[1:])
    await page.uncheck("#compare")
    await page.click("summary")
    await page.fill("#prediction", TEXT)
    assert "your prediction" in await text_of(opened, "#legend")
    await page.click("#run")
    await page.wait_for_selector(".panel .row p:has-text('done')")
    predicted = "".join(await page.locator(".output .predicted").all_text_contents())
    assert predicted == "".join(stack.tokenizer.token_text(token)[0] for token in ids[1:-1]) != ""


async def test_a_chat_goes_on_with_what_was_said(stack: Stack, opened: Opened) -> None:
    page = opened.page
    await page.focus("#tab-completion")
    await page.keyboard.press("ArrowRight")
    assert await page.get_attribute("#tab-chat", "aria-selected") == "true"
    await page.uncheck("#compare")
    for said, answer in (("first", "hello"), ("second", "world")):
        stack.verifier.script = steps(stack.ids(answer))
        await page.fill("#prompt", said)
        await page.click("#run")
        await page.wait_for_selector(f".output:has-text('{answer}')")
        await page.wait_for_function("() => !document.getElementById('run').disabled")
    prompt = stack.tokenizer.decode(stack.verifier.submitted[-1].prompt_token_ids)
    for part in ("user: first", "assistant: hello", "user: second"):
        assert part in prompt
    assert await page.locator(".said").all_text_contents() == ["first", "second"]
    await page.click("#clear")
    assert await page.locator(".said").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", ["desktop", "phone"])
class TestAccessibility:
    @pytest.fixture
    def view(self, scheme: str, size: str) -> dict[str, Any]:
        return {"viewport": PHONE if size == "phone" else DESKTOP, "color_scheme": scheme}

    @pytest.fixture
    def settings(self, settings: GatewaySettings, tmp_path: Path) -> GatewaySettings:
        (tmp_path / "operator").write_text(OPERATOR)
        return build(GatewaySettings, settings.model_dump() | {"admin_api_key_file": tmp_path / "operator"})

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


class TestOperatorAtWidths:
    @pytest.fixture
    def settings(self, settings: GatewaySettings, tmp_path: Path) -> GatewaySettings:
        (tmp_path / "operator").write_text(OPERATOR)
        return build(GatewaySettings, settings.model_dump() | {"admin_api_key_file": tmp_path / "operator"})

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
