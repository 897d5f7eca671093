"""A DNS server on loopback with records that a test sets: real packets, no network."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import dns.asyncresolver
import dns.flags
import dns.message
import dns.rcode
import dns.rrset


class NameServer(asyncio.DatagramProtocol):
    """Answers SRV queries of one name."""

    def __init__(self, name: str) -> None:
        self.name = name
        # port and target of each record; None: the server fails.
        self.records: list[tuple[int, str]] | None = []
        self.num_queries = 0
        # Any: before Python 3.12 asyncio's own is no DatagramTransport by class.
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        self.num_queries += 1
        query = dns.message.from_wire(data)
        response = dns.message.make_response(query)
        response.flags |= dns.flags.AA
        question = query.question[0]
        if self.records is None:
            response.set_rcode(dns.rcode.SERVFAIL)
        elif question.name.to_text(omit_final_dot=True) != self.name or not self.records:
            response.set_rcode(dns.rcode.NXDOMAIN)
        else:
            texts = [f"0 10 {port} {target}." for port, target in self.records]
            response.answer.append(dns.rrset.from_text(question.name, 5, "IN", "SRV", *texts))
        self._transport.sendto(response.to_wire(), address)


@contextlib.asynccontextmanager
async def name_server(name: str) -> AsyncIterator[tuple[NameServer, dns.asyncresolver.Resolver]]:
    """Serve, and yield the server with a resolver that asks it."""
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(lambda: NameServer(name), local_addr=("127.0.0.1", 0))
    resolver = dns.asyncresolver.Resolver(configure=False)
    resolver.nameservers = ["127.0.0.1"]
    resolver.port = transport.get_extra_info("sockname")[1]
    try:
        yield server, resolver
    finally:
        transport.close()
