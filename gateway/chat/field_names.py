"""Name the fields of another API in the errors of a chat request that was made from its body."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from foretoken.errors import ForetokenError


class FieldNames:
    """Translates the names of chat fields; a longer name goes before its beginning."""

    def __init__(self, names: Mapping[str, str] | None = None) -> None:
        """``names``: chat field -> the other API's field, as in ``{"messages.1": "input.3"}``."""
        self._names = dict(names or {})

    def own(self, field: str) -> str:
        """Return the API's own name of a chat field."""
        parts = field.split(".")
        for count in range(len(parts), 0, -1):
            name = self._names.get(".".join(parts[:count]))
            if name is not None:
                return ".".join([name, *parts[count:]])
        return field

    @contextlib.contextmanager
    def in_errors(self) -> Iterator[None]:
        """Use the API's own names in errors that leave the block."""
        try:
            yield
        except ForetokenError as error:
            name = self.own(error.field)
            error.message = error.message.replace(error.field, name) if name != error.field else error.message
            error.field = name
            raise
