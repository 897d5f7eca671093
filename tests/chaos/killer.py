"""Carries out a schedule: sends signals to the stack's processes and records the outcome."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx
import psutil

from foretoken.probes import GrpcProbe
from foretoken.stack import DRAFTER_HEALTH_NAME
from tests.chaos.schedule import DRAFTERS, Process, Strike
from tests.chaos.stack import Stack, answers
from tests.chaos.watcher import Watcher

POLL_S = 0.1
# Clients cannot rely on any order in which its listening socket comes and goes.
OUTAGE_GRACE_S = 1.0


@dataclass(slots=True)
class Blow:
    """A strike that was carried out. Times are time.monotonic(); None: it did not happen.

    Attributes:
        at: when the signal was sent.
        ended_at: when the struck process was seen to have ended.
        replaced_at: when another process of its name was seen.
        over_at: when verifier or gateway answered again; for a pause: SIGCONT.
        forced: nobody had replaced a stopped process, so it was killed.
    """

    strike: Strike
    at: float
    ended_at: float | None = None
    replaced_at: float | None = None
    over_at: float | None = None
    forced: bool = False

    @property
    def died_at(self) -> float:
        """Return the time of death: a stopped verifier's detection, or else the signal."""
        if self.strike.process == "verifier" and self.strike.action == "stop" and self.ended_at is not None:
            return self.ended_at
        return self.at


class Killer:
    """Runs a lane for each process, strike after strike; lanes run side by side."""

    def __init__(self, stack: Stack, watcher: Watcher, strikes: Sequence[Strike], recovery_s: float) -> None:
        """``recovery_s``: a stack that needs longer has failed; the run goes on without it."""
        self._stack = stack
        self._recovery_s = recovery_s
        self._watcher = watcher
        self._strikes = strikes
        self.blows: list[Blow] = []
        self.failures: list[str] = []
        self.gateway_up = asyncio.Event()
        self.gateway_up.set()

    async def run(self) -> None:
        """Carry out all strikes; return when the stack has recovered from the last one."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for process in dict.fromkeys(strike.process for strike in self._strikes):
                group.create_task(self._lane(process, began))
        await self._until(lambda: self._is_whole, "speculation did not come back after the last strike")
        for blow in self.blows:
            if blow.strike.process == "verifier" and blow.ended_at is not None:
                ended_at = blow.ended_at
                blow.over_at = min((at for at in self._watcher.first_seen.values() if at > ended_at), default=None)

    def excuses(self, sent_at: float, ended_at: float) -> bool:
        """Return whether a gateway's death may have broken a connection used between these times.

        The moment of death does not matter: a slow reader finds out late.
        """
        return any(
            blow.at <= ended_at and sent_at <= (blow.over_at or ended_at) + OUTAGE_GRACE_S
            for blow in self.blows
            if blow.strike.process == "gateway" and blow.strike.is_death
        )

    @property
    def _is_whole(self) -> bool:
        return self._watcher.latest is not None and not self._watcher.owes_proof

    async def _lane(self, process: Process, began: float) -> None:
        previous: Blow | None = None
        for strike in self._strikes:
            if strike.process != process:
                continue
            if strike.chained_s is not None and previous is not None:
                await _sleep_until(previous.at + strike.chained_s)
            else:
                await _sleep_until(began + strike.at_s)
                await self._until_ready(process)
            previous = await self._carry_out(strike)

    async def _until_ready(self, process: Process) -> None:
        """Wait until the process works, with the others, since the last death."""
        if process == "verifier":
            await self._until(lambda: self._is_whole, "speculation did not come back")
        elif process in DRAFTERS:
            watcher, address = self._watcher, self._stack.drafter_address(process)
            # Without a verifier there is nothing to prove yet; its return will prove it.
            await self._until(lambda: watcher.latest is None or not watcher.owes_proof, "speculation did not come back")
            deadline = time.monotonic() + self._recovery_s
            probe = GrpcProbe(address, DRAFTER_HEALTH_NAME)
            while not await probe.is_ready():
                if time.monotonic() > deadline:
                    self.failures.append(f"the {process} did not come back within {self._recovery_s:g} s")
                    break
                await asyncio.sleep(POLL_S)
            await probe.close()

    async def _carry_out(self, strike: Strike) -> Blow:
        target = await self._find(strike.process)
        if strike.is_death and strike.process in ("verifier", *DRAFTERS):
            self._watcher.struck()
        if strike.is_death and strike.process == "gateway":
            self.gateway_up.clear()
        blow = Blow(strike, time.monotonic())
        self.blows.append(blow)
        # It may have just ended, alone or by the supervisor: its successor is still found.
        with contextlib.suppress(psutil.NoSuchProcess):
            if strike.action == "kill":
                target.kill()
            else:
                target.suspend()
        if strike.action == "pause":
            await self._resume(blow, target)
        else:
            await self._await_end(blow, target)
            await self._await_successor(blow, target)
        return blow

    async def _resume(self, blow: Blow, target: psutil.Process) -> None:
        try:
            await asyncio.sleep(blow.strike.pause_s)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                target.resume()
        blow.over_at = time.monotonic()

    async def _await_end(self, blow: Blow, target: psutil.Process) -> None:
        """Wait for the end. A stopped verifier must be replaced; a stopped drafter is killed."""
        strike = blow.strike
        limit_s = strike.pause_s if strike.process in DRAFTERS and strike.action == "stop" else self._recovery_s
        deadline = time.monotonic() + limit_s
        while _is_alive(target):
            if time.monotonic() > deadline and not blow.forced:
                if strike.process not in DRAFTERS:
                    self.failures.append(f"nobody replaced the {strike.process} that had stopped")
                blow.forced = True
                with contextlib.suppress(psutil.NoSuchProcess):
                    target.kill()
            await asyncio.sleep(POLL_S)
        blow.ended_at = time.monotonic()

    async def _await_successor(self, blow: Blow, old: psutil.Process) -> None:
        name = blow.strike.process
        if await self._find(name, unlike=old):
            blow.replaced_at = time.monotonic()
        if name == "gateway":
            async with httpx.AsyncClient(trust_env=False, timeout=1.0) as client:
                while not await answers(client, f"{self._stack.url}/health"):
                    self._stack.check_alive()
                    await asyncio.sleep(POLL_S)
            blow.over_at = time.monotonic()
            self.gateway_up.set()

    async def _find(self, name: Process, unlike: psutil.Process | None = None) -> psutil.Process:
        while True:
            with contextlib.suppress(psutil.NoSuchProcess):
                found = self._stack.find(name)
                if found != unlike:
                    return found
            self._stack.check_alive()
            await asyncio.sleep(POLL_S)

    async def _until(self, condition: Callable[[], bool], failure: str) -> None:
        deadline = time.monotonic() + self._recovery_s
        while not condition():
            self._stack.check_alive()
            if time.monotonic() > deadline:
                self.failures.append(f"{failure} within {self._recovery_s:g} s")
                # Report a failure once.
                self._watcher.owes_proof = False
                return
            await self._watcher.next_sample()


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def _sleep_until(at: float) -> None:
    await asyncio.sleep(max(0.0, at - time.monotonic()))
