"""Find verifiers by the SRV records of a DNS name, which have a host and a port each."""

from __future__ import annotations

import dns.asyncresolver
import dns.exception
import dns.rdatatype

from foretoken.errors import UnavailableError

# Longer than a name server takes to try the next one, and shorter than a client's patience.
TIMEOUT_S = 5.0


class DnsServices:
    """A LookUp of a name's SRV records.

    Priorities and weights have no meaning here: load decides.
    """

    def __init__(self, name: str, resolver: dns.asyncresolver.Resolver | None = None) -> None:
        """``resolver``: None: as /etc/resolv.conf says."""
        self._name = name
        self._resolver = resolver

    async def __call__(self) -> frozenset[str]:
        """Return one address a record. Raises UnavailableError if there is no answer."""
        try:
            resolver = self._resolver or dns.asyncresolver.Resolver()
            answer = await resolver.resolve(self._name, dns.rdatatype.SRV, lifetime=TIMEOUT_S, search=True)
        except dns.exception.DNSException as error:
            raise UnavailableError(f"is not resolved: {error}") from None
        return frozenset(f"{record.target.to_text(omit_final_dot=True)}:{record.port}" for record in answer)
