"""The private folder of a stack's Unix sockets and of what belongs to them. It goes with its owner, even by SIGKILL."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

# A script of this name in the folder is run when the owner was killed, before the folder goes: it ends what the
# kernel does not end with the owner.
AT_END = "at-end.sh"
# Waits until its input ends, which is when the one process that holds the other end has gone in whatever way.
_CLEANER = f'read -r _; [ ! -f "$0/{AT_END}" ] || /bin/sh "$0/{AT_END}"; rm -rf -- "$0"'


@contextlib.contextmanager
def runtime_folder() -> Iterator[Path]:
    """A new folder of mode 0700; removed on leaving, by a waiting shell, also if this process is killed."""
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
        # The shell removes it also where an impatient signal ends this wait, and runs what was left to be run before.
        cleaner.communicate()
        shutil.rmtree(folder, ignore_errors=True)
