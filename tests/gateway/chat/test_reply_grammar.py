"""What llguidance accepts under the grammar of a reply, token by token, with the demo tokenizer."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from benchmarks.tool_calls import MODELS
from foretoken.sampling import Grammar
from gateway.chat.formats.hermes import Hermes
from gateway.chat.formats.llama3_json import Llama3Json
from gateway.chat.formats.mistral import Mistral
from gateway.chat.formats.pythonic import Pythonic
from gateway.chat.lark import Marks
from gateway.chat.pieces import whole_calls
from gateway.chat.reasoning import ReasoningFormat, Thinking, reasoning_format
from gateway.chat.reply_grammar import reply_grammar
from gateway.chat.tool_format import ToolFormat
from gateway.chat.tools import Tool, ToolChoice, ToolUse
from gateway.tokenizer import Tokenizer
from verifier_svc.sampling.grammar import Vocabulary, compile_grammar

DEMO = Path(__file__).parents[3] / "models" / "demo" / "target" / "tokenizer.json"
ADD = Tool(
    "add",
    parameters={
        "type": "object",
        "properties": {
            "a": {"$ref": "#/$defs/small"},
            "b": {"type": "string", "maxLength": 4},
            "c": {"type": "boolean"},
        },
        "required": ["a", "b"],
        "additionalProperties": False,
        "$defs": {"small": {"type": "integer", "minimum": 0, "maximum": 99}},
    },
)
NOW = Tool("now")
STRICT = Tool(ADD.name, parameters=ADD.parameters, strict=True)
# No property of these can be a keyword in Python.
ODD = Tool("odd", parameters={"type": "object", "properties": {"a b": {"type": "null"}}, "required": ["a b"]})
HERMES, LLAMA, PYTHONIC = Hermes(), Llama3Json(), Pythonic()
MISTRAL, MISTRAL_NAMES = Mistral("[TOOL_CALLS]"), Mistral("[TOOL_CALLS][ARGS]")
REQUIRED, AUTO = ToolChoice("required"), ToolChoice("auto")
SPECIAL = {
    "<tool_call>": 4, "</tool_call>": 5, "[TOOL_CALLS]": 6, "[ARGS]": 7, "<|python_tag|>": 8, "<think>": 9,
    "</think>": 10,
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer(DEMO.read_text(encoding="utf-8"))


class Reader:
    """Whether a whole text, with its marks as text or as special tokens, matches a grammar."""

    def __init__(self, tokenizer: LLTokenizer, grammar: Grammar | None, special: dict[str, int]) -> None:
        assert grammar is not None and grammar.kind == "lark"
        self._tokenizer, self._special = tokenizer, special
        self._matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar.text), log_level=0)
        assert not self._matcher.is_error(), self._matcher.get_error()

    def takes(self, text: str) -> bool:
        parts = re.split(f"({'|'.join(map(re.escape, self._special))})", text) if self._special else [text]
        ids: list[int] = []
        for part in parts:
            ids += [self._special[part]] if part in self._special else self._tokenizer.tokenize_str(part)
        self._matcher.reset()
        return self._matcher.try_consume_tokens(ids) == len(ids) and self._matcher.is_accepting()


def grammar_of(
    kind: ToolFormat | None,
    use: ToolUse,
    special: dict[str, int],
    content: Grammar | None = None,
    reasoning: ReasoningFormat | None = None,
    thinking: Thinking = Thinking.NONE,
) -> Grammar | None:
    return reply_grammar(content, use, kind, reasoning, thinking, Marks(special))


# By form: a good call, two good calls, calls whose arguments or names are wrong, and a text.
FORCED: dict[str, tuple[ToolFormat, list[str], list[str], list[str]]] = {
    "hermes": (
        HERMES,
        [
            '<tool_call>\n{"name": "add", "arguments": {"a": 7, "b": "xy"}}\n</tool_call>',
            '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        ],
        [
            '<tool_call>\n{"name": "add", "arguments": {"a": 7, "b": "xy", "c": true}}\n</tool_call>\n'
            '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
        ],
        [
            '<tool_call>\n{"name": "add", "arguments": {"a": 777, "b": "xy"}}\n</tool_call>',
            '<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>',
            '<tool_call>\n{"name": "now", "arguments": {}}\n',
        ],
    ),
    "llama": (
        LLAMA,
        ['{"name": "add", "parameters": {"a": 7, "b": "xy"}}', '<|python_tag|>{"name": "now", "parameters": {}}'],
        [],
        ['{"name": "add", "parameters": {"a": 7}}', '{"name": "now", "arguments": {}}'],
    ),
    "mistral": (
        MISTRAL,
        ['[TOOL_CALLS][{"name": "add", "arguments": {"a": 7, "b": "xy"}}]'],
        ['[TOOL_CALLS][{"name": "add", "arguments": {"a": 7, "b": ""}}, {"name": "now", "arguments": {}}]'],
        ['[TOOL_CALLS][{"name": "add", "arguments": {"a": 7, "b": "too long"}}]', "[TOOL_CALLS][]"],
    ),
    "mistral, names": (
        MISTRAL_NAMES,
        ['[TOOL_CALLS]add[ARGS]{"a": 7, "b": "xy"}', "[TOOL_CALLS]now[ARGS]{}"],
        ['[TOOL_CALLS]add[ARGS]{"a": 7, "b": "xy"}[TOOL_CALLS]now[ARGS]{}'],
        ["[TOOL_CALLS]add[ARGS]{}", "[TOOL_CALLS]rm[ARGS]{}"],
    ),
    "pythonic": (
        PYTHONIC,
        ['[add(a=7, b="xy")]', '[add(a=7, b="xy", c=true)]', "[now()]", '[odd(**{"a b": null})]'],
        ['[add(a=7, b="xy"), now()]'],
        ["[add(a=7)]", '[add(b="xy", a=7)]', '[add(a=7, b="xy",)]', "[]", "[odd()]"],
    ),
}


@pytest.mark.parametrize("special", [{}, SPECIAL], ids=["text", "special tokens"])
@pytest.mark.parametrize("case", FORCED)
def test_forced_calls_follow_their_schema(tokenizer: LLTokenizer, case: str, special: dict[str, int]) -> None:
    kind, one, two, wrong = FORCED[case]
    for parallel in (True, False):
        use = ToolUse((ADD, NOW, ODD), REQUIRED, parallel)
        reader = Reader(tokenizer, grammar_of(kind, use, special), special)
        for text in one:
            assert reader.takes(text), text
            content, deltas = kind.parser(frozenset({"add", "now", "odd"}), frozenset()).feed(text, finished=True)
            assert not content and len(whole_calls(deltas)) == 1
        for text in two:
            assert reader.takes(text) is parallel, text
        for text in [*wrong, "", "Hello."]:
            assert not reader.takes(text), text


@pytest.mark.parametrize("special", [{}, SPECIAL], ids=["text", "special tokens"])
@pytest.mark.parametrize("case", FORCED)
def test_a_named_function_is_the_only_one(tokenizer: LLTokenizer, case: str, special: dict[str, int]) -> None:
    kind, one, two, _ = FORCED[case]
    use = ToolUse((ADD, NOW, ODD), ToolChoice("named", "add"))
    reader = Reader(tokenizer, grammar_of(kind, use, special), special)
    for text in one:
        assert reader.takes(text) is ("add" in text), text
    assert not any(map(reader.takes, two))


@pytest.mark.parametrize("special", [{}, SPECIAL], ids=["text", "special tokens"])
@pytest.mark.parametrize("case", FORCED)
def test_free_text_may_hold_calls_of_strict_functions(
    tokenizer: LLTokenizer, case: str, special: dict[str, int]
) -> None:
    kind, one, two, wrong = FORCED[case]
    reader = Reader(tokenizer, grammar_of(kind, ToolUse((STRICT, NOW), AUTO), special), special)
    for text in ["", "Hello, <b>you</b>: it is {so} [and] so.\n", *one[:1], *two]:
        assert reader.takes(text), text
    for text in wrong:
        # Functions that are not strict take any object, and pythonic ones any keywords.
        assert reader.takes(text) is ('"name": "now", "arguments": {}}\n</tool_call>' in text), text
    if kind in (HERMES, MISTRAL, MISTRAL_NAMES):
        assert all(reader.takes(f"Wait. {text}") for text in one[:1])
        assert not any(reader.takes(f"Wait. {text}") for text in wrong)


def test_only_listed_arguments_unless_the_schema_allows_others(tokenizer: LLTokenizer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}
    one = '{"name": "f", "parameters": {"a": null}}'
    more = '{"name": "f", "parameters": {"a": null, "b": 1}}'
    for extra, takes_more in ({}, False), ({"additionalProperties": {"type": "integer"}}, True):
        use = ToolUse((Tool("f", parameters=schema | extra),), REQUIRED)
        reader = Reader(tokenizer, grammar_of(LLAMA, use, {}), {})
        assert reader.takes(one) and reader.takes(more) is takes_more


def test_a_function_that_is_not_strict_leaves_the_model_free() -> None:
    assert grammar_of(HERMES, ToolUse((ADD, NOW), AUTO), {}) is None


SCHEMA = Grammar("json_schema", '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}')


def test_an_answer_of_a_format_or_a_call(tokenizer: LLTokenizer) -> None:
    reader = Reader(tokenizer, grammar_of(HERMES, ToolUse((ADD, NOW), AUTO), {}, SCHEMA), {})
    assert reader.takes('{"n": 1}')
    assert reader.takes('<tool_call>\n{"name": "now", "arguments": {"any": 1}}\n</tool_call>')
    assert not reader.takes("Hello.") and not reader.takes('{"n": "x"}')


CONTENTS = {
    "json_schema": (SCHEMA, '{"n": 12}', '{"n": 1'),
    "json_object": (Grammar("json_object"), '{"a": []}', "[]"),
    "regex": (Grammar("regex", r"a/\d{2}"), "a/42", "a/4"),
    "lark": (Grammar("lark", 'start: "x" y\ny: "y"+'), "xyy", "yx"),
}


@pytest.mark.parametrize("special", [{}, SPECIAL], ids=["text", "special tokens"])
@pytest.mark.parametrize("name", CONTENTS)
def test_the_format_begins_after_the_reasoning(tokenizer: LLTokenizer, name: str, special: dict[str, int]) -> None:
    content, good, bad = CONTENTS[name]
    kind = reasoning_format("qwen3", "")
    use = ToolUse()
    opened = Reader(tokenizer, grammar_of(None, use, special, content, kind, Thinking.OPEN), special)
    assert opened.takes(f"Hm, {{a}} or <b>?\n</think>\n\n{good}")
    assert not opened.takes(good) and not opened.takes(f"Hm</think>{bad}")
    optional = Reader(tokenizer, grammar_of(None, use, special, content, kind, Thinking.OPTIONAL), special)
    assert optional.takes(f"<think>\nHm\n</think>\n\n{good}") and optional.takes(good)
    assert not optional.takes(f"Hm</think>{good}") and not optional.takes(bad)


def test_without_reasoning_a_format_stays_as_it_is() -> None:
    assert grammar_of(None, ToolUse(), {}, SCHEMA) is SCHEMA


def test_calls_begin_after_the_reasoning(tokenizer: LLTokenizer) -> None:
    kind = reasoning_format("deepseek_r1", "")
    use = ToolUse((NOW,), REQUIRED)
    reader = Reader(tokenizer, grammar_of(HERMES, use, {}, None, kind, Thinking.OPEN), {})
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert reader.takes(f"I <tool_call> then.</think>\n\n{call}")
    assert not reader.takes(call)


@pytest.mark.parametrize("special", [{}, SPECIAL], ids=["text", "special tokens"])
@pytest.mark.parametrize("case", FORCED)
def test_random_texts_of_a_forced_grammar_are_calls_that_fit(case: str, special: dict[str, int]) -> None:
    """Any text that the grammar allows, not only what a model would write, is read as its calls."""
    kind = FORCED[case][0]
    tools = tuple(Tool(name, parameters=model.model_json_schema()) for name, model in MODELS.items())
    vocabulary = Vocabulary(DEMO.parent, vocab_limit=8192, eos_ids=frozenset({0, 3}))
    texts = {token_id: mark for mark, token_id in special.items()}
    tokenizer = Tokenizer(DEMO.parent)
    rng = np.random.default_rng(0)
    grammar = grammar_of(kind, ToolUse(tools, REQUIRED, parallel=False), special)
    assert grammar is not None
    for _ in range(25):
        matcher = compile_grammar(grammar, vocabulary)
        ids: list[int] = []
        while len(allowed := np.flatnonzero(np.unpackbits(matcher.allowed, bitorder="little"))) and len(ids) < 600:
            ids.append(int(rng.choice(allowed)))
            assert matcher.advance(ids[-1:])
        assert matcher.is_accepting and not matcher.error
        raw = b"".join(texts[i].encode() if i in texts else tokenizer.token_text(i)[1] for i in ids)
        content, deltas = kind.parser(frozenset(MODELS), frozenset()).feed(raw.decode(), finished=True)
        (call,) = whole_calls(deltas)
        assert not content
        MODELS[call.name].model_validate_json(call.arguments)
