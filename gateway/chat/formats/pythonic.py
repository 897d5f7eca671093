"""Pythonic tool calls: the reply is a Python list of calls with keyword arguments."""

from __future__ import annotations

import ast
import keyword
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from foretoken import limits
from gateway.chat import lark
from gateway.chat.call_parser import CallParser, Constraint, json_text
from gateway.chat.lark import Marks
from gateway.chat.nesting import Nesting
from gateway.chat.tool_format import ToolFormat, closed
from gateway.chat.tools import Tool

# Llama 4 may put the list between these.
START, END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"\s*([A-Za-z0-9_.-]+)\(")
_NAME_CHARS = re.compile(r"\s*[A-Za-z0-9_.-]*")
_CONSTANTS: Mapping[str, bool | None] = {"true": True, "false": False, "null": None}
# Brackets, blanks and operators outside strings: parsing takes time for each.
_PATTERNS = {
    "": re.compile(r"[\"'(){}\[\],\s+*/%<>=&|^~:@.-]"),
    '"': re.compile(r'[\\"]'),
    "'": re.compile(r"[\\']"),
}
# A JSON schema's own words that do not matter once its properties are known.
_PLAIN_KEYS = frozenset(
    {"type", "properties", "required", "additionalProperties", "title", "description", "$defs", "definitions"}
)


class PythonicParser(CallParser):
    """A call is shown when it is complete: only then is it known to be one."""

    # What the next step reads: "start", "text", "name", "arguments" or "separator".
    _state = "start"
    # What stood before the current call.
    _before = ""
    # The current call: its name, and where its arguments begin and are read on.
    _name = ""
    _begin = 0
    _place = 0

    def __init__(self, names: frozenset[str], hidden: frozenset[str], constraint: Constraint = Constraint.NONE) -> None:
        super().__init__(names, hidden, constraint)
        self._nesting = Nesting(_PATTERNS, depth=1)

    def _is_in_call(self) -> bool:
        return self._state in ("name", "arguments")

    def _step(self, finished: bool) -> bool:
        match self._state:
            case "start":
                return self._read_start(finished)
            case "name":
                return self._read_name(finished)
            case "arguments":
                return self._read_arguments(finished)
            case "separator":
                return self._read_separator(finished)
        mark = self._find((START, END), finished)
        if mark == START:
            self._state = "start"
        return mark is not None

    def _read_start(self, finished: bool) -> bool:
        text = self._text.lstrip()
        if not finished and (not text or (START.startswith(text) and text != START)):
            return False
        if text.startswith(START):
            self._text = text.removeprefix(START)
        elif text.startswith("["):
            self._state, self._before = "name", "["
            self._blanks += self._text[: len(self._text) - len(text)]
            self._text = text[1:]
        else:
            self._state = "text"
        return True

    def _read_name(self, finished: bool) -> bool:
        found = _NAME.match(self._text)
        if found is None and not finished and _NAME_CHARS.fullmatch(self._text):
            return False
        if found is None or found[1] not in self.names:
            return self._refuse()
        self._name = found[1]
        self._state = "arguments"
        self._begin = self._place = found.end()
        self._nesting = Nesting(_PATTERNS, depth=1)
        return True

    def _read_arguments(self, finished: bool) -> bool:
        end = self._nesting.end(self._text, self._place)
        if end < 0:
            self._place = len(self._text)
            return self._refuse() if finished else False
        is_short = self._nesting.num_marks <= limits.MAX_PYTHONIC_MARKS
        arguments = _arguments(self._text[self._begin : end - 1]) if is_short else None
        if arguments is None:
            return self._refuse()
        self._begin_call(self._name, arguments)
        self._text = self._text[end:]
        self._state = "separator"
        return True

    def _read_separator(self, finished: bool) -> bool:
        text = self._text.lstrip()
        if not text and not finished:
            return False
        self._state = "text"
        if text.startswith(","):
            self._state, self._before = "name", ","
            self._text = text[1:]
        elif text.startswith("]"):
            self._text = text[1:]
        return True

    def _refuse(self) -> bool:
        """Take what was read since the last call as content."""
        self._show(self._before)
        self._state = "text"
        return True


