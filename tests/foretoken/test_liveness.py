"""Liveness says when a loop last turned: while it turns, while it is held up, with no answer."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path

import pytest

from foretoken import liveness

# Ends a test that hangs; no answer takes so long.
PATIENCE_S = 600.0


def ask(path: Path) -> float | None:
    """Ask from a thread without a loop of its own."""
    return asyncio.run(liveness.last_turn(path, PATIENCE_S))


def test_a_free_loop_turns_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "TURN_S", 0.001)
    path = tmp_path / "s"

    async def scenario() -> None:
        with liveness.answering(path):
            first = await liveness.last_turn(path, PATIENCE_S)
            assert first is not None
            while await liveness.last_turn(path, PATIENCE_S) == first:
                await asyncio.sleep(0)
        assert not path.exists()

    asyncio.run(scenario())


def test_a_loop_that_is_held_up_is_answered_for(tmp_path: Path) -> None:
    path = tmp_path / "s"

    async def scenario() -> None:
        answers: list[float | None] = []
        with liveness.answering(path):
            asking = threading.Thread(target=lambda: answers.extend(ask(path) for _ in range(5)))
            asking.start()
            # The loop does not turn before all has been answered.
            asking.join()
        assert len(answers) == 5 and len(set(answers)) == 1 and answers[0] is not None

    asyncio.run(scenario())


def test_who_goes_away_before_the_answer_does_not_end_the_answers(tmp_path: Path) -> None:
    path = tmp_path / "s"

    async def scenario() -> None:
        with liveness.answering(path):
            for name in (None, ""):
                # Without a name to answer to, and with one that is gone.
                with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asker:
                    if name is not None:
                        asker.bind(name)
                    asker.sendto(b"?", str(path))
                assert await liveness.last_turn(path, PATIENCE_S) is not None

    asyncio.run(scenario())


def test_nobody_there_is_no_answer_and_a_socket_that_was_left_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "s"

    async def scenario() -> None:
        assert await liveness.last_turn(path, PATIENCE_S) is None
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as left:
            left.bind(str(path))
            # There, as a stopped process is, and silent.
            assert await liveness.last_turn(path, 0.01) is None
        assert await liveness.last_turn(path, PATIENCE_S) is None
        with liveness.answering(path):
            assert await liveness.last_turn(path, PATIENCE_S) is not None

    asyncio.run(scenario())
