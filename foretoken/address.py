"""Check the address of a service: ``unix:/path`` or host:port."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

UNIX_PREFIX = "unix:"


def check_address(address: str) -> str:
    """Return ``address`` unchanged. Raises ValueError that says what is wrong with it."""
    if address.startswith(UNIX_PREFIX):
        if not address.removeprefix(UNIX_PREFIX).startswith("/"):
            raise ValueError("expected an absolute path after unix:")
        return address
    host, colon, port = address.rpartition(":")
    # http:// is a URL's scheme; gRPC has schemes too, such as dns:///host:port.
    if not host or not colon or host.startswith(("http://", "https://")):
        raise ValueError("expected unix:/path or host:port")
    if not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ValueError("expected a port from 1 to 65535 after the last colon")
    return address


Address = Annotated[str, AfterValidator(check_address)]
