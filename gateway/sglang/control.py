"""Serve SGLang's /flush_cache and /abort_request."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response

from foretoken import limits
from foretoken.errors import InvalidRequestError, PreconditionError
from gateway import http
from gateway.access import caller as callers
from gateway.core import GatewayCore
from gateway.fields import Fields, validate
from gateway.operator.all_verifiers import call_all
from protos import verifier_pb2

# A verifier flushes between two steps.
FLUSH_TIMEOUT_S = 30.0
# Fields of SGLang's own processes.
IGNORED = frozenset({"abort_message", "finished_reason", "http_worker_ipc"})


class AbortFields(Fields):
    """Body of POST /abort_request."""

    rid: str = ""
    abort_all: bool = False


def control_router(core: GatewayCore) -> APIRouter:
    """Return the routes of one gateway."""
    router = APIRouter(tags=["SGLang"])

    @router.get("/flush_cache")
    @router.post("/flush_cache")
    async def flush_cache(request: Request) -> Response:
        """Empty the prefix cache of all verifiers.

        400 while requests run or wait, in any gateway. What n-gram drafters have learned stays: it
        never changes a text.
        """
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            # A page's plain GET has no Origin.
            raise http.ForeignOriginError("pages of other sites may not flush the cache")
        try:
            answers = await call_all(
                core.verifiers.clients, "FlushCache", verifier_pb2.FlushCacheRequest(), timeout_s=FLUSH_TIMEOUT_S
            )
        except PreconditionError as error:
            raise InvalidRequestError(error.message) from None
        return PlainTextResponse(f"Cache flushed: {sum(answer.num_blocks for answer in answers)} blocks.\n")

    @router.post("/abort_request", openapi_extra=http.body_schema(AbortFields))
    async def abort_request(request: Request) -> Response:
        """Abort the caller's requests named ``rid``, or all of them.

        Their answers end with what they have.

        ``rid`` is the client's name (``rid`` of /generate, x-request-id or gRPC's request_id) or
        the answer's id, or the id of one item. An unknown name is no error: its request may just
        have ended.
        """
        fields = validate(AbortFields, await http.read_object(request), ignored=IGNORED)
        if not fields.rid and not fields.abort_all:
            raise InvalidRequestError("give rid, or abort_all: true", field="rid")
        limits.check_text("rid", fields.rid, limits.MAX_OUTPUT_ID_CHARS)
        count = await core.abort(None if fields.abort_all else fields.rid, callers.current().name)
        return http.json_response({"num_aborted": count})

    return router
