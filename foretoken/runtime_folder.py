"""Make the private folder of a stack's Unix sockets, removed with its owner, even after SIGKILL."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Of the folder's name.
PREFIX = "foretoken-"
# If the owner is killed, a script of this name in the folder runs before the folder is removed. It
# ends processes that the kernel does not end with the owner.
AT_END = "at-end.sh"
# Waits for the end of its input: the owner, which holds the other end, has gone in whatever way.
_CLEANER = f'read -r _; [ ! -f "$0/{AT_END}" ] || /bin/sh "$0/{AT_END}"; rm -rf -- "$0"'


@contextlib.contextmanager
def runtime_folder() -> Iterator[Path]:
    """Make a folder of mode 0700.

    A waiting shell removes it after the block, or if this process is killed.
    """
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    cleaner = subprocess.Popen(
        ["/bin/sh", "-c", _CLEANER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # A new session, so that Ctrl-C does not end it before its owner.
        start_new_session=True,
    )
    try:
        yield folder
    finally:
        # If a second signal ends this wait, the shell still runs the script and removes the folder.
        cleaner.communicate()
        shutil.rmtree(folder, ignore_errors=True)
