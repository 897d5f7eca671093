"""Write the grammar of a whole reply: reasoning, then tool calls or an answer."""

from __future__ import annotations

import dataclasses
import re

import orjson

from foretoken.sampling import Grammar
from gateway.chat import lark
from gateway.chat.lark import Marks
from gateway.chat.reasoning import ReasoningFormat, Thinking
from gateway.chat.tool_format import ToolFormat
from gateway.chat.tools import Tool, ToolUse

# A rule that is a schema, or for a tool's arguments a part of one.
_SCHEMA_RULE = re.compile(r"(?:(?:args|keywords|value)_(\d+)[_\d]*|answer|content): %json ")
# Follows all rules of tools; the client may have written what follows.
_ANSWER_RULE = re.compile(r"(?:answer|content): (?!calls|reply)")


def reply_grammar(
    content: Grammar | None,
    use: ToolUse,
    tools: ToolFormat | None,
    reasoning: ReasoningFormat | None,
    thinking: Thinking,
    marks: Marks,
) -> Grammar | None:
    """Return what the output must match; None if it is free.

    ``content``: what an answer without calls must match. ``tools`` and ``reasoning``: None if the
    reply has none.
    """
    if tools is not None and use.must_call:
        rules = ["answer: calls", *_call_rules(tools, use, marks)]
    elif tools is not None and (content is not None or any(tool.strict for tool in use.callable)):
        rules = _call_rules(tools, use, marks)
        # Free text may hold calls; a text of a grammar cannot.
        rules += ["answer: reply"] if content is None else ["answer: calls | content", f"content: {_content(content)}"]
    elif content is None or reasoning is None:
        return content
    else:
        rules = [f"answer: {_content(content)}"]
    return Grammar("lark", "\n".join([*_start(reasoning, thinking, marks), *rules, ""]))


def schema_tools(grammar: Grammar, use: ToolUse) -> dict[int, str | None]:
    """Return which tool's schema begins on a line of a reply's grammar; None: the answer's."""
    found: dict[int, str | None] = {}
    for number, line in enumerate(grammar.text.split("\n"), 1):
        if (rule := _SCHEMA_RULE.match(line)) is not None:
            found[number] = None if rule[1] is None else use.callable[int(rule[1])].name
        if _ANSWER_RULE.match(line):
            break
    return found


def _call_rules(tools: ToolFormat, use: ToolUse, marks: Marks) -> list[str]:
    """Return the rules of calls. Where the model chooses, only strict functions keep a schema."""
    callable_tools = use.callable
    if not use.must_call:
        callable_tools = tuple(tool if tool.strict else _loose(tool) for tool in callable_tools)
    return tools.rules(callable_tools, marks, tools.max_calls if use.parallel and use.choice.mode != "named" else 1)


def _loose(tool: Tool) -> Tool:
    """Return a tool whose arguments are any JSON object."""
    return dataclasses.replace(tool, parameters={"type": "object", "additionalProperties": True})


def _start(reasoning: ReasoningFormat | None, thinking: Thinking, marks: Marks) -> list[str]:
    """Return the rule ``start``: ``answer``, after the reasoning if there is some."""
    if reasoning is None or thinking is Thinking.NONE:
        return ["start: answer"]
    up_to_answer = [marks.up_to("thoughts", reasoning.close), r"GAP: /\s{0,4}/"]
    if thinking is Thinking.OPEN:
        return ["start: thoughts GAP answer", *up_to_answer]
    return [f"start: ({marks.terminal(reasoning.open)} thoughts GAP)? answer", *up_to_answer]


def _content(grammar: Grammar) -> str:
    """Return a grammar as the body of a Lark rule."""
    match grammar.kind:
        case "json_schema":
            return lark.json_value(orjson.loads(grammar.text))
        case "json_object":
            return lark.json_value({"type": "object"})
        case "regex":
            # Only here: the library takes 10 MiB.
            from llguidance import regex_to_lark

            return f"/{regex_to_lark(grammar.text, 'dw')}/"
    return f"%lark {{\n{grammar.text}\n}}"
