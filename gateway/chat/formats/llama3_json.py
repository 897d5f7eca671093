"""Llama 3's tool calls: the reply is a JSON object, perhaps after ``<|python_tag|>``."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.chat.json_call import CallState, JsonCallParser
from gateway.chat.lark import Marks
from gateway.chat.tool_format import ToolFormat, json_calls
from gateway.chat.tools import Tool

TAG = "<|python_tag|>"


class Llama3JsonParser(JsonCallParser):
    """Objects after the first follow a semicolon. Without the tag, calls can only begin a reply."""

    # Whether an object may come next, without the tag.
    _may_begin = True

    def _step(self, finished: bool) -> bool:
        if self._call is not None:
            state = self._read_call(finished)
            self._may_begin = state is CallState.DONE
            return state is not None
        if self._may_begin:
            return self._read_start(finished)
        if self._find((TAG,), finished) is None:
            return False
        self._begin_object(TAG)
        return True

    def _read_start(self, finished: bool) -> bool:
        """Decide whether an object begins here."""
        separator = ";" if self._num_calls else ""
        text = self._text.lstrip().removeprefix(separator).lstrip()
        if not text and not finished:
            return False
        self._may_begin = False
        if text.startswith("{"):
            before = self._text[: len(self._text) - len(text)]
            self._text = text
            self._begin_object(before)
        return True


class Llama3Json(ToolFormat):
    """The mark and grammar of a single JSON object."""

    name = "llama3_json"
    aliases = ("llama3", "llama4_json")
    marks = (TAG,)
    parser = Llama3JsonParser
    # The templates refuse more.
    max_calls = 1

    @staticmethod
    def fits(template: str) -> bool:
        return TAG in template or '"parameters": dictionary' in template

    def rules(self, tools: Sequence[Tool], marks: Marks, most: int) -> list[str]:
        return [
            f"calls: {marks.terminal(TAG)}? one_call",
            "reply: TEXT | calls",
            marks.text_without("TEXT", (TAG,), r"/(\s*[^\s{](.|\n)*)?/"),
            *json_calls(tools, "parameters"),
        ]
