"""Read the REST API's request bodies, and write its error objects."""

from __future__ import annotations

import asyncio
import functools
import mmap
import uuid
from collections.abc import Callable
from typing import Any

import orjson
from fastapi import Request
from fastapi.responses import Response

from foretoken import tracing
from foretoken.errors import (
    ContextLengthError,
    DeadlineError,
    ForetokenError,
    InvalidRequestError,
    ModelOutputError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionError,
    QueueFullError,
    RateLimitError,
    UnauthenticatedError,
    UnavailableError,
)
from foretoken.limits import MAX_BODY_BYTES, MAX_JSON_VALUES, MAX_REQUEST_ID_CHARS
from foretoken.tracing import TraceContext
from gateway.access.quota import retry_after
from gateway.bodies import hold_of
from gateway.fields import Fields, parse_body

# For a whole body, and from one part to the next.
BODY_TIMEOUT_S = 60.0
BODY_STALL_S = 10.0
# The server may receive this much of a body before it is read here.
READ_AHEAD_BYTES = 256 * 1024
COMPONENTS = "#/components/schemas/"
RETRY_AFTER_S = 1
# OpenAI's types and codes where it has such an error.
_TYPES: dict[type[ForetokenError], str] = {
    InvalidRequestError: "invalid_request_error",
    NotFoundError: "invalid_request_error",
    PreconditionError: "invalid_request_error",
    QueueFullError: "requests",
    UnavailableError: "service_unavailable_error",
    DeadlineError: "timeout_error",
    ModelOutputError: "server_error",
    UnauthenticatedError: "invalid_request_error",
    PermissionDeniedError: "invalid_request_error",
}
_CODES: dict[type[ForetokenError], str] = {
    NotFoundError: "model_not_found",
    QueueFullError: "rate_limit_exceeded",
    UnavailableError: "service_unavailable",
    DeadlineError: "deadline_exceeded",
    ModelOutputError: "model_output_error",
    UnauthenticatedError: "invalid_api_key",
    PermissionDeniedError: "permission_denied",
}


class BodyTimeoutError(InvalidRequestError):
    """A body did not arrive within BODY_TIMEOUT_S, or stalled for BODY_STALL_S."""

    http_status = 408


class BodyTooLargeError(InvalidRequestError):
    """A body is larger than MAX_BODY_BYTES."""

    http_status = 413


class MediaTypeError(InvalidRequestError):
    """A body is not declared as JSON.

    Web pages can send other types to any server without asking.
    """

    http_status = 415


class HostHeaderError(InvalidRequestError):
    """A request has no Host header or several: 400, as in RFC 9112."""


class ForeignHostError(InvalidRequestError):
    """A Host is not this server's: 421, misdirected."""

    http_status = 421


class ForeignOriginError(PermissionDeniedError):
    """A web page of this Origin may not call: 403."""


async def read_object(
    request: Request, check: Callable[[], None] | None = None, *, max_values: int = MAX_JSON_VALUES
) -> dict[str, Any]:
    """Return the JSON object in the body, whose bytes it first takes from the budget.

    ``check`` runs before parsing and may raise. Raises QueueFullError if the budget has no room,
    and BodyTooLargeError at once: the connection drops the rest of the body.
    """
    _check_media_type(request)
    body = await _read_body(request)
    await hold_of(request.scope).turn()
    if check is not None:
        check()
    return await parse_body(body, max_values=max_values)


def _check_media_type(request: Request) -> None:
    """Raise MediaTypeError unless Content-Type declares JSON; a missing one is refused too."""
    values = request.headers.getlist("content-type")
    kind = values[0].partition(";")[0].strip().lower() if len(values) == 1 else ""
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise MediaTypeError("the body must be JSON; send the header Content-Type: application/json")


