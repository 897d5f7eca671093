"""Find stop strings in streamed text, and hold back text that may begin one."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the stop string that is completed first, however the text is split.

    Text that may begin a stop string waits until the next text decides. If one character completes
    several stop strings, the longest match counts. Only stop strings that begin or end with a
    character of the new text are compared, so many of them cost little more than one.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """``stops``: non-empty strings.

        ``include_stop``: the text ends after the match, not before.
        """
        # By their first and last character, the longest first.
        self._by_first: dict[str, list[str]] = {}
        self._by_last: dict[str, list[str]] = {}
        for stop in sorted(set(stops), key=len, reverse=True):
            self._by_first.setdefault(stop[0], []).append(stop)
            self._by_last.setdefault(stop[-1], []).append(stop)
        self._longest = max(map(len, stops), default=0)
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, *, honour: bool = True) -> str:
        """Add ``text``; return the text that may be shown now.

        With ``honour`` false, a stop string completed within ``text`` does not count; one that only
        begins there may be completed later. Feed nothing after a match.
        """
        num_held = len(self._held)
        text = self._held + text
        if honour:
            found = self._find(text, num_held)
            if found is not None:
                start, self.matched = found
                self._held = ""
                return text[: start + len(self.matched)] if self._include_stop else text[:start]
        keep = self._num_held(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return the text held back, at the end of the output."""
        text, self._held = self._held, ""
        return text

    def _find(self, text: str, num_held: int) -> tuple[int, str] | None:
        """Return the start and stop string of the match that ends first, after the held text."""
        if self._by_last.keys().isdisjoint(text[num_held:]):
            return None
        for end in range(num_held, len(text)):
            for stop in self._by_last.get(text[end], ()):
                if text.endswith(stop, 0, end + 1):
                    return end + 1 - len(stop), stop
        return None

    def _num_held(self, text: str) -> int:
        """Return the length of the longest end of ``text`` that may begin a stop string."""
        first = max(0, len(text) - self._longest + 1)
        if self._by_first.keys().isdisjoint(text[first:]):
            return 0
        for start in range(first, len(text)):
            for stop in self._by_first.get(text[start], ()):
                if len(stop) > len(text) - start and stop.startswith(text[start:]):
                    return len(text) - start
        return 0
