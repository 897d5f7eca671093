"""Write errors in Anthropic's shape, with the types and statuses of its API."""

from __future__ import annotations

from typing import Any

from fastapi.responses import Response

from foretoken.errors import ContextLengthError, ForetokenError, UnavailableError
from gateway import http

# Anthropic's status of a server that can take no requests for now; its clients try again.
OVERLOADED = 529
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


def error_object(error: ForetokenError) -> dict[str, Any]:
    """Return Anthropic's ``{"type": "error", ...}``. It shows no details of internal errors."""
    message = http.error_object(error)["error"]["message"]
    if isinstance(error, ContextLengthError):
        # By these words clients know that they must shorten the conversation.
        message = f"prompt is too long: {message}"
    return _object(_status(error), message)


def error_response(error: ForetokenError) -> Response:
    """Return the error object with its HTTP status and headers for retries."""
    return http.json_response(error_object(error), status=_status(error), headers=http.error_headers(error))


def status_response(status: int, message: str, headers: dict[str, str]) -> Response:
    """Return the error object of an HTTP status, such as 404 for an unknown path."""
    return http.json_response(_object(status, message), status=status, headers=headers)


def _status(error: ForetokenError) -> int:
    return OVERLOADED if isinstance(error, UnavailableError) else error.http_status


def _object(status: int, message: str) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}