async def _read_body(request: Request) -> bytes:
    """Return the body. Raises BodyTimeoutError, BodyTooLargeError and QueueFullError."""
    hold, announced = hold_of(request.scope), _content_length(request)
    is_announced = "content-length" in request.headers
    _check_size(announced)
    hold.resize(announced if is_announced else READ_AHEAD_BYTES)
    body = _new_buffer(announced if is_announced else MAX_BODY_BYTES)
    size = 0
    now = asyncio.get_running_loop().time
    deadline = now() + BODY_TIMEOUT_S
    try:
        async with asyncio.timeout_at(min(deadline, now() + BODY_STALL_S)) as timeout:
            async for part in request.stream():
                timeout.reschedule(min(deadline, now() + BODY_STALL_S))
                start, size = size, size + len(part)
                _check_size(size)
                if not is_announced:
                    hold.resize(size + READ_AHEAD_BYTES)
                body[start:size] = part
    except TimeoutError:
        if timeout.when() != deadline:
            raise BodyTimeoutError(f"nothing of the body arrived for {BODY_STALL_S:g} s") from None
        raise BodyTimeoutError(f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    return bytes(memoryview(body)[:size])


def _new_buffer(most: int) -> bytearray | mmap.mmap:
    """Return a buffer for ``most`` bytes.

    A large one uses memory as it fills, and frees all of it.
    """
    return bytearray() if most <= READ_AHEAD_BYTES else mmap.mmap(-1, most)


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_BODY_BYTES:
        raise BodyTooLargeError(f"the body must not be larger than {MAX_BODY_BYTES} bytes")


def _content_length(request: Request) -> int:
    """Return the announced length; 0 if there is none."""
    text = request.headers.get("content-length", "")
    return int(text) if text.isdigit() and len(text) < 20 else 0


def new_id(prefix: str, separator: str = "-") -> str:
    """Return a new id for one answer."""
    return f"{prefix}{separator}{uuid.uuid4().hex}"


def client_id(request: Request, in_body: str = "") -> str:
    """Return the client's name for the request: ``in_body``, else x-request-id.

    It is empty if it cannot be logged.
    """
    return clean_id(in_body) or clean_id(request.headers.get("x-request-id", ""))


def clean_id(value: str) -> str:
    """Return ``value`` if a header and a log line may hold it, else nothing."""
    return value if len(value) <= MAX_REQUEST_ID_CHARS and value.isascii() and value.isprintable() else ""


def trace_context(request: Request) -> TraceContext | None:
    """Return the request's W3C trace context, if it is well formed."""
    return tracing.trace_context(request.headers.get("traceparent"), request.headers.get("tracestate"))


@functools.cache
def body_schema(kind: type[Fields]) -> dict[str, Any]:
    """Return ``openapi_extra`` for a route that reads its body itself.

    FastAPI does not change it.
    """
    schema = kind.model_json_schema(ref_template=COMPONENTS + "{model}")
    schema.pop("$defs", None)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def component_schemas(*kinds: type[Fields]) -> dict[str, Any]:
    """Return the definitions to which the schemas of ``body_schema`` refer."""
    components: dict[str, Any] = {}
    for kind in kinds:
        components |= kind.model_json_schema(ref_template=COMPONENTS + "{model}").get("$defs", {})
    return components


def error_object(error: ForetokenError) -> dict[str, Any]:
    """Return OpenAI's ``{"error": ...}``. It shows no details of internal errors."""
    known = next((kind for kind in _TYPES if isinstance(error, kind)), None)
    return {
        "error": {
            "message": error.message if known else "internal error",
            "type": _TYPES[known] if known else "server_error",
            "param": error.field or None,
            "code": _code(known, error) if known else None,
        }
    }


def _code(kind: type[ForetokenError], error: ForetokenError) -> str | None:
    if isinstance(error, ContextLengthError):
        return "context_length_exceeded"
    if (kind is NotFoundError and error.field != "model") or isinstance(error, ForeignOriginError):
        return None
    if isinstance(error, RateLimitError):
        return "rate_limit_exceeded"
    if isinstance(error, PermissionDeniedError) and error.field == "model":
        return "model_not_found"
    return _CODES.get(kind)


def error_headers(error: ForetokenError) -> dict[str, str]:
    """Return the headers of an error, such as those for retries."""
    headers = {}
    if isinstance(error, QueueFullError | UnavailableError):
        seconds = retry_after(error.retry_after_s) if isinstance(error, RateLimitError) else RETRY_AFTER_S
        headers["retry-after"] = str(seconds)
    if isinstance(error, DeadlineError | ModelOutputError):
        # The same request would take as long, or fail, again: clients must not retry by themselves.
        headers["x-should-retry"] = "false"
    if isinstance(error, BodyTooLargeError | BodyTimeoutError):
        headers["connection"] = "close"
    if isinstance(error, UnauthenticatedError):
        headers["www-authenticate"] = "Bearer"
    return headers


def error_response(error: ForetokenError) -> Response:
    """Return the error object with its HTTP status and headers for retries."""
    return json_response(error_object(error), status=error.http_status, headers=error_headers(error))


def json_response(value: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, headers, media_type="application/json")
