"""Define a client's API key: its name, the hash of its secret, and its limits."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass

# Before a new secret, as other servers have it: tools that search for leaked secrets know it.
SECRET_PREFIX = "sk-foretoken-"
SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One client's key.

    Attributes:
        name: the tenant; it stands in logs and metrics.
        digest: SHA-256 of the secret.
        requests_per_minute: requests that may start in a minute; None: any number.
        tokens_per_minute: prompt and output tokens in a minute; None: any number.
        max_concurrent_requests: requests that may run or wait at once; None: any number.
        models: names of models that it may use; empty: all.
        priority: added to the priority of its requests, which then may not be
            negative; None: they may have any.
        metrics: whether it may read ``/metrics``, where all tenants' names stand.
    """

    name: str
    digest: bytes
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent_requests: int | None = None
    models: frozenset[str] = frozenset()
    priority: int | None = None
    metrics: bool = False

    @property
    def has_quota(self) -> bool:
        """Return whether any of its limits must be counted."""
        return (self.requests_per_minute, self.tokens_per_minute, self.max_concurrent_requests) != (None, None, None)


def digest_of(secret: bytes) -> bytes:
    """Return the hash by which a secret is known.

    A secret that ``new_secret`` drew has 256 random bits. Nobody can try that many, so a slow hash
    with a salt, as for passwords, would add only its own time to every request.
    """
    return hashlib.sha256(secret).digest()


def new_secret() -> str:
    """Draw a new secret."""
    return SECRET_PREFIX + secrets.token_urlsafe(SECRET_BYTES)
