"""The private folder that holds a stack's Unix sockets. It goes when its owner goes, even by SIGKILL."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Waits until its input ends, which is when the one process that holds the other end has gone in whatever way.
_CLEANER = 'read -r _; rm -rf -- "$0"'


@contextlib.contextmanager
def runtime_folder() -> Iterator[Path]:
    """A new folder of mode 0700; removed on leaving, or by a waiting shell if this process is killed."""
    folder = Path(tempfile.mkdtemp(prefix="foretoken-"))
    cleaner = subprocess.Popen(
        ["/bin/sh", "-c", _CLEANER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Out of the terminal's reach: Ctrl-C must not end it before its owner.
        start_new_session=True,
    )
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        cleaner.communicate()
