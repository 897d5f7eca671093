"""foretoken.descendants, each test in its own process: a subreaper collects every orphan."""

from __future__ import annotations

import subprocess
import sys

# Forks and ends, again and again, each time in a session of its own; the last one stays.
_RUNNER = """
import os, time
print("running", flush=True)
for _ in range(500):
    if os.fork():
        os._exit(0)
    os.setsid()
time.sleep(1000)
"""
_KILLER = """
import subprocess, sys
from foretoken.descendants import kill_descendants, subreaper

spared = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL)
with subreaper():
    runner = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
    runner.stdout.readline()
    kill_descendants({spared.pid})
    # The end of the pipe: nobody holds it any more.
    assert runner.stdout.read() == b""
assert spared.poll() is None
spared.kill()
spared.wait()
"""


def test_who_forks_while_it_is_killed_does_not_escape() -> None:
    subprocess.run([sys.executable, "-c", _KILLER, _RUNNER], check=True)
