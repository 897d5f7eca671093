"""Say who makes the present call: its tenant and its limits."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from contextvars import ContextVar, Token
from dataclasses import dataclass

from foretoken.errors import InvalidRequestError, PermissionDeniedError
from foretoken.limits import PRIORITY_RANGE
from gateway.access.key import ApiKey
from gateway.access.quota import Quota


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a call.

    Attributes:
        key: the caller's key; None: it has none.
        quota: counts what the key uses; None: it has no limits.
        may_see: whether it may see what the server runs, such as the model's name.
    """

    key: ApiKey | None = None
    quota: Quota | None = None
    may_see: bool = True

    @property
    def name(self) -> str:
        """The tenant; empty without a key."""
        return "" if self.key is None else self.key.name

    @property
    def log_fields(self) -> dict[str, str]:
        """The fields that a log line about the call has."""
        return {"key": self.key.name} if self.key is not None else {}

    def may_use(self, model: str) -> bool:
        """Return whether the caller may use a model."""
        return self.key is None or not self.key.models or model in self.key.models

    def check_model(self, model: str) -> None:
        """Raise PermissionDeniedError unless the caller may use a model."""
        if not self.may_use(model):
            # Not the model's name: this server's may be none of the client's business.
            raise PermissionDeniedError("this key may not use this model", field="model")

    def check_quota(self) -> None:
        """Raise RateLimitError if the caller may start no request now."""
        if self.quota is not None:
            self.quota.check()

    @contextlib.contextmanager
    def running(self, num_prompt_tokens: int, max_output_tokens: int) -> Iterator[None]:
        """Count a request while the block runs, and reserve its output. Raises RateLimitError."""
        if self.quota is None:
            yield
            return
        with self.quota.enter(num_prompt_tokens, max_output_tokens):
            yield

    def spend(self, num_tokens: int) -> None:
        """Count tokens that a request wrote."""
        if self.quota is not None:
            self.quota.spend(num_tokens)

    def priority(self, given: int) -> int:
        """Return the priority of a request that asks for ``given``.

        Raises InvalidRequestError if the key's requests may not be put before others.
        """
        if self.key is None or self.key.priority is None:
            return given
        if given < 0:
            raise InvalidRequestError(
                "this key's requests may not be put before others: priority must not be below 0", field="priority"
            )
        return min(self.key.priority + given, int(PRIORITY_RANGE.high))

    def tenant(self, cache_salt: str | None) -> str | None:
        """Return what separates the caller's texts from others' in every cache.

        A key's tenants are its own, whatever salts other keys send. Its salts are hashed, so that
        both parts fit the limit of a salt.
        """
        if self.key is None or cache_salt is None:
            return self.name or cache_salt
        return f"{self.key.name}\n{hashlib.sha256(cache_salt.encode()).hexdigest()}"


# Of a server that asks for no key.
ANYBODY = Caller()
# Of a call without a key to a server that asks for one.
STRANGER = Caller(may_see=False)
_current: ContextVar[Caller] = ContextVar("caller", default=ANYBODY)


def current() -> Caller:
    """Return who makes the present call."""
    return _current.get()


def enter(caller: Caller) -> Token[Caller]:
    """Make ``caller`` the maker of the present task's call, until ``leave``."""
    return _current.set(caller)


def leave(token: Token[Caller]) -> None:
    """Undo ``enter``."""
    _current.reset(token)
