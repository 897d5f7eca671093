"""The Unix sockets by which services on one machine meet."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterable
from pathlib import Path

from foretoken.doctor.finding import Finding, fault, ok
from foretoken.rpc import MAX_UNIX_PATH_BYTES
from foretoken.runtime_folder import PREFIX

_NAME = "sockets"


def check_sockets(parent: Path, drafters: Iterable[str]) -> Finding:
    """Make a stack's runtime folder in ``parent`` and bind its longest socket.

    ``drafters``: their names.
    """
    longest = max(("verifier", *(f"drafters/{name}" for name in drafters)), key=len)
    advice = "set TMPDIR to a short path on a local disk that this user may write to"
    try:
        with tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent) as folder:
            path = Path(folder) / f"{longest}.sock"
            length = len(os.fsencode(path))
            if length > MAX_UNIX_PATH_BYTES:
                most = f"a socket's path less than {MAX_UNIX_PATH_BYTES + 1}"
                return fault(_NAME, f"{path} has {length} bytes, and {most}", advice)
            path.parent.mkdir(exist_ok=True)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.bind(str(path))
    except OSError as error:
        return fault(_NAME, f"cannot make a socket in {parent}: {error.strerror or error}", advice)
    return ok(_NAME, f"can be made in {parent}")
