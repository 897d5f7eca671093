"""Split the text of an output into content, reasoning and tool calls, as it streams."""

from __future__ import annotations

from typing import Protocol

from gateway.chat.pieces import ReplyPieces, ToolCallDelta
from gateway.chat.reasoning import ReasoningPlace


class ReasoningParser(Protocol):
    """Splits one output's text into reasoning and what follows it."""

    @property
    def is_inside(self) -> bool:
        """Return whether the text so far ends in reasoning."""
        ...

    def feed(self, text: str, *, finished: bool) -> tuple[str, str]:
        """Return the reasoning and the text after it that ``text`` makes certain."""
        ...


class ToolParser(Protocol):
    """Finds the tool calls in one output's text."""

    def feed(self, text: str, *, finished: bool) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """Return the content and the calls' parts that ``text`` makes certain."""
        ...


class ReplyReader:
    """Reads one output. How its text is split over calls of ``feed`` does not matter."""

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        tools: ToolParser | None = None,
        *,
        max_calls: int | None = None,
        reasoning_place: ReasoningPlace = ReasoningPlace.APART,
    ) -> None:
        """Without parsers all text is content. Calls after the first ``max_calls`` are left out."""
        self._max_calls = max_calls
        self._reasoning = reasoning
        self._tools = tools
        self._reasoning_place = reasoning_place
        # Text that may be reasoning; kept only if reasoning belongs to the content.
        self._undecided = ""
        # Whether a tool call has come: then an output that stopped ended for its calls.
        self.has_calls = False

    @property
    def is_reasoning(self) -> bool:
        """Return whether the text so far ends in reasoning."""
        return self._reasoning is not None and self._reasoning.is_inside

    def feed(self, text: str, *, finished: bool) -> ReplyPieces:
        """Return what ``text`` adds to the reply; text that may begin a marker waits.

        ``finished``: no text follows, so nothing waits any longer.
        """
        reasoning = before = ""
        calls: tuple[ToolCallDelta, ...] = ()
        if self._reasoning is not None:
            written = text
            reasoning, text = self._reasoning.feed(text, finished=finished)
            if self._reasoning_place is ReasoningPlace.CONTENT:
                before = self._before(written, text, finished=finished)
            if self._reasoning_place is not ReasoningPlace.APART:
                reasoning = ""
        if self._tools is not None:
            text, calls = self._tools.feed(text, finished=finished)
            if self._max_calls is not None:
                calls = tuple(call for call in calls if call.index < self._max_calls)
            self.has_calls = self.has_calls or bool(calls)
        return ReplyPieces(before + text, reasoning, calls)

    def _before(self, written: str, answer: str, *, finished: bool) -> str:
        """Return the text before ``answer``, at the end of ``written``, that the content has too."""
        self._undecided += written
        if not (answer or finished or self.is_reasoning):
            return ""
        before = self._undecided.removesuffix(answer)
        self._undecided = ""
        return before
