"""Runs on the page at /, on a scripted verifier: typed, streamed, compared, stopped and failed."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from protos import verifier_pb2
from tests.gateway.conftest import Stack
from tests.gateway.scripted_verifier import LENGTH, STOP, Player, steps
from tests.page.conftest import TEXT, Opened, drafted, paused, text_of

pytestmark = [pytest.mark.anyio, pytest.mark.page]


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
