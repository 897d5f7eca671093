"""Find stop strings in streamed text, and hold back text that may begin one."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the stop string that is completed first, however the text is split.

    Text that may begin a stop string waits until the next text decides. If one character completes
    several stop strings, the longest match counts.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """``stops``: non-empty strings.

        ``include_stop``: the text ends after the match, not before.
        """
        self._stops = tuple(stops)
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
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, num_held - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _num_held(self, text: str) -> int:
        """Return the length of the longest end of ``text`` that may begin a stop string."""
        longest = 0
        for stop in self._stops:
            first = stop[0]
            start = text.find(first, max(0, len(text) - len(stop) + 1))
            while start >= 0 and len(text) - start > longest:
                if stop.startswith(text[start:]):
                    longest = len(text) - start
                    break
                start = text.find(first, start + 1)
        return longest
