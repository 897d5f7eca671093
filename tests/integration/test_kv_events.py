"""``foretoken serve --kv-events``: who follows the events
knows the prefixes that the verifier holds.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import httpx
import pytest

from foretoken.free_ports import free_ports
from tests.integration.stack import running, wait_until
from tests.support.kv_subscriber import Subscriber

pytestmark = pytest.mark.slow


def test_a_subscriber_follows_requests_a_flush_and_a_restart(checkpoint: Path, tmp_path: Path) -> None:
    events, replay = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
    key = tmp_path / "admin"
    key.write_text("an operator's key of this test")
    key.chmod(0o600)
    flags = ("--kv-events", events, "--kv-events-replay", replay, "--admin-api-key-file", str(key))
    with contextlib.ExitStack() as cleanup:
        stack = cleanup.enter_context(running(checkpoint, tmp_path / "log", *flags))
        http = cleanup.enter_context(httpx.Client(base_url=stack.url, trust_env=False, timeout=None))
        subscriber = Subscriber(events, replay)
        cleanup.callback(subscriber.close)

        def ask(prompt: list[int], salt: str | None = None) -> int:
            """Return how many prompt tokens the verifier found in its cache."""
            body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "cache_salt": salt}
            return http.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        def holds(num_blocks: int, follower: Subscriber = subscriber) -> bool:
            """Return whether so many are known.

            An event may be published after its request's answer.
            """
            follower.catch_up()
            return len(follower.index.contents) == num_blocks

        prompt = [1 + number % 50 for number in range(70)]
        assert ask(prompt) == 0
        wait_until(lambda: holds(4), stack)
        assert subscriber.replay(0)[0].topic == f"kv@{os.uname().nodename}@tiny"
        # What the subscriber predicts is what the verifier then finds.
        for tokens, salt in ((prompt[:40], None), (prompt[:40], "tenant"), ([9, *prompt[1:]], None)):
            predicted = subscriber.index.num_found(tokens[:-1], salt) * subscriber.index.block_size
            assert ask(tokens, salt) == predicted
        wait_until(lambda: holds(4 + 2 + 4), stack)
        assert subscriber.index.num_found(prompt[:40], "tenant") == 2
        assert http.post("/flush_cache", headers={"Authorization": f"Bearer {key.read_text()}"}).status_code == 200
        wait_until(lambda: holds(0), stack)
        ask(prompt)
        wait_until(lambda: holds(4), stack)
        # A new process begins at 0, with an event that clears what the old one had.
        stack.service("verifier").send_signal(signal.SIGKILL)
        assert ask(prompt) == 0
        with contextlib.closing(Subscriber(events, replay)) as anew:
            first = anew.replay(0)[0]
            assert (first.number, first.batch[1]) == (0, [{"type": "AllBlocksCleared"}])
            wait_until(lambda: holds(4, anew), stack)
