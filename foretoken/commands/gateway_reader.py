"""Read what a running gateway shows of itself: for ``foretoken top``."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

from foretoken.commands.operator_client import no_operator_endpoints
from foretoken.commands.rest_address import key_headers, key_hint, no_answer, rest_url, tls_context
from foretoken.errors import ForetokenError
from foretoken.operator_key import FLAG
from foretoken.top.reading import Reading

CONNECT_TIMEOUT_S = 5.0
# The gateway waits a few seconds for verifiers that do not answer.
READ_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Answers:
    """What a gateway answered at one time.

    Attributes:
        ready: the body of ``/ready``.
        activity: the body of ``/v1/activity``; None without the operator's key.
    """

    reading: Reading
    ready: dict[str, Any]
    activity: dict[str, Any] | None


class GatewayReader:
    """Reads one gateway; a context manager."""

    def __init__(self, url: str, operator_key: str = "") -> None:
        """``url``: see ``rest_url``. Without ``operator_key`` the environment's key is sent."""
        self.url = rest_url(url)
        self._is_operator = bool(operator_key)
        self._headers = {"authorization": f"Bearer {operator_key}"} if operator_key else key_headers()
        # Connect directly, whatever web proxy the machine uses.
        self._client = httpx.Client(
            base_url=self.url,
            headers=self._headers,
            timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            trust_env=False,
            verify=tls_context(self.url),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def read(self) -> Answers:
        """Return what the gateway shows now.

        Raises the errors of ``no_answer`` if nothing answers, and a ForetokenError if the server
        refuses or is no gateway of foretoken's.
        """
        response = self._get("/metrics")
        at = time.monotonic()
        try:
            reading = Reading.of(response.text, at) if response.status_code == 200 else None
        except ValueError:
            reading = None
        if response.status_code not in (200, 404):
            raise self._refusal(response)
        if reading is None or not reading.values:
            raise ForetokenError(f"{self.url} answers, but is not a foretoken gateway")
        ready = self._get("/ready")
        activity = self._get("/v1/activity") if self._is_operator else None
        if activity is not None and activity.status_code != 200:
            raise self._refusal(activity)
        return Answers(reading, _object(ready), None if activity is None else _object(activity))

    def _get(self, path: str) -> httpx.Response:
        try:
            return self._client.get(path)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise no_answer(self.url, error) from error

    def _refusal(self, response: httpx.Response) -> ForetokenError:
        """Return the error in an answer other than 200: what the server says, and what to set."""
        try:
            message = str(response.json()["error"]["message"])
        except (ValueError, LookupError, TypeError):
            message = f"{response.url} answered with status {response.status_code}"
        if response.status_code == 404 and message == "Not Found":
            return no_operator_endpoints()
        if response.status_code in (401, 403):
            if not self._headers:
                message += f"{key_hint(is_set=False)}, or give the operator's with {FLAG}"
            elif not self._is_operator:
                message += f"{key_hint(is_set=True)}; or give the operator's with {FLAG}"
        return ForetokenError(message)


def _object(response: httpx.Response) -> dict[str, Any]:
    """Return the JSON object of an answer.

    Raises ForetokenError for another answer, as of a proxy.
    """
    try:
        found = response.json()
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ForetokenError(f"{response.url} answered with status {response.status_code}, without a JSON object")
    return found
