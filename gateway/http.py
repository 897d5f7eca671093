"""Request bodies and error objects of the REST API."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any

import orjson
from fastapi import Request
from fastapi.responses import Response

from foretoken import tracing
from foretoken.errors import (
    DeadlineError,
    ForetokenError,
    InvalidRequestError,
    ModelOutputError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionError,
    QueueFullError,
    UnauthenticatedError,
    UnavailableError,
)
from foretoken.limits import MAX_BODY_BYTES, MAX_JSON_VALUES, MAX_REQUEST_ID_CHARS
from foretoken.tracing import TraceContext
from gateway.fields import Fields, parse_body

BODY_TIMEOUT_S = 60.0
MAX_DISCARDED_BYTES = 4 * MAX_BODY_BYTES
COMPONENTS = "#/components/schemas/"
RETRY_AFTER_S = 1
# OpenAI's words where there are any.
_TYPES: dict[type[ForetokenError], str] = {
    InvalidRequestError: "invalid_request_error",
    NotFoundError: "invalid_request_error",
    PreconditionError: "invalid_request_error",
    QueueFullError: "rate_limit_error",
    UnavailableError: "service_unavailable_error",
    DeadlineError: "timeout_error",
    ModelOutputError: "server_error",
    UnauthenticatedError: "authentication_error",
    PermissionDeniedError: "permission_error",
}
_CODES: dict[type[ForetokenError], str] = {
    NotFoundError: "model_not_found",
    QueueFullError: "queue_full",
    UnavailableError: "service_unavailable",
    DeadlineError: "deadline_exceeded",
    ModelOutputError: "model_output_error",
    UnauthenticatedError: "invalid_api_key",
    PermissionDeniedError: "invalid_api_key",
}


class BodyTimeoutError(InvalidRequestError):
    """A body that did not arrive within BODY_TIMEOUT_S."""

    http_status = 408


class BodyTooLargeError(InvalidRequestError):
    """A body beyond MAX_BODY_BYTES."""

    http_status = 413


async def read_object(
    request: Request, check: Callable[[], None] | None = None, *, max_values: int = MAX_JSON_VALUES
) -> dict[str, Any]:
    """The JSON object in the body, whatever its content type says. Holds MAX_BODY_BYTES at most.

    A body somewhat beyond that is read to its end and thrown away: closing the connection while the client still
    sends would lose it the answer. ``check`` is called before it is parsed, and may raise.
    """
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            if _content_length(request) <= MAX_DISCARDED_BYTES:
                async for part in request.stream():
                    size += len(part)
                    if size <= MAX_BODY_BYTES:
                        body += part
                    if size > MAX_DISCARDED_BYTES:
                        break
    except TimeoutError:
        raise BodyTimeoutError(f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    if max(size, _content_length(request)) > MAX_BODY_BYTES:
        raise BodyTooLargeError(f"the body must not be larger than {MAX_BODY_BYTES} bytes")
    if check is not None:
        check()
    return await parse_body(bytes(body), max_values=max_values)


def _content_length(request: Request) -> int:
    """As announced; 0 if it is not."""
    text = request.headers.get("content-length", "")
    return int(text) if text.isdigit() and len(text) < 20 else 0


def new_id(prefix: str) -> str:
    """A fresh id for one answer."""
    return f"{prefix}-{uuid.uuid4().hex}"


def client_id(request: Request) -> str:
    """The caller's own name for the request, from x-request-id; empty if there is none that can be logged."""
    return clean_id(request.headers.get("x-request-id", ""))


def clean_id(value: str) -> str:
    """``value`` if it may stand in a header and a log line, otherwise nothing."""
    return value if len(value) <= MAX_REQUEST_ID_CHARS and value.isascii() and value.isprintable() else ""


def trace_context(request: Request) -> TraceContext | None:
    """The W3C trace context, if it is well formed."""
    return tracing.trace_context(request.headers.get("traceparent"), request.headers.get("tracestate"))


def body_schema(kind: type[Fields]) -> dict[str, Any]:
    """``openapi_extra`` of a route that reads its body by itself. Definitions are found by OpenAPI's rule."""
    schema = kind.model_json_schema(ref_template=COMPONENTS + "{model}")
    schema.pop("$defs", None)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def component_schemas(*kinds: type[Fields]) -> dict[str, Any]:
    """What the schemas of ``body_schema`` refer to."""
    components: dict[str, Any] = {}
    for kind in kinds:
        components |= kind.model_json_schema(ref_template=COMPONENTS + "{model}").get("$defs", {})
    return components


def error_object(error: ForetokenError) -> dict[str, Any]:
    """``{"error": ...}`` as OpenAI's clients read it. A fault of ours says no more than that it is one."""
    known = next((kind for kind in _TYPES if isinstance(error, kind)), None)
    return {
        "error": {
            "message": error.message if known else "internal error",
            "type": _TYPES[known] if known else "internal_error",
            "param": error.field or None,
            "code": _code(known, error.field) if known else None,
        }
    }


def _code(kind: type[ForetokenError], field: str) -> str | None:
    if kind is NotFoundError and field != "model":
        return None
    return _CODES.get(kind)


def error_response(error: ForetokenError) -> Response:
    """The error object with its HTTP status; what may be tried again says when."""
    headers = {}
    if isinstance(error, QueueFullError | UnavailableError):
        headers["retry-after"] = str(RETRY_AFTER_S)
    if isinstance(error, DeadlineError | ModelOutputError):
        # The same request would take as long again, or break again: clients that try again by themselves should not.
        headers["x-should-retry"] = "false"
    if isinstance(error, BodyTooLargeError | BodyTimeoutError):
        headers["connection"] = "close"
    if isinstance(error, UnauthenticatedError):
        headers["www-authenticate"] = "Bearer"
    return json_response(error_object(error), status=error.http_status, headers=headers)


def json_response(value: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, headers, media_type="application/json")
