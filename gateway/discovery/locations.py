"""Turn what ``--verifier`` says into a source of verifiers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from foretoken.address import check_address
from gateway.discovery.address_file import AddressFile
from gateway.discovery.all_sources import AllSources
from gateway.discovery.dns_addresses import DnsAddresses
from gateway.discovery.fixed_list import FixedList
from gateway.discovery.looked_up import LookedUp, LookUp
from gateway.discovery.source import VerifierSource

FILE, DNS, DNS_SRV = "file:", "dns://", "dns+srv://"
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")


def check_location(location: str) -> str:
    """Return ``location`` unchanged. Raises ValueError that says what is wrong with it."""
    if location.startswith(FILE):
        if not location.removeprefix(FILE).startswith("/"):
            raise ValueError("expected an absolute path after file:")
    elif location.startswith(DNS_SRV):
        if not _NAME.fullmatch(location.removeprefix(DNS_SRV)):
            raise ValueError("expected a name after dns+srv://, without a port: SRV records have it")
    elif location.startswith(DNS):
        address = check_address(location.removeprefix(DNS))
        if not _NAME.fullmatch(address.rpartition(":")[0]):
            raise ValueError("expected dns://NAME:PORT")
    else:
        check_address(location)
    return location


Location = Annotated[str, AfterValidator(check_location)]


def source_of(locations: Iterable[str], *, interval_s: float) -> VerifierSource:
    """Return the source of all verifiers at checked ``locations``; looks every ``interval_s``."""
    addresses = []
    sources: list[VerifierSource] = []
    for location in locations:
        look_up = _look_up(location)
        if look_up is None:
            addresses.append(location)
        else:
            sources.append(LookedUp(location, look_up, interval_s))
    if addresses:
        sources.append(FixedList(addresses))
    return sources[0] if len(sources) == 1 else AllSources(sources)


def _look_up(location: str) -> LookUp | None:
    """Return what finds a location's verifiers; None for the address of one."""
    if location.startswith(FILE):
        return AddressFile(Path(location.removeprefix(FILE)))
    if location.startswith(DNS_SRV):
        # Imported late: most gateways need no DNS library.
        from gateway.discovery.dns_services import DnsServices

        return DnsServices(location.removeprefix(DNS_SRV))
    if location.startswith(DNS):
        name, _, port = location.removeprefix(DNS).rpartition(":")
        return DnsAddresses(name, int(port))
    return None
