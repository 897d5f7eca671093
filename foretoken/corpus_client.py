"""The operator's side of ``/v1/corpora``: files are cut into texts that one request takes.

It speaks REST only and knows nothing of the services behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from foretoken.corpora import CorpusInfo
from foretoken.errors import ConfigError, ForetokenError, UnavailableError

# Characters of one request: a token has about four, and one request takes a million tokens.
MAX_TEXT_CHARS = 1_000_000
CONNECT_TIMEOUT_S = 5.0
# All corpora of a drafter are sorted anew for each text.
READ_TIMEOUT_S = 180.0
SEPARATOR = "\n\n"


class CorpusClient:
    """Adds, lists and removes corpora through one gateway. A context manager.

    All calls raise UnavailableError if nothing answers, and ForetokenError for what the server refused.
    """

    def __init__(self, url: str, key: str, drafter: str = "") -> None:
        """``url`` may be without a scheme, or with /v1. ``drafter``: empty for the first that holds corpora."""
        url = url.rstrip("/").removesuffix("/v1")
        self._url = url if "://" in url else f"http://{url}"
        self._drafter = drafter
        # Straight to the address that was given, whatever proxy the machine uses for the web.
        self._client = httpx.Client(
            base_url=self._url,
            headers={"authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            trust_env=False,
        )

    def __enter__(self) -> CorpusClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def add(self, name: str, texts: Iterable[str], *, append: bool = False) -> CorpusInfo | None:
        """Put texts into a corpus, in place of what it holds unless ``append``; None if there was no text."""
        info = None
        for text in texts:
            body = {"name": name, "text": text, "append": append, "drafter": self._drafter}
            info = _info(self._call("POST", "/v1/corpora", json=body))
            append = True
        return info

    def list(self) -> list[CorpusInfo]:
        return [_info(entry) for entry in self._call("GET", "/v1/corpora", params=self._params)["data"]]

    def remove(self, name: str) -> None:
        self._call("DELETE", f"/v1/corpora/{name}", params=self._params)

    @property
    def _params(self) -> dict[str, str]:
        return {"drafter": self._drafter} if self._drafter else {}

    def _call(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        try:
            response = self._client.request(method, path, **more)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            raise UnavailableError(f"nothing answers at {self._url}") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UnavailableError(f"{self._url}: {error or type(error).__name__}") from error
        try:
            body: dict[str, Any] = response.json()
            if response.status_code == 200:
                return body
            error_message = str(body["error"]["message"])
        except (ValueError, LookupError, TypeError):
            raise ForetokenError(f"{response.url} answered with status {response.status_code}") from None
        if response.status_code == 404 and error_message == "Not Found":
            # No such route, rather than no such corpus.
            error_message = "this server has no operator's endpoints: start it with --admin-api-key-file"
        raise ForetokenError(error_message)


def texts_of(paths: Iterable[Path]) -> Iterator[str]:
    """The texts of files, and of all files in folders by name, joined and cut to what one request takes.

    Raises ConfigError for a path that cannot be read as UTF-8 text; binary files in a folder are passed over.
    """
    gathered = ""
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_dir():
                continue
            try:
                text = file.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                if path.is_dir():
                    continue
                raise ConfigError(f"{file} is not UTF-8 text: {error}") from None
            except OSError as error:
                raise ConfigError(f"cannot read {file}: {error.strerror}") from None
            if gathered and len(gathered) + len(text) > MAX_TEXT_CHARS:
                yield gathered
                gathered = ""
            *whole, text = cut(text)
            yield from whole
            gathered = gathered + SEPARATOR + text if gathered else text
    if gathered:
        yield gathered


def cut(text: str) -> list[str]:
    """Parts of at most MAX_TEXT_CHARS - 2, at ends of lines where there are any; always at least one."""
    parts, most = [], MAX_TEXT_CHARS - len(SEPARATOR)
    while len(text) > most:
        end = text.rfind("\n", 0, most) + 1 or most
        parts.append(text[:end])
        text = text[end:]
    return [*parts, text]


def _info(entry: dict[str, Any]) -> CorpusInfo:
    return CorpusInfo(str(entry["name"]), int(entry["num_tokens"]))
