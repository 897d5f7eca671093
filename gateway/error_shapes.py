"""Write an error in the shape of the API to which a request's path belongs."""

from __future__ import annotations

from fastapi.responses import Response

from foretoken.errors import ForetokenError
from gateway import http
from gateway.anthropic import errors as anthropic

_ANTHROPIC_PATH = "/v1/messages"


def error_response(path: str, error: ForetokenError) -> Response:
    """Return the answer to a request that failed or was refused."""
    return anthropic.error_response(error) if _is_anthropic(path) else http.error_response(error)


def status_response(path: str, status: int, message: str, headers: dict[str, str]) -> Response:
    """Return the routing's answer to an unknown path or a wrong method."""
    if _is_anthropic(path):
        return anthropic.status_response(status, message, headers)
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return http.json_response({"error": error}, status=status, headers=headers)


def _is_anthropic(path: str) -> bool:
    return path == _ANTHROPIC_PATH or path.startswith(f"{_ANTHROPIC_PATH}/")
