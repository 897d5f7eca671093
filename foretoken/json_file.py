"""Read a JSON file of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foretoken.errors import CheckpointError


def read_object(file: Path) -> dict[str, Any] | None:
    """Return the object that a file holds; None if there is no file.

    Raises CheckpointError naming the file.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} is not a JSON object")
    return content
