"""Decide how the outputs of a chat request are written and read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from foretoken import limits
from foretoken.errors import InvalidRequestError
from foretoken.sampling import Grammar
from gateway.chat.call_parser import Constraint
from gateway.chat.lark import Marks
from gateway.chat.reasoning import ReasoningFormat, ReasoningPlace, ReasoningReader, Thinking, reasoning_format
from gateway.chat.reply_grammar import reply_grammar, schema_tools
from gateway.chat.reply_reader import ReplyReader
from gateway.chat.tool_format import ToolFormat
from gateway.chat.tool_formats import tool_format
from gateway.chat.tools import ToolUse
from gateway.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ChatReply:
    """How the outputs of one chat request are written and read.

    The default: all text is content.
    """

    # What the whole output must match, and the request's field that asked for it.
    grammar: Grammar | None = None
    grammar_field: str = ""
    # Which tool's schema begins on a line of the grammar; None: the answer's.
    schema_tools: Mapping[int, str | None] = field(default_factory=dict)
    # Special tokens that are part of the text, because they mark calls or reasoning.
    kept_special_ids: frozenset[int] = frozenset()
    reasoning: ReasoningFormat | None = None
    thinking: Thinking = Thinking.NONE
    tools: ToolFormat | None = None
    tool_names: frozenset[str] = frozenset()
    constraint: Constraint = Constraint.NONE
    # None: any number.
    max_calls: int | None = None
    # Marks that the reader of the content must not see.
    hidden: frozenset[str] = frozenset()
    reasoning_place: ReasoningPlace = ReasoningPlace.APART

    @property
    def is_plain(self) -> bool:
        """Return whether all text is content, so that no reader is needed."""
        return self.reasoning is None and self.tools is None

    def reader(self) -> ReplyReader:
        """Return a new reader, for one output."""
        return ReplyReader(
            None if self.reasoning is None else ReasoningReader(self.reasoning, self.thinking),
            None if self.tools is None else self.tools.parser(self.tool_names, self.hidden, self.constraint),
            max_calls=self.max_calls,
            reasoning_place=self.reasoning_place,
        )


PLAIN = ChatReply()


class ChatForms:
    """The forms in which the served model writes tool calls and reasoning."""

    def __init__(self, tokenizer: Tokenizer, tool_call_parser: str, reasoning_parser: str) -> None:
        """The parsers are values of the settings; ``auto`` takes the chat template's."""
        template = tokenizer.chat_template_text
        self._special_ids = tokenizer.special_ids
        self._marks = Marks(self._special_ids)
        self._has_template = tokenizer.has_chat_template
        self._takes_tools = tokenizer.takes_tools
        self._parses_calls = tool_call_parser != "none"
        self.tools = tool_format(tool_call_parser, template)
        self.reasoning = reasoning_format(reasoning_parser, template)

    def check(self, use: ToolUse) -> None:
        """Raise InvalidRequestError if this server cannot serve a request's tools."""
        if not use.offered or not self._has_template:
            # Without a template no chat can be rendered, and that error is the one to show.
            return
        if not self._takes_tools:
            raise InvalidRequestError(
                "this model's chat template has no place for tools; start the server with --chat-template FILE",
                field="tools",
            )
        if self.tools is None and (self._parses_calls or use.must_call):
            raise InvalidRequestError(
                "the server does not know how this model writes tool calls; start it with --tool-call-parser NAME",
                field="tools",
            )

    def reply(
        self,
        prompt: str,
        use: ToolUse,
        content_grammar: Grammar | None = None,
        content_field: str = "",
        *,
        skip_special_tokens: bool = True,
        continues: bool = False,
    ) -> ChatReply:
        """Return how to write and read the replies to a rendered prompt.

        ``content_grammar`` is what the answer must match if it calls no tool;
        ``continues``: the reply goes on with the last message. Raises InvalidRequestError
        for tools that this server cannot serve.
        """
        self.check(use)
        thinking = Thinking.NONE if self.reasoning is None else self.reasoning.thinking(prompt, continues=continues)
        reasoning = None if thinking is Thinking.NONE else self.reasoning
        tools = self.tools if use.offered else None
        if reasoning is None and tools is None:
            return ChatReply(content_grammar, content_field)
        marks = (() if tools is None else tools.marks) + (
            () if reasoning is None else (reasoning.open, reasoning.close)
        )
        special = [mark for mark in marks if mark in self._special_ids]
        grammar = reply_grammar(content_grammar, use, tools, reasoning, thinking, self._marks)
        grammar_field = content_field
        if grammar is not None and tools is not None and content_grammar is None:
            grammar_field = "tools"
        if grammar is not None and grammar is not content_grammar:
            limits.check_grammar(grammar_field, grammar)
        return ChatReply(
            grammar,
            grammar_field,
            {} if grammar is None or grammar is content_grammar else schema_tools(grammar, use),
            frozenset(self._special_ids[mark] for mark in special) if skip_special_tokens else frozenset(),
            reasoning,
            thinking,
            tools,
            frozenset(tool.name for tool in use.callable),
            _constraint(use, content_grammar),
            None if use.parallel else 1,
            frozenset(special) if skip_special_tokens else frozenset(),
        )


def _constraint(use: ToolUse, content_grammar: Grammar | None) -> Constraint:
    """Return what the grammar of a reply makes of its calls."""
    if use.must_call:
        return Constraint.REPLY
    # A text of a grammar may begin like a call.
    is_strict = content_grammar is None and any(tool.strict for tool in use.callable)
    return Constraint.CALLS if is_strict else Constraint.NONE
