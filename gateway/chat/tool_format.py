"""What the form in which a model writes tool calls must define."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from foretoken import limits
from gateway.chat import lark
from gateway.chat.call_parser import CallParser
from gateway.chat.lark import Marks
from gateway.chat.tools import Tool

# With these a schema may allow properties that it does not list.
_OPENING_KEYS = frozenset(
    {"additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas"}
)


class ToolFormat(ABC):
    """One form of tool calls: how it is read, and its grammar."""

    # Of --tool-call-parser; aliases are vLLM's and SGLang's names of the same form.
    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    # Texts that may be special tokens of a tokenizer.
    marks: ClassVar[tuple[str, ...]]
    # Parses one output.
    parser: ClassVar[type[CallParser]]
    # Calls that one reply may hold where the grammar decides its form.
    max_calls: ClassVar[int] = limits.MAX_TOOL_CALLS

    def __init__(self, template: str = "") -> None:
        """``template``: the model's chat template, for forms that have variants."""
        self.template = template

    @staticmethod
    @abstractmethod
    def fits(template: str) -> bool:
        """Return whether a chat template asks the model for this form."""

    @abstractmethod
    def rules(self, tools: Sequence[Tool], marks: Marks, most: int) -> list[str]:
        """Return Lark rules of calls whose arguments follow the schemas of ``tools``.

        The rule ``calls`` is a reply of 1 to ``most`` calls and nothing else; ``reply`` is a text
        that may hold or be such calls.
        """


def json_calls(tools: Sequence[Tool], arguments_key: str) -> list[str]:
    """Return the rule ``one_call``: a JSON object with a function's name and its arguments."""
    heads = [lark.literal(f'{{"name": "{tool.name}", "{arguments_key}": ') for tool in tools]
    calls = [f'{head} args_{number} "}}"' for number, head in enumerate(heads)]
    return [f"one_call: {' | '.join(calls)}", *argument_rules(tools)]


def argument_rules(tools: Sequence[Tool]) -> list[str]:
    """Return the rules ``args_0``, ``args_1`` and so on: each tool's arguments as a JSON object."""
    return [f"args_{number}: {lark.json_value(closed(tool.schema))}" for number, tool in enumerate(tools)]


def closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema that allows no arguments but its properties, unless it speaks of others.

    Functions take no arguments that they do not know, and few clients say so in their schemas.
    """
    is_open = "properties" not in schema or bool(_OPENING_KEYS & schema.keys())
    return schema if is_open else {**schema, "additionalProperties": False}
