"""Call all verifiers for the operator.

The operator's endpoints exist only with ``--admin-api-key-file``,
whose key gateway/access asks for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from gateway.verifier_client import VerifierClient


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
