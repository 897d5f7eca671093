"""Decide whether a call may be made, for REST and gRPC alike."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.errors import PermissionDeniedError, UnauthenticatedError
from gateway.access.caller import ANYBODY, STRANGER, Caller
from gateway.access.keyring import Keyring
from gateway.access.routes import Who

NO_KEY = "this server needs a key: Authorization: Bearer KEY, or x-api-key: KEY"
WRONG_KEY = "the key is not one of this server's"
NO_CERTIFICATE = "this server needs a client certificate"
NO_OPERATOR_KEY = "this endpoint needs the operator's key: Authorization: Bearer KEY"
NO_OPERATOR = "this endpoint is the operator's, and this server was started without --admin-api-key-file"
NOT_THE_OPERATOR = "this key is not the operator's"
_BEARER = b"bearer "


@dataclass(slots=True)
class Credentials:
    """What a call shows: the values of its headers, or of its metadata."""

    authorization: bytes = b""
    api_key: bytes = b""
    # Whether the client has shown a certificate that the server trusts.
    has_certificate: bool = False

    @property
    def secrets(self) -> list[bytes]:
        """The keys, the bearer's first. Authorization may hold a proxy's password instead."""
        is_bearer = self.authorization[: len(_BEARER)].lower() == _BEARER
        found = (self.authorization[len(_BEARER) :].strip() if is_bearer else b"", self.api_key.strip())
        return [secret for secret in found if secret]


class Policy:
    """Holds every call against the keys of one gateway."""

    def __init__(
        self,
        keyring: Keyring | None,
        *,
        models: Sequence[str],
        operator_key: str | None = None,
        probe_key: str | None = None,
        needs_certificate: bool = False,
    ) -> None:
        """``keyring``: None, if clients need no key; ``models``: all names of the served model.

        ``probe_key``: the supervisor's, which shows it the details of ``/ready``.
        ``needs_certificate``: only public calls may come without a client certificate.
        """
        self._keyring = keyring
        self._models = tuple(models)
        self._operator_key = None if operator_key is None else operator_key.encode()
        self._probe_key = None if probe_key is None else probe_key.encode()
        self._needs_certificate = needs_certificate

    def admit(self, who: Who, shown: Credentials) -> Caller:
        """Return who calls. Raises UnauthenticatedError or PermissionDeniedError."""
        if who is Who.PUBLIC:
            return self._visitor(shown)
        if self._needs_certificate and not shown.has_certificate:
            raise UnauthenticatedError(NO_CERTIFICATE)
        if who is Who.OPERATOR:
            return self._operator(shown)
        if self._keyring is None:
            return ANYBODY
        caller = self._client(self._keyring, shown)
        if caller is None:
            if self._is_operator(shown):
                if who is Who.OBSERVER:
                    return ANYBODY
                raise PermissionDeniedError("the operator's key is only for the operator's endpoints")
            raise UnauthenticatedError(WRONG_KEY if shown.secrets else NO_KEY)
        if not any(map(caller.may_use, self._models)):
            caller.check_model(self._models[0])
        if who is Who.OBSERVER and not (caller.key is not None and caller.key.metrics):
            raise PermissionDeniedError("this key may not read metrics, which show all tenants")
        return caller

    def _visitor(self, shown: Credentials) -> Caller:
        """Return the caller of a public call, which may be anybody."""
        if self._keyring is None and (shown.has_certificate or not self._needs_certificate):
            return ANYBODY
        secrets = shown.secrets
        if not secrets:
            return STRANGER
        if _holds(secrets, self._probe_key) or self._is_operator(shown):
            return ANYBODY
        caller = self._client(self._keyring, shown) if self._keyring is not None else None
        return caller if caller is not None and any(map(caller.may_use, self._models)) else STRANGER

    def _operator(self, shown: Credentials) -> Caller:
        """Return the caller of an operator's call.

        Raises UnauthenticatedError without a known key, PermissionDeniedError for a client's.
        """
        has_operator = self._operator_key is not None
        if self._is_operator(shown) or (self._keyring is None and not has_operator):
            return ANYBODY
        if self._keyring is not None and self._client(self._keyring, shown) is not None:
            raise PermissionDeniedError(NOT_THE_OPERATOR if has_operator else NO_OPERATOR)
        if shown.secrets:
            raise UnauthenticatedError(WRONG_KEY)
        raise UnauthenticatedError(NO_OPERATOR_KEY if has_operator else NO_OPERATOR)

    def _is_operator(self, shown: Credentials) -> bool:
        return _holds(shown.secrets, self._operator_key)

    @staticmethod
    def _client(keyring: Keyring, shown: Credentials) -> Caller | None:
        for secret in shown.secrets:
            if (caller := keyring.find(secret)) is not None:
                return caller
        return None


def _holds(secrets: list[bytes], key: bytes | None) -> bool:
    return key is not None and any([hmac.compare_digest(secret, key) for secret in secrets])
