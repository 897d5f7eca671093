"""Find ports on which nobody listens."""

from __future__ import annotations

import random
import socket
from pathlib import Path

# The lowest port to try, and the least number of candidates.
LEAST_PORT = 20_000
NUM_PORTS = 10_000

_given_ports: set[int] = set()


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return ports of ``host``, an address of this machine, that nobody listens on now, each only once.

    They are below the kernel's range of ephemeral ports: until a port is bound, a connection could
    get an ephemeral one.
    """
    first_of_any = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    candidates = range(LEAST_PORT, max(first_of_any, LEAST_PORT + NUM_PORTS))
    found: list[int] = []
    while len(found) < count:
        # Other processes may seed the default generator alike and try the same ports.
        port = random.SystemRandom().choice(candidates)
        if port not in _given_ports and _is_free(host, port):
            _given_ports.add(port)
            found.append(port)
    return found


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True
