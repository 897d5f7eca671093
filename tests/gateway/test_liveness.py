"""A supervised gateway's event loop is held up: its streams go on, unless that lasts too long."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from gateway.config import GatewaySettings
from gateway.tokenizer import Tokenizer
from tests.gateway.scripted_verifier import LENGTH, Player, ScriptedVerifier, serving
from tests.support.environment import child_environment

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
# A stopped process is found in MAX_SILENCE_S; NUM_MISSED questions take three times as long.
HEARTBEAT_S, MAX_SILENCE_S, NUM_MISSED = 0.05, 0.3, 20


@dataclass
class Supervised:
    """A supervisor process with one gateway."""

    process: subprocess.Popen[str]
    folder: Path
    lines: list[str] = field(default_factory=list)

    @property
    def held(self) -> Path:
        return self.folder / "held"

    def gateway(self) -> psutil.Process:
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def hold(self) -> None:
        """Hold the gateway's loop up until ``held`` has gone."""
        self.held.touch()
        self.gateway().send_signal(signal.SIGUSR1)

    async def read_until(self, text: str) -> str:
        assert self.process.stdout is not None
        while line := await asyncio.to_thread(self.process.stdout.readline):
            self.lines.append(line)
            if text in line:
                return line
        raise AssertionError(f"ended before {text!r}: {self.lines}")

    async def missed(self, count: int) -> None:
        """Wait until ``count`` more questions showed no turn of the loop; the gateway must live."""
        missed, gateway = self.folder / "missed", self.gateway()
        size = missed.stat().st_size
        while missed.stat().st_size < size + count:
            assert gateway.is_running()
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def supervised(settings: GatewaySettings, folder: Path, max_stall_s: float) -> AsyncIterator[Supervised]:
    liveness_socket = folder / "alive.sock"
    settings = settings.model_copy(update={"liveness_socket": liveness_socket})
    held_gateway = ("-m", "tests.support.held_gateway", settings.model_dump_json(), str(folder / "held"))
    probe = {"host": settings.host, "port": settings.port, "liveness_socket": str(liveness_socket)}
    service = {
        "name": "gateway",
        "command": [sys.executable, *held_gateway],
        "probe": probe,
        "missed_file": str(folder / "missed"),
        "stop_grace_s": 600.0,
        "required": True,
        "environment": {},
        "before_kill": [],
        "shares_faults": False,
        "max_stall_s": max_stall_s,
        "reloads": False,
    }
    spec = {"services": [service], "optional_ready_s": 0.1, "slow_start_s": 600.0, "before_kill_s": 600.0}
    spec |= {"heartbeat_s": HEARTBEAT_S, "max_silence_s": MAX_SILENCE_S, "stops_together": False}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.supervised", json.dumps(spec)],
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment(),
    )
    run = Supervised(process, folder)
    try:
        await run.read_until("READY")
        yield run
    finally:
        process.kill()
        await asyncio.to_thread(process.communicate)


async def test_a_busy_gateway_is_left_alone_and_a_stopped_one_is_not(
    settings: GatewaySettings, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    go_on = asyncio.Event()

    async def play(player: Player) -> None:
        player.tokens([65])
        await go_on.wait()
        player.tokens([66])
        player.finish(LENGTH)

    verifier = ScriptedVerifier(tokenizer.vocab_size)
    verifier.script = play
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "stream": True}
    async with (
        serving(verifier, tmp_path / "v.sock"),
        supervised(settings, tmp_path, max_stall_s=600.0) as run,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{settings.port}", timeout=None) as client,
    ):
        gateway = run.gateway()
        async with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            run.hold()
            await run.missed(NUM_MISSED)
            run.held.unlink()
            go_on.set()
            assert [line async for line in lines if line][-1] == "data: [DONE]"
        assert run.gateway() == gateway
        gateway.suspend()
        assert (await run.read_until("gateway")).startswith("gateway did not answer for ")
        await run.read_until("gateway is ready again after")
        assert not gateway.is_running()


async def test_a_gateway_whose_loop_stands_still_for_too_long_is_killed(
    settings: GatewaySettings, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    verifier = ScriptedVerifier(tokenizer.vocab_size)
    # More than a free loop needs for a turn on a busy machine.
    max_stall_s = 5.0
    async with serving(verifier, tmp_path / "v.sock"), supervised(settings, tmp_path, max_stall_s) as run:
        gateway = run.gateway()
        run.hold()
        assert (await run.read_until("gateway")).startswith("gateway did not turn its event loop for ")
        await run.read_until("gateway is ready again after")
        assert not gateway.is_running()
