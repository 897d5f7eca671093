"""Write hosts as clients need them."""

from __future__ import annotations

_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def bracketed(host: str) -> str:
    """Return ``host`` as an address writes it before the port."""
    return f"[{host}]" if ":" in host else host


def reachable(host: str) -> str:
    """Return the host to connect to for a host to listen on."""
    return _WILDCARDS.get(host, host)
