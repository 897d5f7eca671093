"""Find ports on which nobody listens."""

from __future__ import annotations

import os
import random
import socket
from collections import deque
from pathlib import Path

# The lowest port to try, and the least number of candidates.
LEAST_PORT = 20_000
NUM_PORTS = 10_000
# The latest ports that no other process is given. By the time that so many more
# were asked for, they are bound.
NUM_CLAIMS = 64

_given_ports: set[int] = set()
_claims: deque[int] = deque()


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return different ports of ``host`` on which nobody listens now.

    ``host`` is an address of this machine.

    While this process lives, no other one gets the latest ``NUM_CLAIMS`` from here.
    Ports are below the kernel's range of ephemeral ports: until a port is bound, a
    connection could get an ephemeral one.
    """
    first_of_any = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    candidates = range(LEAST_PORT, max(first_of_any, LEAST_PORT + NUM_PORTS))
    found: list[int] = []
    while len(found) < count:
        # Other processes may seed the default generator alike and try the same ports.
        port = random.SystemRandom().choice(candidates)
        if port not in _given_ports and _claim(port) and _is_free(host, port):
            _given_ports.add(port)
            found.append(port)
    return found


def _claim(port: int) -> bool:
    """Take a name that the kernel gives to one process at a time, and frees when that ends."""
    name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        name.bind(f"\0foretoken-port-{port}")
    except OSError:
        name.close()
        return False
    # A descriptor: the end of the process closes it, and nothing else needs to.
    _claims.append(name.detach())
    if len(_claims) > NUM_CLAIMS:
        os.close(_claims.popleft())
    return True


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True
