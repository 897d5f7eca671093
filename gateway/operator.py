"""Check the operator's key, and call all verifiers.

The operator's endpoints exist only with ``--admin-api-key-file``; each call needs that key.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Sequence
from typing import Any

from fastapi import Request

from foretoken.errors import PermissionDeniedError, UnauthenticatedError
from gateway.verifier_client import VerifierClient

_BEARER = "bearer "


def check_key(request: Request, key: str) -> None:
    """Raise UnauthenticatedError without a bearer key, PermissionDeniedError for a wrong one."""
    header = request.headers.get("authorization", "")
    if not header.lower().startswith(_BEARER):
        raise UnauthenticatedError("this endpoint needs the operator's key: Authorization: Bearer KEY")
    if not hmac.compare_digest(header[len(_BEARER) :].strip().encode(), key.encode()):
        raise PermissionDeniedError("this key is not the operator's")


async def call_all(clients: Sequence[VerifierClient], method: str, message: Any, *, timeout_s: float) -> list[Any]:
    """Call verifiers; return their answers.

    Raises the first error; other calls may have succeeded.
    """
    calls = [client.call(method, message, timeout_s=timeout_s) for client in clients]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers
