"""The folder of a stack's sockets is removed with its owner."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import psutil

from foretoken.runtime_folder import runtime_folder

ROOT = Path(__file__).parents[2]
OWNER = """
import sys
from foretoken.runtime_folder import runtime_folder
with runtime_folder() as folder:
    (folder / "a socket").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_the_folder_is_private_and_goes_with_its_content() -> None:
    with runtime_folder() as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "a socket").touch()
        assert len(psutil.Process().children()) >= 1
    assert not folder.exists()


def test_sigkill_of_the_owner_removes_the_folder() -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert owner.stdout is not None
    folder = Path(owner.stdout.readline().strip())
    assert (folder / "a socket").exists()
    cleaners = psutil.Process(owner.pid).children()
    owner.kill()
    owner.communicate()
    _, alive = psutil.wait_procs(cleaners, timeout=60)
    assert alive == []
    assert not folder.exists()
