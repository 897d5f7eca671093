"""The operator's side of a gateway's endpoints that need a key. It speaks REST only."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from foretoken.commands.rest_address import no_answer, rest_url
from foretoken.errors import ConfigError, ForetokenError

CONNECT_TIMEOUT_S = 5.0
# All corpora of a drafter are sorted anew for each text.
READ_TIMEOUT_S = 180.0


class OperatorClient:
    """Calls one gateway. A context manager.

    All calls raise as ``no_answer`` says if nothing answers, and ForetokenError for what the server refused.
    """

    def __init__(self, url: str, key: str) -> None:
        """``url``: as ``rest_url`` takes it."""
        self._url = rest_url(url)
        # Straight to the address that was given, whatever proxy the machine uses for the web.
        self._client = httpx.Client(
            base_url=self._url,
            headers={"authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            trust_env=False,
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
            # No such route, rather than no such corpus or drafter.
            error_message = "this server has no operator's endpoints: start it with --admin-api-key-file"
        raise ForetokenError(error_message)


def read_key(path: Path) -> str:
    """The operator's key. Raises ConfigError for a file that cannot be read."""
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--admin-api-key-file: cannot read {path}: {error}") from None
