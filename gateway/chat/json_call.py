"""Read tool calls written as JSON while they stream."""

from __future__ import annotations

import json
import re
from enum import Enum, auto

from gateway.chat.call_parser import CallParser, json_text
from gateway.chat.nesting import Nesting

# The usual order of keys. It shows the name before the arguments, so that they can stream.
_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]*)"\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
# Names are short, so a head is too.
_MAX_HEAD_CHARS = 1024
_FIRST_KEY = re.compile(r'\s*\{\s*(?:"([^"\\]*)"|([^"\s]))')
_KEYS = frozenset({"name", "arguments", "parameters", "type", "id", "function"})


class CallState(Enum):
    """What the text so far says of a call."""

    UNDECIDED = auto()
    # The name is known; arguments stream.
    CALLING = auto()
    # The arguments are complete; the object is not.
    CLOSING = auto()
    DONE = auto()
    NOT_A_CALL = auto()


class JsonCall:
    """Reads one JSON object with a function's name and its arguments.

    The arguments stream if the name comes first; otherwise they wait until the object is complete.

    Attributes:
        state: what is known of the object.
        name: the function's name, once the state is CALLING.
        text: when the object is done, what follows it; when it is no call, all that was read.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self.state = CallState.UNDECIDED
        self.name = ""
        self.text = ""
        self._nesting = Nesting()
        # The place up to which the nesting has read the text.
        self._place = 0

    def feed(self, text: str) -> str:
        """Return the arguments that ``text`` adds. Feed nothing after the object's end."""
        self.text += text
        arguments = ""
        if self.state is CallState.UNDECIDED:
            arguments = self._decide()
        if self.state is CallState.CALLING:
            end = self._nesting.end(self.text, self._place, 1)
            stop = len(self.text) if end < 0 else end
            arguments = self.text[self._place : stop]
            self._cut(stop)
            if end >= 0:
                self.state = CallState.CLOSING
        if self.state is CallState.CLOSING:
            self._close()
        return arguments

    def _decide(self) -> str:
        """Find out whether it is a call; return the arguments if they are all there."""
        head = _HEAD.match(self.text, 0, _MAX_HEAD_CHARS)
        if head is not None:
            if head[1] in self._names:
                self.name = head[1]
                self.state = CallState.CALLING
                self._nesting = Nesting(depth=1)
                self._place = head.end()
            else:
                self.state = CallState.NOT_A_CALL
            return ""
        blank = self.text.lstrip()
        first = _FIRST_KEY.match(self.text)
        if (blank and blank[0] != "{") or (first is not None and first[1] not in _KEYS):
            self.state = CallState.NOT_A_CALL
            return ""
        end = self._nesting.end(self.text, self._place, 0)
        if end < 0:
            self._place = len(self.text)
            return ""
        return self._read_whole(end)

    def _read_whole(self, end: int) -> str:
        try:
            value = json.loads(self.text[:end], strict=False)
            value = value.get("function", value) if isinstance(value.get("function"), dict) else value
            arguments = value.get("arguments", value.get("parameters"))
            text = arguments if isinstance(arguments, str) else json_text(arguments)
            is_object = isinstance(json.loads(text), dict)
        except (ValueError, RecursionError):
            is_object = False
        if not is_object or value.get("name") not in self._names:
            self.state = CallState.NOT_A_CALL
            return ""
        self.name = value["name"]
        self.text = self.text[end:]
        self.state = CallState.DONE
        return text

    def _close(self) -> None:
        end = self._nesting.end(self.text, self._place, 0)
        self._cut(len(self.text) if end < 0 else end)
        if end >= 0:
            self.state = CallState.DONE

    def _cut(self, place: int) -> None:
        """Forget the text up to ``place``, which was read."""
        self.text = self.text[place:]
        self._place = 0


class JsonCallParser(CallParser):
    """Base of the parsers whose calls are JSON objects."""

    # The object that is being read.
    _call: JsonCall | None = None
    # What stood before it.
    _mark = ""

    def _begin_object(self, mark: str) -> None:
        """Read an object from now on, which comes after ``mark``."""
        self._mark = mark
        self._call = JsonCall(self.names)

    def _is_in_call(self) -> bool:
        return self._call is not None

    def _read_call(self, finished: bool) -> CallState | None:
        """Read more of the current object.

        Return its state if it is over; then the text after it, or of what is no call, is undecided.
        """
        call = self._call
        assert call is not None
        text, self._text = self._text, ""
        was_known = bool(call.name)
        arguments = call.feed(text)
        if call.name and not was_known:
            self._begin_call(call.name)
        self._add_arguments(arguments)
        if finished and call.state is CallState.UNDECIDED:
            call.state = CallState.NOT_A_CALL
        if call.state not in (CallState.DONE, CallState.NOT_A_CALL):
            return None
        self._call = None
        self._text = call.text
        if call.state is CallState.NOT_A_CALL:
            self._give_back(self._mark)
        return call.state
