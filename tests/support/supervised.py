"""A process that supervises commands given as JSON, for tests: supervision changes the whole process it runs in.

    {"services": [{"name", "command", "ready_file", "alive_socket", "stop_grace_s", "required", and as they are
                   in Service: "environment", "before_kill", "shares_faults"}],
     "optional_ready_s", "slow_start_s", "heartbeat_s", "max_silence_s", "before_kill_s", "stops_together"}

Each announcement is a line on stdout; READY stands for ``on_ready``. The exit status is the supervisor's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import sys
from pathlib import Path
from typing import Any

from foretoken import supervisor

# Far above what a busy machine takes to answer, so that nobody is taken for dead who is not.
PROBE_TIMEOUT_S = 1.0


class FileProbe:
    """Ready: a file is there. Alive: a socket gives a byte."""

    def __init__(self, ready_file: Path, alive_socket: Path) -> None:
        self._ready_file = ready_file
        self._alive_socket = alive_socket

    async def is_ready(self) -> bool:
        return self._ready_file.exists()

    async def is_alive(self) -> bool:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(self._alive_socket)
                with contextlib.closing(writer):
                    return await reader.read(1) != b""
        except (OSError, TimeoutError):
            return False

    async def close(self) -> None:
        return


def service(spec: dict[str, Any]) -> supervisor.Service:
    probe = FileProbe(Path(spec["ready_file"]), Path(spec["alive_socket"]))
    return supervisor.Service(
        spec["name"],
        tuple(spec["command"]),
        probe,
        spec["stop_grace_s"],
        spec["required"],
        spec["environment"],
        tuple(spec["before_kill"]),
        spec["shares_faults"],
    )


def say(line: str) -> None:
    print(line, flush=True)


def main() -> int:
    spec = json.loads(sys.argv[1])
    supervisor.OPTIONAL_READY_S, supervisor.SLOW_START_S = spec["optional_ready_s"], spec["slow_start_s"]
    supervisor.HEARTBEAT_S, supervisor.MAX_SILENCE_S = spec["heartbeat_s"], spec["max_silence_s"]
    supervisor.BEFORE_KILL_S = spec["before_kill_s"]
    # No life here is so long that the next start would not wait, whatever stands still meanwhile.
    supervisor.STABLE_AFTER_S = math.inf
    services = [service(item) for item in spec["services"]]
    together = spec["stops_together"]
    run = supervisor.Supervisor(
        services,
        on_ready=lambda: say("READY"),
        announce=say,
        stop_notice="stopping",
        slow_notice=" for long",
        stops_together=together,
    ).run
    return asyncio.run(run())


sys.exit(main())
