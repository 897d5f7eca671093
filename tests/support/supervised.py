"""Supervises commands given as JSON, in a process of its own: supervision changes its process.

    {"services": [{"name", "command", "probe", "missed_file", and as they are in Service:
                   "stop_grace_s", "required", "environment", "before_kill", "shares_faults",
                   "max_stall_s", "reloads"}],
     "optional_ready_s", "slow_start_s", "heartbeat_s", "max_silence_s", "before_kill_s",
     "stops_together"}

"probe" is {"ready_file", "alive_socket"}, or a gateway's {"host", "port", "liveness_socket"}.
"missed_file" gets a byte for each question that shows no turn of the child's event loop. Each
announcement is a line on stdout; READY stands for ``on_ready``. The exit status is the
supervisor's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import sys
from pathlib import Path
from typing import Any

from foretoken import pulse, supervisor
from foretoken.probes import GatewayProbe
from foretoken.service import Probe, Service

# Far above a busy machine's time to answer, so that no live process is taken for dead.
PROBE_TIMEOUT_S = 1.0


class FileProbe:
    """Ready: a file is there. Alive: a socket gives the time of the child's last loop turn."""

    def __init__(self, ready_file: str, alive_socket: str) -> None:
        self._ready_file = Path(ready_file)
        self._alive_socket = alive_socket

    async def is_ready(self) -> bool:
        return self._ready_file.exists()

    async def last_turn(self) -> float | None:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(self._alive_socket)
                with contextlib.closing(writer):
                    answer = await reader.read()
        except (OSError, TimeoutError):
            return None
        return float(answer) if answer else None

    async def close(self) -> None:
        return


class NotingProbe:
    """Notes each question that shows no turn of the child's event loop in a file."""

    def __init__(self, probe: Probe, missed_file: Path) -> None:
        self._probe = probe
        self._missed_file = missed_file
        self._last_turn: float | None = None

    async def is_ready(self) -> bool:
        return await self._probe.is_ready()

    async def last_turn(self) -> float | None:
        before, self._last_turn = self._last_turn, await self._probe.last_turn()
        if self._last_turn is None or self._last_turn == before:
            with self._missed_file.open("ab") as missed:
                missed.write(b"-")
        return self._last_turn

    async def close(self) -> None:
        await self._probe.close()


def probe(spec: dict[str, Any]) -> Probe:
    if "alive_socket" in spec:
        return FileProbe(**spec)
    return GatewayProbe(spec["host"], spec["port"], Path(spec["liveness_socket"]))


def service(spec: dict[str, Any]) -> Service:
    return Service(
        spec["name"],
        tuple(spec["command"]),
        NotingProbe(probe(spec["probe"]), Path(spec["missed_file"])),
        spec["stop_grace_s"],
        spec["required"],
        spec["environment"],
        tuple(spec["before_kill"]),
        spec["shares_faults"],
        spec["max_stall_s"],
        spec["reloads"],
    )


def say(line: str) -> None:
    print(line, flush=True)


def main() -> int:
    spec = json.loads(sys.argv[1])
    supervisor.OPTIONAL_READY_S, supervisor.SLOW_START_S = spec["optional_ready_s"], spec["slow_start_s"]
    supervisor.STILL_STARTING_S = spec["slow_start_s"]
    supervisor.HEARTBEAT_S, pulse.MAX_SILENCE_S = spec["heartbeat_s"], spec["max_silence_s"]
    supervisor.BEFORE_KILL_S = spec["before_kill_s"]
    # No process lives so long here that its next start would not wait.
    supervisor.STABLE_AFTER_S = math.inf
    services = [service(item) for item in spec["services"]]
    together = spec["stops_together"]
    run = supervisor.Supervisor(
        services,
        on_ready=lambda: say("READY"),
        announce=say,
        stop_notice="stopping",
        stop_again_notice="again: at once",
        slow_notice=" for long",
        stops_together=together,
    ).run
    return asyncio.run(run())


sys.exit(main())
