"""Refuse RPCs without a key, before reading their messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from foretoken import rpc
from foretoken.errors import ForetokenError
from gateway.access import caller as callers
from gateway.access.policy import Credentials, Policy
from gateway.access.routes import who_may_call_rpc


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Lets the policy decide about each call, and says who makes it."""

    def __init__(self, policy: Policy, reject: Callable[[Any, ForetokenError], None]) -> None:
        """``reject`` counts and logs a refusal, given the call's context."""
        self._policy = policy
        self._reject = reject

    # Any: synchronous and asyncio handlers share grpc's handler type.
    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        who = who_may_call_rpc(handler_call_details.method)
        try:
            caller = self._policy.admit(who, _credentials(handler_call_details.invocation_metadata))
        except ForetokenError as error:
            return self._refusal(error)
        # gRPC runs interceptors and handler of a call in one task of its own.
        callers.enter(caller)
        return await continuation(handler_call_details)

    def _refusal(self, error: ForetokenError) -> Any:
        """Return a handler for calls of any kind that reads no message."""

        async def refuse(requests: object, context: Any) -> None:
            self._reject(context, error)
            await rpc.abort(context, error)

        return grpc.stream_stream_rpc_method_handler(refuse)


def _credentials(metadata: Any) -> Credentials:
    # A call comes this far only over a connection with the certificate that the server asks for.
    shown = Credentials(has_certificate=True)
    for name, value in metadata or ():
        data = value.encode() if isinstance(value, str) else value
        if name == "authorization":
            shown.authorization = data
        elif name == "x-api-key":
            shown.api_key = data
    return shown
