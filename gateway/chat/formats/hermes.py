"""Hermes' and Qwen's tool calls: ``<tool_call>`` around a JSON object, once for each call."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.chat import lark
from gateway.chat.json_call import CallState, JsonCallParser
from gateway.chat.lark import Marks
from gateway.chat.tool_format import ToolFormat, json_calls
from gateway.chat.tools import Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(JsonCallParser):
    """Text may stand between the calls, which have a mark at both ends."""

    _is_closing = False

    def _step(self, finished: bool) -> bool:
        if self._is_closing:
            return self._read_close(finished)
        if self._call is not None:
            state = self._read_call(finished)
            self._is_closing = state is CallState.DONE
            return state is not None
        if self._find((OPEN,), finished) is None:
            return False
        self._begin_object(OPEN)
        return True

    def _read_close(self, finished: bool) -> bool:
        text = self._text.lstrip()
        if CLOSE.startswith(text):
            if not finished:
                return False
            text = ""
        self._text = text.removeprefix(CLOSE)
        self._is_closing = False
        return True


class Hermes(ToolFormat):
    """The marks and grammar of ``<tool_call>``."""

    name = "hermes"
    aliases = ("qwen", "qwen25")
    marks = (OPEN, CLOSE)
    parser = HermesParser

    @staticmethod
    def fits(template: str) -> bool:
        # Others write no JSON between the same marks.
        return OPEN in template and "<function=" not in template and "<arg_key>" not in template

    def rules(self, tools: Sequence[Tool], marks: Marks, most: int) -> list[str]:
        opening = marks.terminal(OPEN)
        return [
            f"calls: {opening} body{lark.repeated(f'BREAK {opening} body', most - 1)}",
            "reply: TEXT | lead body" if most == 1 else f"reply: {lark.repeated('lead body', most)} TEXT",
            f'body: "\\n" one_call "\\n" {marks.terminal(CLOSE)}',
            r"BREAK: /\n?/",
            marks.up_to("lead", OPEN),
            marks.text_without("TEXT", (OPEN,)),
            *json_calls(tools, "arguments"),
        ]
