"""Hold the keys of a gateway, find the caller of a secret, and read the keys again."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from pathlib import Path

from gateway.access.caller import Caller
from gateway.access.key import ApiKey, digest_of
from gateway.access.key_file import check_distinct, read_keys
from gateway.access.quota import Ledger, Quota

# Name of a key that was given by flag or in the environment; a second one is called api-key-2.
GIVEN_NAME = "api-key"
# A table by the whole digest would compare digests byte by byte. The part picks one
# candidate, which is compared in constant time. A client cannot choose the digest of a
# guess, so the part says nothing.
_PART_BYTES = 8


class Keyring:
    """All keys of a gateway."""

    def __init__(self, secrets: Sequence[str], path: Path | None, ledger: Ledger | None = None) -> None:
        """``secrets``: keys without a file; ``path``: file of hashed keys.

        Raises ConfigError for a bad file.
        """
        self._given = given_keys(secrets)
        self._path = path
        self._ledger = ledger or Ledger()
        self._callers: dict[bytes, list[tuple[bytes, Caller]]] = {}
        self.reload()

    def reload(self) -> None:
        """Read the file again. Raises ConfigError, and keeps the keys as they are, if it is bad."""
        keys = all_keys(self._given, self._path)
        rows = self._ledger.rows(key.name for key in keys if key.has_quota)
        callers: dict[bytes, list[tuple[bytes, Caller]]] = {}
        for key in keys:
            quota = Quota(key, rows[key.name]) if key.has_quota else None
            callers.setdefault(key.digest[:_PART_BYTES], []).append((key.digest, Caller(key, quota)))
        self._callers = callers

    def find(self, secret: bytes) -> Caller | None:
        """Return the caller that a secret belongs to; None for an unknown one."""
        digest = digest_of(secret)
        found = None
        for known, caller in self._callers.get(digest[:_PART_BYTES], ()):
            if hmac.compare_digest(known, digest):
                found = caller
        return found


def given_keys(secrets: Sequence[str]) -> list[ApiKey]:
    """Return the keys of flags and environment: without limits, and they may read metrics."""
    names = [GIVEN_NAME if number == 1 else f"{GIVEN_NAME}-{number}" for number in range(1, len(secrets) + 1)]
    return [ApiKey(name, digest_of(secret.encode()), metrics=True) for name, secret in zip(names, secrets, strict=True)]


def all_keys(given: list[ApiKey], path: Path | None) -> list[ApiKey]:
    """Return the given keys and the file's. Raises ConfigError for a bad file or a doubled key.

    A given key that the file has too is the file's, with its name and limits: clients read their
    key from the variable that gives one to a server.
    """
    in_file = read_keys(path) if path is not None else []
    digests = {key.digest for key in in_file}
    keys = [key for key in given if key.digest not in digests] + in_file
    check_distinct(keys, "--api-key" if path is None else f"--api-key and --api-key-file: {path}")
    return keys
