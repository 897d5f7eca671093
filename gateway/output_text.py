"""The text of one output: tokens become text, and stop strings end it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gateway.detokenizer import Detokenizer
from gateway.stop import StopMatcher


class OutputText:
    """Decodes the tokens of one output up to the first stop string."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], *, include_stop: bool, min_tokens: int) -> None:
        """A stop string counts only after ``min_tokens`` tokens."""
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops, include_stop=include_stop)
        self._has_stops = bool(stops)
        self._min_tokens = min_tokens
        self._num_tokens = 0

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text."""
        return self._matcher.matched

    def feed(self, token_ids: Iterable[int]) -> list[str]:
        """Return the text that each token adds; stop after the token that completes a stop string.

        A token may add "": its text waits until a character or a possible stop string is complete.
        """
        feed = self._detokenizer.feed
        if not self._has_stops:
            return [feed((token_id,)) for token_id in token_ids]
        texts: list[str] = []
        for token_id in token_ids:
            self._num_tokens += 1
            texts.append(self._match(feed((token_id,))))
            if self.matched is not None:
                break
        return texts

    def flush(self) -> str:
        """Return the text that still waits, at the end of the output."""
        return self._match(self._detokenizer.flush()) + self._matcher.flush()

    def _match(self, text: str) -> str:
        return self._matcher.feed(text, honour=self._num_tokens >= self._min_tokens)
