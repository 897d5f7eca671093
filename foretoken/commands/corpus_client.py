"""The operator's side of ``/v1/corpora``: files are cut into texts that one request takes.

It speaks REST only and knows nothing of the services behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from foretoken.commands.operator_client import OperatorClient
from foretoken.errors import ConfigError
from foretoken.limits import check_name

# Characters of one request: a token has about four, and one request takes a million tokens.
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
        """``url``, ``key``: as OperatorClient's. ``drafter``: empty for the first that holds some, in lists all."""
        super().__init__(url, key)
        self._drafter = drafter

    def add(self, name: str, texts: Iterable[str], *, append: bool = False) -> CorpusOf | None:
        """Put texts into a corpus, in place of what it holds unless ``append``; None if there was no text."""
        info = None
        for text in texts:
            body = {"name": name, "text": text, "append": append, "drafter": self._drafter}
            info = _info(self._call("POST", "/v1/corpora", json=body))
            append = True
        return info

    def list(self) -> list[CorpusOf]:
        return [_info(entry) for entry in self._call("GET", "/v1/corpora", params=self._params)["data"]]

    def remove(self, name: str) -> None:
        # A path of more parts would be no route at all.
        check_name("NAME", name)
        self._call("DELETE", f"/v1/corpora/{name}", params=self._params)

    @property
    def _params(self) -> dict[str, str]:
        return {"drafter": self._drafter} if self._drafter else {}


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


def _info(entry: dict[str, Any]) -> CorpusOf:
    return CorpusOf(str(entry["drafter"]), str(entry["name"]), int(entry["num_tokens"]))
