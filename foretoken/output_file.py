"""Write a file that a flag names."""

from __future__ import annotations

from pathlib import Path

from foretoken.errors import ConfigError


def write_file(path: Path, text: str, flag: str) -> None:
    """Write ``text`` to ``path``. Raises ConfigError naming ``flag``."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag}: cannot write {path}: {error.strerror or error}") from None
