"""Write parts of grammars in llguidance's Lark syntax."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

# Any text without special tokens.
ANY_TEXT = r"/(.|\n)*/"
# A blank after each comma and colon may be left out. A looser rule lets an unsure model write
# blanks without end.
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ",[ ]?", "key_separator": ":[ ]?"}
_SPECIAL = re.compile(r"[][\\.+*?(){}|^$/]")


def literal(text: str) -> str:
    """Return a terminal that matches ``text``."""
    return orjson.dumps(text).decode()


def escaped(text: str) -> str:
    """Return a text as part of a regular expression."""
    return _SPECIAL.sub(r"\\\g<0>", text)


def json_value(schema: Mapping[str, Any]) -> str:
    """Return the terminal of a JSON value by a schema."""
    return f"%json {orjson.dumps({**schema, 'x-guidance': _JSON_OPTIONS}).decode()}"


class Marks:
    """The marks of formats as the model writes them: as special tokens or as plain text."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        """``special_ids``: the tokenizer's special tokens, by their text."""
        self._ids = special_ids

    def terminal(self, mark: str) -> str:
        """Return the terminal that matches one mark."""
        return f"<[{self._ids[mark]}]>" if mark in self._ids else literal(mark)

    def up_to(self, rule: str, mark: str) -> str:
        """Return a rule for the text up to the first ``mark``, with the mark."""
        if mark in self._ids:
            return f"{rule}: {ANY_TEXT} {self.terminal(mark)}"
        return rf"{rule}[lazy]: /(.|\n)*{escaped(mark)}/"

    def text_without(self, name: str, marks: Sequence[str], text: str = ANY_TEXT) -> str:
        """Return the terminal ``name``: a text, here of a certain form, with none of ``marks``."""
        # Text never matches special tokens.
        unwanted = [rf" & ~/(.|\n)*{escaped(mark)}(.|\n)*/" for mark in marks if mark not in self._ids]
        return f"{name}: {text}{''.join(unwanted)}"


def repeated(item: str, most: int) -> str:
    """Return up to ``most`` times ``item``; nothing for 0."""
    return f" ({item}){{0,{most}}}" if most > 0 else ""
