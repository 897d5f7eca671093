"""A gateway whose event loop a test can hold up.

    python -m tests.support.held_gateway SETTINGS_JSON FILE

SIGUSR1 holds the loop while FILE is there.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path

import uvloop

from foretoken import liveness
from gateway import server
from gateway.config import GatewaySettings


async def main(settings: GatewaySettings, held: Path) -> None:
    def hold() -> None:
        while held.exists():
            time.sleep(0.01)

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, hold)
    await server.serve(settings)


# Tests ask as often.
liveness.TURN_S = 0.02
uvloop.run(main(GatewaySettings.model_validate_json(sys.argv[1]), Path(sys.argv[2])))
