"""Base of the parsers of tool calls: undecided text, content, and the calls' deltas."""

from __future__ import annotations

import json
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum, auto

from gateway.chat.pieces import ToolCallDelta

# Some chat templates refuse ids of any other form.
_ID_CHARS = string.ascii_letters + string.digits
ID_LENGTH = 9


class Constraint(Enum):
    """What a grammar makes of a reply's calls."""

    # The model writes as it likes: what begins like a call may turn out to be text.
    NONE = auto()
    # What begins like a call is one.
    CALLS = auto()
    # The reply is calls and nothing else.
    REPLY = auto()


class CallParser(ABC):
    """Reads one output. A format's parser decides text in steps, and how it is split never matters.

    Blanks before a call belong to its form and are not shown. What turns out not to be a call is
    content, except the names of hidden special tokens. Where a grammar makes the calls, a call that
    is cut before its name is known is left out.
    """

    def __init__(self, names: frozenset[str], hidden: frozenset[str], constraint: Constraint = Constraint.NONE) -> None:
        """``names``: of the functions that may be called. ``hidden``: marks that no reader sees."""
        self.names = names
        self._hidden = hidden
        self._constraint = constraint
        # Text that is not decided yet.
        self._text = ""
        # Blanks after the content so far, shown if content follows.
        self._blanks = ""
        self._content: list[str] = []
        self._deltas: list[ToolCallDelta] = []
        self._num_calls = 0

    def feed(self, text: str, *, finished: bool) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """Return the content and the calls' parts that ``text`` makes certain."""
        self._text += text
        while self._step(False):
            pass
        if finished and self._is_cut_call():
            self._text = self._blanks = ""
        elif finished:
            while self._step(True):
                pass
        if finished and not self._num_calls:
            self._content.append(self._blanks)
        content, deltas = "".join(self._content), tuple(self._deltas)
        self._content, self._deltas = [], []
        return content, deltas

    def _is_cut_call(self) -> bool:
        """Return whether the undecided text at the end can only be a call that was cut."""
        match self._constraint:
            case Constraint.NONE:
                return False
            case Constraint.CALLS:
                return self._is_in_call()
            case Constraint.REPLY:
                return True

    @abstractmethod
    def _is_in_call(self) -> bool:
        """Return whether the undecided text follows the beginning of a call."""

    @abstractmethod
    def _step(self, finished: bool) -> bool:
        """Decide more of the text. Return False if that needs more text.

        ``finished``: no text follows, so all of it must be decided.
        """

    def _find(self, marks: Sequence[str], finished: bool) -> str | None:
        """Show the text up to the first of ``marks`` and drop both. Return the mark.

        None: there is none yet; text that may begin one waits.
        """
        found = [(place, mark) for mark in marks if (place := self._text.find(mark)) >= 0]
        if found:
            place, mark = min(found)
            self._show(self._text[:place])
            self._text = self._text[place + len(mark) :]
            return mark
        keep = 0 if finished else max(_num_begun(self._text, mark) for mark in marks)
        certain = len(self._text) - keep
        self._show(self._text[:certain])
        self._text = self._text[certain:]
        return None

    def _show(self, text: str) -> None:
        """Add content."""
        body = text.rstrip()
        if body:
            self._content += (self._blanks, body)
            self._blanks = text[len(body) :]
        else:
            self._blanks += text

    def _give_back(self, mark: str) -> None:
        """Show a mark that began no call, unless it is hidden."""
        if mark not in self._hidden:
            self._show(mark)

    def _begin_call(self, name: str, arguments: str = "") -> None:
        self._blanks = ""
        call_id = "".join(secrets.choice(_ID_CHARS) for _ in range(ID_LENGTH))
        self._deltas.append(ToolCallDelta(self._num_calls, call_id, name, arguments))
        self._num_calls += 1

    def _add_arguments(self, arguments: str) -> None:
        """Add to the arguments of the call that began last."""
        if not arguments:
            return
        index = self._num_calls - 1
        if self._deltas and self._deltas[-1].index == index:
            last = self._deltas[-1]
            self._deltas[-1] = ToolCallDelta(index, last.id, last.name, last.arguments + arguments)
        else:
            self._deltas.append(ToolCallDelta(index, arguments=arguments))


def json_text(value: object) -> str:
    """Return a value's JSON. Raises ValueError if it has none."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        # Half of a surrogate pair: only an escape can spell it.
        text = json.dumps(value, allow_nan=False)
    return text


def _num_begun(text: str, mark: str) -> int:
    """Return the length of the longest end of ``text`` that may begin ``mark``."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
