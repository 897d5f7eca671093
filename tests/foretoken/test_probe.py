"""`foretoken probe` turns grpc.health.v1's status into an exit status, for container checks."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from foretoken import rpc
from tests.support.environment import child_environment

ROOT = Path(__file__).parents[2]
ENVIRONMENT = child_environment()
SERVICE = "foretoken.verifier.v1.VerifierService"


async def probe(*arguments: str) -> tuple[int | None, str]:
    """Return the exit status of ``foretoken probe`` and its output."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "foretoken", "probe", *arguments),
        env=ENVIRONMENT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return process.returncode, output.decode()


@pytest.mark.parametrize("listen", ["unix:{}/s", "127.0.0.1:0"])
def test_the_status_is_that_of_the_service(tmp_path: Path, listen: str) -> None:
    async def scenario() -> None:
        server = rpc.async_server()
        health = rpc.HealthService(server, (SERVICE,))
        await health.mark(False)
        address = listen.format(tmp_path)
        port = rpc.bind(server, address)
        address = address.replace(":0", f":{port}")
        await server.start()
        try:
            refused = f"foretoken: {SERVICE} at {address} is not serving\n"
            assert await probe(address, "--service", SERVICE) == (1, refused)
            # Not ready, but alive.
            assert await probe(address) == (0, "")
            await health.mark(True)
            assert await probe(address, "--service", SERVICE) == (0, "")
            assert (await probe(address, "--service", "foretoken.other.v1.OtherService"))[0] == 1
            await health.drain()
            assert await probe(address, "--service", SERVICE) == (1, refused)
        finally:
            await server.stop(None)

    asyncio.run(scenario())


def test_nobody_there_is_one_line(tmp_path: Path) -> None:
    status, output = asyncio.run(probe(f"unix:{tmp_path}/s"))
    assert (status, output) == (1, f"foretoken: the server at unix:{tmp_path}/s is not serving\n")


def test_it_loads_nothing_heavy() -> None:
    script = (
        "import sys\nfrom foretoken.cli import app\n"
        "try:\n    app(['probe', '127.0.0.1:1'])\nexcept SystemExit as end:\n    assert end.code == 1\n"
        "heavy = {'torch', 'transformers', 'numba', 'numpy', 'fastapi', 'gateway', 'verifier_svc', 'drafter_svc'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )

    async def run() -> bytes:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-c", script, env=ENVIRONMENT, stdout=asyncio.subprocess.PIPE
        )
        return (await process.communicate())[0]

    assert asyncio.run(run()).decode() == "[]\n"
