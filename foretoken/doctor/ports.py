"""The gateway's ports."""

from __future__ import annotations

from functools import partial

from foretoken import stack
from foretoken.doctor.finding import Finding, fault, tried


def check_ports(host: str, port: int, grpc_port: int) -> list[Finding]:
    """Bind both ports as the gateway would."""
    if port == grpc_port:
        return [fault("ports", f"--port and --grpc-port are both {port}", "choose another")]
    rows = ((port, "--port", "PORT"), (grpc_port, "--grpc-port", "GRPC_PORT"))
    return [
        tried(f"port {number}", partial(stack.check_port_free, host, number, flag, variable), f"free on {host}")
        for number, flag, variable in rows
    ]
