"""The Unix sockets by which services on one machine meet."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterable
from pathlib import Path

from foretoken.doctor.finding import Finding, fault, ok

_NAME = "sockets"
# Size of a path in sockaddr_un, with its closing zero.
MAX_PATH = 108
# As the runtime folder of a stack is called.
_PREFIX = "foretoken-"


def check_sockets(parent: Path, drafters: Iterable[str]) -> Finding:
    """Make a stack's runtime folder in ``parent`` and bind its longest socket. ``drafters``: their names."""
    longest = max(("verifier", *(f"drafters/{name}" for name in drafters)), key=len)
    advice = "set TMPDIR to a short path on a local disk that this user may write to"
    try:
        with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent) as folder:
            path = Path(folder) / f"{longest}.sock"
            length = len(str(path).encode())
            if length >= MAX_PATH:
                return fault(_NAME, f"{path} has {length} bytes, and a socket's path less than {MAX_PATH}", advice)
            path.parent.mkdir(exist_ok=True)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.bind(str(path))
    except OSError as error:
        return fault(_NAME, f"cannot make a socket in {parent}: {error.strerror or error}", advice)
    return ok(_NAME, f"can be made in {parent}")
