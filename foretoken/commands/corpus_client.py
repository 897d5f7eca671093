"""Call ``/v1/corpora`` for the operator, and split files into texts that fit one request.

It uses only the public REST API.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from foretoken.commands.operator_client import OperatorClient
from foretoken.errors import ConfigError
from foretoken.limits import check_name

# Characters of one request: a token has about four, and a request may have a million tokens.
MAX_TEXT_CHARS = 1_000_000
SEPARATOR = "\n\n"


class CorpusOf(NamedTuple):
    """One corpus of one drafter."""

    drafter: str
    name: str
    num_tokens: int


class CorpusClient(OperatorClient):
    """Adds, lists and removes corpora through one gateway."""

    def __init__(self, url: str, key: str, drafter: str = "") -> None:
        """``url``, ``key``: as in OperatorClient.

        ``drafter``: empty: the first with corpora; for lists, all.
        """
        super().__init__(url, key)
        self._drafter = drafter

    def add(self, name: str, texts: Iterable[str], *, append: bool = False) -> CorpusOf | None:
        """Replace a corpus by texts, or ``append`` them; None if there was no text."""
        info = None
        for text in texts:
            body = {"name": name, "text": text, "append": append, "drafter": self._drafter}
            info = _info(self._call("POST", "/v1/corpora", json=body))
            append = True
        return info

    def list(self) -> list[CorpusOf]:
        return [_info(entry) for entry in self._call("GET", "/v1/corpora", params=self._params)["data"]]

    def remove(self, name: str) -> None:
        # A name with a slash would not match the route.
        check_name("NAME", name)
        self._call("DELETE", f"/v1/corpora/{name}", params=self._params)

    @property
    def _params(self) -> dict[str, str]:
        return {"drafter": self._drafter} if self._drafter else {}


def texts_of(paths: Iterable[Path]) -> Iterator[str]:
    """Yield the texts of files and folders, joined or cut to fit one request.

    Raises ConfigError for a file that is not UTF-8 text; binary files in a folder are skipped.
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
    """Cut a text into parts of at most MAX_TEXT_CHARS - 2, if possible at ends of lines."""
    parts, most = [], MAX_TEXT_CHARS - len(SEPARATOR)
    while len(text) > most:
        end = text.rfind("\n", 0, most) + 1 or most
        parts.append(text[:end])
        text = text[end:]
    return [*parts, text]


def _info(entry: dict[str, Any]) -> CorpusOf:
    return CorpusOf(str(entry["drafter"]), str(entry["name"]), int(entry["num_tokens"]))
