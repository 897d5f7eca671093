"""A request's trace shows when it had no verifier: before it
began, and after its verifier was lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from gateway.config import GatewaySettings
from gateway.tokenizer import Tokenizer
from tests.gateway.deployment import Deployment, ask, deployment, silent
from tests.gateway.scripted_verifier import steps
from tests.support.collector import ReceivedSpan, collecting

pytestmark = pytest.mark.anyio


async def traced(
    settings: GatewaySettings, tokenizer: Tokenizer, play: Callable[[Deployment], Awaitable[None]]
) -> tuple[ReceivedSpan, list[ReceivedSpan]]:
    """Return the one request's span and its children, in the order in which they ended."""
    with collecting() as collector:
        async with deployment(settings, tokenizer, otlp_traces_endpoint=collector.endpoint) as running:
            await play(running)
        # Leaving the block has sent the rest.
        *children, request = collector.spans(1, "text_completion tiny")
    for child in children:
        assert (child.trace_id, child.parent_id) == (request.trace_id, request.span_id)
        assert request.began_ns <= child.began_ns <= child.ended_ns <= request.ended_ns
    return request, children


async def test_a_lost_verifier_is_a_resume_until_there_are_tokens_again(
    settings: GatewaySettings, tokenizer: Tokenizer
) -> None:
    async def play(running: Deployment) -> None:
        await running.start(silent)
        asked = asyncio.create_task(ask(running))
        await running.until_tokens_come()
        await running.kill()
        await running.until(lambda: running.gateway.verifiers.num_waiting == 1)
        await running.start(steps([67]))
        assert (await asked).status_code == 200

    request, (resume,) = await traced(settings, tokenizer, play)
    assert (resume.name, resume.is_error) == ("resume", False)
    assert request.attributes["foretoken.resumes"] == 1
    assert resume.attributes["foretoken.choice_index"] == 0
    assert resume.attributes["foretoken.verifier"].startswith("unix:/")
    assert resume.attributes["foretoken.reason"]


async def test_a_request_that_finds_no_verifier_shows_its_wait(settings: GatewaySettings, tokenizer: Tokenizer) -> None:
    async def play(running: Deployment) -> None:
        # The gateway knows the model from a verifier that was there before.
        await running.start(silent)
        await running.kill()
        asked = asyncio.create_task(ask(running))
        await running.until(lambda: running.gateway.verifiers.num_waiting == 1)
        await running.start(steps([65, 66]))
        assert (await asked).status_code == 200

    request, (wait,) = await traced(settings, tokenizer, play)
    assert (wait.name, wait.is_error) == ("wait for a verifier", False)
    assert request.attributes["foretoken.resumes"] == 0


async def test_requests_are_served_while_no_collector_listens(
    settings: GatewaySettings, tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As under Compose without what watches: the socket is not there."""
    caplog.set_level(logging.INFO)
    async with deployment(settings, tokenizer, otlp_traces_endpoint=f"unix:{tmp_path}/otlp.sock") as running:
        verifier = await running.start(steps([65, 66]))
        assert (await ask(running)).status_code == 200
        # The verifier still gets a context, of the span that nobody takes.
        assert verifier.submitted[0].traceparent
    assert [record for record in caplog.records if record.name.startswith(("foretoken.span", "opentelemetry"))] == []


async def test_a_resume_that_never_comes_fails_with_the_request(
    settings: GatewaySettings, tokenizer: Tokenizer
) -> None:
    async def play(running: Deployment) -> None:
        await running.start(silent)
        asked = asyncio.create_task(ask(running))
        await running.until(lambda: bool(running.attempts))
        (sequence,) = running.gateway.verifiers._sequences
        sequence.deadline = asyncio.get_running_loop().time()
        await running.kill()
        await asked

    request, (resume,) = await traced(settings, tokenizer, play)
    assert (resume.name, resume.attributes["foretoken.verifier"]) == ("resume", "")
    assert resume.is_error and request.is_error
    assert resume.attributes["error.type"] == request.attributes["error.type"] == "unavailable"
    assert resume.ended_ns == request.ended_ns
