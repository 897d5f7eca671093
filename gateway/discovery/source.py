"""What every source of verifiers does: report the present set of addresses whenever it changes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol


class VerifierSource(Protocol):
    """Knows where verifiers are: ``unix:/path`` or host:port each.

    ``gateway.server.Gateway`` takes any source. The settings name the sources of this folder.
    """

    @property
    def reason(self) -> str:
        """Why the set is unknown or may be out of date; empty if all is well."""
        ...

    def changes(self) -> AsyncIterator[frozenset[str]]:
        """Yield the set when it is first known, and again after each change.

        May end if none follows.

        The pool drains verifiers that the latest set lacks. So a source that cannot look, or finds
        no verifier at all, yields nothing and lets the last set stand.
        """
        ...
