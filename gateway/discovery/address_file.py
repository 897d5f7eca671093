"""Read verifiers from a file: one address a line; empty lines and what follows # are left out."""

from __future__ import annotations

import asyncio
from pathlib import Path

from foretoken.address import check_address
from foretoken.errors import UnavailableError


class AddressFile:
    """A LookUp of a file, which whatever deploys the verifiers writes."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def __call__(self) -> frozenset[str]:
        """Return the file's addresses.

        Raises UnavailableError if it is unreadable or one line is not an address: a file that is
        half written must not drain verifiers.
        """
        try:
            text = await asyncio.to_thread(self._path.read_text, encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UnavailableError(f"cannot be read: {error}") from None
        addresses = set()
        for number, line in enumerate(text.splitlines(), start=1):
            if address := line.partition("#")[0].strip():
                try:
                    addresses.add(check_address(address))
                except ValueError as error:
                    raise UnavailableError(f"line {number}: {error}") from None
        return frozenset(addresses)
