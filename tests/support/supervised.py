"""A process that supervises commands given as JSON, for tests: supervision changes the whole process it runs in.

    {"services": [{"name", "command", "ready_file", "stop_grace_s", "required"}], "optional_ready_s"}

Each announcement is a line on stdout; READY stands for ``on_ready``. The exit status is the supervisor's.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from foretoken import supervisor


def service(spec: dict[str, Any]) -> supervisor.Service:
    ready_file = Path(spec["ready_file"])

    async def probe() -> bool:
        return ready_file.exists()

    return supervisor.Service(spec["name"], tuple(spec["command"]), probe, spec["stop_grace_s"], spec["required"])


def say(line: str) -> None:
    print(line, flush=True)


def main() -> int:
    spec = json.loads(sys.argv[1])
    supervisor.OPTIONAL_READY_S = spec["optional_ready_s"]
    services = [service(item) for item in spec["services"]]
    return asyncio.run(supervisor.Supervisor(services, on_ready=lambda: say("READY"), announce=say).run())


sys.exit(main())
