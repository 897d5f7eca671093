"""What a controller's log says. The same code that wrote a log decides the same from it."""

from __future__ import annotations

Record = tuple[str | int | float, ...]
