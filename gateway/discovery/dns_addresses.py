"""Find verifiers by a DNS name's addresses: Kubernetes' headless service, Compose's service."""

from __future__ import annotations

import asyncio
import socket

from foretoken.errors import UnavailableError
from foretoken.hosts import bracketed


class DnsAddresses:
    """A LookUp of a name's A and AAAA records, by the system's resolver, with one port for all."""

    def __init__(self, name: str, port: int) -> None:
        self._name = name
        self._port = port

    async def __call__(self) -> frozenset[str]:
        """Return one address a record. Raises UnavailableError if the name is not resolved."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self._name, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise UnavailableError(f"is not resolved: {error.strerror or error}") from None
        return frozenset(f"{bracketed(str(sockaddr[0]))}:{self._port}" for *_, sockaddr in found)