def _arguments(text: str) -> str | None:
    """Return the JSON of keyword arguments; None if they are anything else."""
    try:
        with warnings.catch_warnings():
            # Of odd escapes in strings, which Python keeps as they are.
            warnings.simplefilter("ignore")
            call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            return None
        values: dict[str, Any] = {}
        for item in call.keywords:
            value = _value(item.value)
            if item.arg is not None:
                values[item.arg] = value
            elif isinstance(value, dict):
                values |= value
            else:
                return None
        return json_text(values)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # MemoryError: the parser's own limit of nesting.
        return None


def _value(node: ast.expr) -> Any:
    """Return a literal's value; JSON's names of constants are fine too. Raises ValueError."""
    match node:
        case ast.Constant(value=str() | int() | float() | bool() | None as value):
            return value
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [_value(key) if key is not None else None for key in keys]
            if not all(isinstance(name, str) for name in names):
                raise ValueError("a key is not a string")
            return dict(zip(names, map(_value, values), strict=True))
    raise ValueError("not a literal")


class Pythonic(ToolFormat):
    """The marks and grammar of a list of calls."""

    name = "pythonic"
    aliases = ("llama4_pythonic",)
    marks = (START, END)
    parser = PythonicParser

    @staticmethod
    def fits(template: str) -> bool:
        return "[func_name1(" in template

    def rules(self, tools: Sequence[Tool], marks: Marks, most: int) -> list[str]:
        calls = [
            f"""{lark.literal(f"{tool.name}({'' if _is_plain(tool) else '**'}")} keywords_{number}_0 ")\""""
            for number, tool in enumerate(tools)
        ]
        return [
            f'calls: "[" one_call{lark.repeated("COMMA one_call", most - 1)} "]"',
            "reply: TEXT | calls",
            'COMMA: ", "',
            marks.text_without("TEXT", (START,), r"/(\s*[^\s\[](.|\n)*)?/"),
            f"one_call: {' | '.join(calls)}",
            *(rule for number, tool in enumerate(tools) for rule in _keyword_rules(number, tool)),
        ]


def _is_plain(tool: Tool) -> bool:
    """Return whether the schema lists properties whose names can be keywords.

    Others are ``**{...}``.
    """
    properties = tool.schema.get("properties", {})
    return (
        _PLAIN_KEYS.issuperset(tool.schema)
        and isinstance(properties, dict)
        and all(name.isidentifier() and not keyword.iskeyword(name) for name in properties)
        and all(isinstance(schema, dict) for schema in properties.values())
    )


def _keyword_rules(number: int, tool: Tool) -> list[str]:
    """Return the rules of one function's arguments; their values are JSON, which is near Python.

    ``keywords_N_i`` begins at property i, ``more_N_i`` follows another argument.
    """
    if not _is_plain(tool):
        return [f"keywords_{number}_0: {lark.json_value(closed(tool.schema))}"]
    properties: Mapping[str, Any] = tool.schema.get("properties", {})
    required = tool.schema.get("required", ())
    definitions = {key: tool.schema[key] for key in ("$defs", "definitions") if key in tool.schema}
    rules = []
    for i, (name, schema) in enumerate(properties.items()):
        value, then = f"value_{number}_{i}", f"more_{number}_{i + 1}"
        skip = "" if name in required else " | {}" + f"_{number}_{i + 1}"
        rules += [
            f"keywords_{number}_{i}: {lark.literal(f'{name}=')} {value} {then}{skip.format('keywords')}",
            f"more_{number}_{i}: {lark.literal(f', {name}=')} {value} {then}{skip.format('more')}",
            f"{value}: {lark.json_value(definitions | schema)}",
        ]
    return [*rules, f'keywords_{number}_{len(properties)}: ""', f'more_{number}_{len(properties)}: ""']
