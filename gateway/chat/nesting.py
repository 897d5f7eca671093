"""Follow the brackets of a text that streams."""

from __future__ import annotations

import re
from collections.abc import Mapping

# What matters, by the quote of the string that the text is in; empty: outside strings.
Patterns = Mapping[str, re.Pattern[str]]
JSON_PATTERNS: Patterns = {"": re.compile(r'["{}\[\]]'), '"': re.compile(r'["\\]')}


class Nesting:
    """The brackets that are open in a text, and whether it is in a string.

    Attributes:
        num_marks: marks outside strings so far.
    """

    def __init__(self, patterns: Patterns = JSON_PATTERNS, depth: int = 0) -> None:
        self._patterns, self._depth = patterns, depth
        self.num_marks = 0
        self._quote = ""
        self._escaped = False

    def end(self, text: str, start: int, depth: int = 0) -> int:
        """Return the place after the bracket that closes down to ``depth``; -1 if it is not there.

        Then all of the text counts as read.
        """
        place = start
        while place < len(text):
            if self._escaped:
                self._escaped = False
                place += 1
                continue
            found = self._patterns[self._quote].search(text, place)
            if found is None:
                return -1
            place = found.end()
            mark = found[0]
            self.num_marks += not self._quote
            if mark == "\\":
                self._escaped = True
            elif mark in "\"'":
                self._quote = "" if self._quote else mark
            elif mark in "([{":
                self._depth += 1
            elif mark in ")]}":
                self._depth -= 1
                if self._depth <= depth:
                    return place
        return -1
