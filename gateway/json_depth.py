"""Tell whether a value is nested so deeply that it could not be written as JSON again."""

from __future__ import annotations

from typing import Any

import orjson

from foretoken.limits import MAX_JSON_DEPTH

# Levels that orjson writes.
_WRITABLE = 254


def is_too_deep(value: Any) -> bool:
    """Return whether a value that orjson read is nested deeper than MAX_JSON_DEPTH.

    To write it, inside as many lists as leave that depth, is the fastest way to know.
    """
    for _ in range(_WRITABLE - MAX_JSON_DEPTH):
        value = [value]
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError:
        return True
    return False
