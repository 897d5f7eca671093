"""Define the error tree. Each class has a gRPC and an HTTP status; the services translate.

ForetokenError
  InvalidRequestError       bad field: INVALID_ARGUMENT, 400
    ContextLengthError      a prompt that the context cannot hold
  NotFoundError             unknown model, corpus, drafter: NOT_FOUND, 404
  QueueFullError            RESOURCE_EXHAUSTED, 429
    RateLimitError          a limit of the caller's own
  UnavailableError          draining, dead or not ready: UNAVAILABLE, 503
  DeadlineError             DEADLINE_EXCEEDED, 504
  UnauthenticatedError      no or an unknown key: UNAUTHENTICATED, 401
  PermissionDeniedError     not for this caller: PERMISSION_DENIED, 403
  PreconditionError         not in this state: FAILED_PRECONDITION, 409
  ModelOutputError          NaN or infinite logits: DATA_LOSS, 500
  ConfigError               refused at the start; never on the wire
    CheckpointError         a checkpoint that cannot be loaded, with file and tensor
"""

from __future__ import annotations

from typing import ClassVar

import grpc


class ForetokenError(Exception):
    """Base of all errors that a user may see.

    Attributes:
        field: the request field at fault, or empty.
        advice: what the user of a command can do, if the message does not say it.
    """

    status: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, *, field: str = "", advice: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.advice = advice
        # Whether the failed request has been counted and logged.
        self.is_reported = False

    @property
    def code(self) -> int:
        """The ``google.rpc.Code`` number of this error's status."""
        return int(self.status.value[0])


class InvalidRequestError(ForetokenError):
    """A request that can never succeed as it is; ``field`` names the part at fault, if any."""

    status = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 400


class ContextLengthError(InvalidRequestError):
    """A prompt leaves no room for an output. Clients shorten the conversation and try again."""


class NotFoundError(ForetokenError):
    """What the request names does not exist."""

    status = grpc.StatusCode.NOT_FOUND
    http_status = 404


class QueueFullError(ForetokenError):
    """There is no room for one more request; the same request may succeed later."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status = 429


class RateLimitError(QueueFullError):
    """The caller has reached a limit of its own, and may try again after ``retry_after_s``."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(ForetokenError):
    """A service that the request needs drains, starts, is dead, or cannot be reached."""

    status = grpc.StatusCode.UNAVAILABLE
    http_status = 503


class DeadlineError(ForetokenError):
    """The request took longer than its deadline, or its message arrived too late."""

    status = grpc.StatusCode.DEADLINE_EXCEEDED
    http_status = 504


class PreconditionError(ForetokenError):
    """Two services do not fit together, or the server's state does not allow the call."""

    status = grpc.StatusCode.FAILED_PRECONDITION
    http_status = 409


class UnauthenticatedError(ForetokenError):
    """The call lacks a key, a token or a certificate, or shows an unknown API key."""

    status = grpc.StatusCode.UNAUTHENTICATED
    http_status = 401


class PermissionDeniedError(ForetokenError):
    """What the caller shows does not allow the call."""

    status = grpc.StatusCode.PERMISSION_DENIED
    http_status = 403


class ModelOutputError(ForetokenError):
    """The model's numbers are NaN or infinite. Nobody retries: it would end the same way."""

    status = grpc.StatusCode.DATA_LOSS


class ConfigError(ForetokenError):
    """A setting or combination is refused at the start; the message names it."""


class CheckpointError(ConfigError):
    """A checkpoint cannot be loaded; the message names the file and the tensor."""


# ConfigError is never on the wire.
_BY_CODE = {int(kind.status.value[0]): kind for kind in ForetokenError.__subclasses__() if kind is not ConfigError}


def error_from_code(code: int, message: str, field: str = "") -> ForetokenError:
    """Return the error for a ``google.rpc.Code`` number; a ForetokenError for an unknown number."""
    return _BY_CODE.get(code, ForetokenError)(message, field=field)
