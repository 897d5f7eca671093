"""The gateway's ports."""

from __future__ import annotations

from foretoken import stack
from foretoken.doctor.finding import Finding, fault, ok, warning
from foretoken.errors import ForetokenError


def check_ports(host: str, port: int, grpc_port: int) -> list[Finding]:
    """Bind both ports as the gateway would."""
    if port == grpc_port:
        return [fault("ports", f"--port and --grpc-port are both {port}", "choose another")]
    rows = ((port, "--port", "PORT"), (grpc_port, "--grpc-port", "GRPC_PORT"))
    return [_check(host, *row) for row in rows]


def _check(host: str, number: int, flag: str, variable: str) -> Finding:
    check = f"port {number}"
    try:
        stack.check_port_free(host, number, flag, variable)
    except ForetokenError as error:
        return warning(check, error.message, "right if foretoken serves there already")
    return ok(check, f"free on {host}")
