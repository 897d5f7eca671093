"""Call the gateway's endpoints that need the operator's key."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import httpx

from foretoken.commands.rest_address import no_answer, rest_url, tls_context
from foretoken.errors import ForetokenError

CONNECT_TIMEOUT_S = 5.0
# Each text makes the drafter sort all its corpora again.
READ_TIMEOUT_S = 180.0


class OperatorClient:
    """Calls one gateway; a context manager.

    Calls raise the error of ``no_answer`` if nothing answers, and a ForetokenError if the server
    refuses.
    """

    def __init__(self, url: str, key: str) -> None:
        """``url``: see ``rest_url``."""
        self._url = rest_url(url)
        # Connect directly, whatever web proxy the machine uses.
        self._client = httpx.Client(
            base_url=self._url,
            headers={"authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            trust_env=False,
            verify=tls_context(self._url),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def _call(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        try:
            response = self._client.request(method, path, **more)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise no_answer(self._url, error) from error
        try:
            body: dict[str, Any] = response.json()
            if response.status_code == 200:
                return body
            error_message = str(body["error"]["message"])
        except (ValueError, LookupError, TypeError):
            raise ForetokenError(f"{response.url} answered with status {response.status_code}") from None
        if response.status_code == 404 and error_message == "Not Found":
            # The route is missing, not a corpus or drafter.
            raise no_operator_endpoints()
        raise ForetokenError(error_message)


def no_operator_endpoints() -> ForetokenError:
    """Return the error to raise where the operator's endpoints are missing."""
    return ForetokenError("this server has no endpoints for operators: start it with --admin-api-key-file")
