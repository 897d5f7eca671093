"""Mistral's tool calls after ``[TOOL_CALLS]``: a JSON list, or a name and its arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gateway.chat import lark
from gateway.chat.json_call import CallState, JsonCallParser
from gateway.chat.lark import Marks
from gateway.chat.nesting import Nesting
from gateway.chat.tool_format import ToolFormat, argument_rules, json_calls
from gateway.chat.tools import Tool

CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
# Before the arguments: ``name[ARGS]``, ``name[CALL_ID]abc[ARGS]`` or just ``name``.
_HEAD = re.compile(r"\s*([A-Za-z0-9_.-]+)\s*(?:\[CALL_ID\]\s*[A-Za-z0-9]*\s*)?(?:\[ARGS\]\s*)?")
_HEAD_CHARS = re.compile(r"[A-Za-z0-9_.\-\[\]\s]*")
_MAX_HEAD_CHARS = 256


class MistralParser(JsonCallParser):
    """Decides after the mark whether a list follows, or a name and its arguments."""

    # Set inside the marks of a list.
    _in_list = False
    # Follows the arguments after a name.
    _arguments: Nesting | None = None
    _after_mark = False

    def _step(self, finished: bool) -> bool:
        if self._arguments is not None:
            return self._read_arguments(self._arguments)
        if self._call is not None:
            state = self._read_call(finished)
            self._in_list = state is CallState.DONE
            return state is not None
        if self._in_list:
            return self._read_separator(finished)
        if self._after_mark:
            return self._read_head(finished)
        self._after_mark = self._find((CALLS,), finished) is not None
        return self._after_mark

    def _is_in_call(self) -> bool:
        return self._after_mark or super()._is_in_call()

    def _read_head(self, finished: bool) -> bool:
        """Decide what follows the mark."""
        text = self._text.lstrip()
        if text.startswith("["):
            self._after_mark = False
            self._text = text[1:]
            self._begin_object("[" if CALLS in self._hidden else f"{CALLS}[")
            return True
        brace = self._text.find("{", 0, _MAX_HEAD_CHARS)
        if brace < 0:
            head = self._text[:_MAX_HEAD_CHARS]
            if not finished and len(head) < _MAX_HEAD_CHARS and _HEAD_CHARS.fullmatch(head):
                return False
        self._after_mark = False
        found = _HEAD.fullmatch(self._text, 0, max(brace, 0))
        if found is None or found[1] not in self.names:
            self._give_back(CALLS)
            return True
        self._begin_call(found[1])
        self._text = self._text[brace:]
        self._arguments = Nesting()
        return True

    def _read_arguments(self, nesting: Nesting) -> bool:
        end = nesting.end(self._text, 0, 0)
        if end < 0:
            self._add_arguments(self._text)
            self._text = ""
            return False
        self._add_arguments(self._text[:end])
        self._text = self._text[end:]
        self._arguments = None
        return True

    def _read_separator(self, finished: bool) -> bool:
        """Read on after an object of a list."""
        text = self._text.lstrip()
        if not text and not finished:
            return False
        self._in_list = False
        if text.startswith(","):
            self._text = text[1:]
            self._begin_object(",")
        elif text.startswith("]"):
            self._text = text[1:]
        return True


class Mistral(ToolFormat):
    """The marks and grammar of both forms."""

    name = "mistral"
    marks = (CALLS, CALL_ID, ARGS)
    parser = MistralParser

    @staticmethod
    def fits(template: str) -> bool:
        return CALLS in template

    def rules(self, tools: Sequence[Tool], marks: Marks, most: int) -> list[str]:
        opening = marks.terminal(CALLS)
        text = marks.text_without("TEXT", (CALLS,))
        if ARGS not in self.template:
            # Templates of older models know only lists.
            return [
                f"calls: {opening} list",
                "reply: TEXT | lead list",
                rf'list: / ?\[/ one_call{lark.repeated("COMMA one_call", most - 1)} "]"',
                'COMMA: ", "',
                marks.up_to("lead", CALLS),
                text,
                *json_calls(tools, "arguments"),
            ]
        heads = [f"{lark.literal(tool.name)} {marks.terminal(ARGS)} args_{number}" for number, tool in enumerate(tools)]
        more = lark.repeated(f"{opening} one_call", most - 1)
        return [
            f"calls: {opening} one_call{more}",
            f"reply: TEXT | lead one_call{more}",
            f"one_call: {' | '.join(heads)}",
            marks.up_to("lead", CALLS),
            text,
            *argument_rules(tools),
        ]
