"""docker/ended.sh tells containers that were killed from outside from those that died.

Docker itself is played.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docker" / "ended.sh"
# Answers for the one container of the project that it was asked for. Its logs
# begin with what its init wrote.
DOCKER = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$1" in
  ps) echo c0ffee ;;
  inspect) echo "verifier $STATE 2026-11-26T00:00:00Z" ;;
  logs) printf '%s' "$LOGS" ;;
esac
"""
SPAWNED = "[INFO  tini (1)] Spawned child process 'foretoken' with pid '7'\n"
EXITED = "[INFO  tini (1)] Main child exited normally (with status '{}')\n"
SIGNALLED = "[INFO  tini (1)] Main child exited with signal (with signal '{}')\n"


# State: status, exit code, out of memory, restarts.
@pytest.mark.parametrize(
    ("state", "logs", "expected"),
    [
        ("running 0 false 0", SPAWNED, "running, has not ended"),
        (
            "exited 137 false 0",
            SPAWNED,
            "killed from outside (exit code 137); nobody starts it again: docker compose up -d",
        ),
        (
            "running 0 false 2",
            SPAWNED + SIGNALLED.format("Killed") + SPAWNED,
            "running, restarted 2 times; ended with signal 'Killed'; a crash, or a kill in the container or by the "
            "kernel: docker compose logs verifier, and the host's dmesg",
        ),
        (
            "running 0 true 1",
            SPAWNED + SIGNALLED.format("Killed") + SPAWNED,
            "running, restarted 1 times; out of the container's memory (mem_limit in compose.yaml)",
        ),
        (
            "restarting 2 false 5",
            SPAWNED + EXITED.format(2),
            "restarting, restarted 5 times; ended with status '2'; it refused its settings: "
            "docker compose logs verifier",
        ),
        (
            "running 0 false 1",
            SPAWNED + EXITED.format(80) + SPAWNED,
            "running, restarted 1 times; ended with status '80'; it lost its GPU context: docs/gpu-faults.md",
        ),
        (
            "running 0 false 1",
            SPAWNED + SPAWNED,
            "running, restarted 1 times; its init was killed by a process of the host",
        ),
        (
            "exited 0 false 0",
            SPAWNED + EXITED.format(0),
            "ended with status '0'; it was asked to stop; start it: docker compose up -d",
        ),
    ],
)
def test_what_it_says(tmp_path: Path, state: str, logs: str, expected: str) -> None:
    program = tmp_path / "docker"
    program.write_text(DOCKER)
    program.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "STATE": state,
        "LOGS": logs,
    }
    done = subprocess.run(["sh", SCRIPT, "mine"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"verifier: {expected}\n", "")
    calls = (tmp_path / "calls").read_text()
    assert "label=com.docker.compose.project=mine" in calls
    # Only what a container wrote since its last start says how it
    # ended, if it is not running again.
    assert ("--since 2026-11-26T00:00:00Z" in calls) == state.startswith("exited")
