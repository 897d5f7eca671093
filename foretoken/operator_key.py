"""Read the file of ``--admin-api-key-file``, for the gateway and the commands that call it."""

from __future__ import annotations

from pathlib import Path

from foretoken.errors import ConfigError

FLAG = "--admin-api-key-file"
MIN_CHARS = 16


def read_operator_key(path: Path) -> str:
    """Read the operator's key. Raises ConfigError if it is unreadable or too easy to guess.

    No message shows any of the text: it may be a key, or a wrong file.
    """
    try:
        key = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError(f"{FLAG}: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{FLAG}: cannot read {path}: it is not ASCII") from None
    if len(key) < MIN_CHARS or not key.isprintable():
        raise ConfigError(
            f"{FLAG}: {path} must hold the operator's key alone: one line of at least {MIN_CHARS} printable characters"
        )
    return key
