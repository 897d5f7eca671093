"""Runs the command line in tests, in a child process or in this one, and reads what it starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from foretoken.cli import app
from foretoken.free_ports import free_ports
from foretoken.service import Service
from tests.support.environment import child_environment

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "models" / "demo"
ENVIRONMENT = child_environment()


def foretoken(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "foretoken", *arguments],
        env=ENVIRONMENT | environment,
        capture_output=True,
        text=True,
    )


def free_port() -> str:
    return str(free_ports(1)[0])


def invoke(*arguments: str) -> None:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output


def serve(folder: str, *arguments: str) -> None:
    """Run ``foretoken serve`` on a folder with a checkpoint's files, at least by their names."""
    for name in ("config.json", "tokenizer.json"):
        (Path(folder) / name).touch()
    invoke("serve", folder, *arguments, "--port", free_port(), "--grpc-port", free_port())


def words(service: Service) -> tuple[str, ...]:
    """Return the words after ``python -P -m foretoken``."""
    return service.command[service.command.index("foretoken") + 1 :]


def loaded_by(code: str) -> set[str]:
    """Return the top-level modules that are loaded after ``code``."""
    script = f"{code}\nimport sys\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    result = subprocess.run(
        [sys.executable, "-P", "-c", script], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    return set(result.stdout.splitlines()[-1].split())
