"""Stop strings in streamed text: what may be shown now, what must wait, where the text ends."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string to be completed, however the text is split.

    Text that could be the beginning of a stop string is held back until the next text decides. If several stop
    strings are completed by the same character, the longest match (the one that starts first) counts.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """``stops``: non-empty strings. ``include_stop``: the text ends after the match instead of before it."""
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, *, honour: bool = True) -> str:
        """The text that may be shown after ``text`` came in.

        With ``honour`` false a stop string that is completed within ``text`` does not count; one that only begins
        there may be completed later. After a match nothing more may be fed.
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
        """The text held back, at the end of the generation."""
        text, self._held = self._held, ""
        return text

    def _find(self, text: str, num_held: int) -> tuple[int, str] | None:
        """Start and stop string of the match that ends first; matches within the held text were not honoured."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, num_held - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _num_held(self, text: str) -> int:
        """Length of the longest end of ``text`` that is a proper beginning of a stop string."""
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
