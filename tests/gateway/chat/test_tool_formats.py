"""Each form of tool calls, whole and streamed with any split."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.limits import MAX_PYTHONIC_MARKS
from gateway.chat.call_parser import Constraint
from gateway.chat.formats.hermes import Hermes
from gateway.chat.formats.llama3_json import Llama3Json
from gateway.chat.formats.mistral import Mistral
from gateway.chat.formats.pythonic import Pythonic
from gateway.chat.pieces import ToolCallDelta, whole_calls
from gateway.chat.tool_format import ToolFormat
from gateway.chat.tool_formats import NAMES, tool_format

TOOLS = frozenset({"get_weather", "add", "now"})
HERMES, LLAMA, MISTRAL, PYTHONIC = Hermes(), Llama3Json(), Mistral(), Pythonic()
Calls = list[tuple[str, Any]]

# The form, the text, the content and the calls.
CASES: dict[str, tuple[ToolFormat, str, str, Calls]] = {
    "hermes": (
        HERMES,
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "n": [1, {"a": "}"}]}}\n</tool_call>',
        "",
        [("get_weather", {"city": "Oslo", "n": [1, {"a": "}"}]})],
    ),
    "hermes, two after text": (
        HERMES,
        'Let me see.\n\n<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>\n<tool_call>\n'
        '{"name": "now", "arguments": {}}\n</tool_call>\n',
        "Let me see.",
        [("add", {"a": 1}), ("now", {})],
    ),
    "hermes, text between and after": (
        HERMES,
        'a <tool_call>{"name":"add","arguments":{}}</tool_call> b\n',
        "a b",
        [("add", {})],
    ),
    "hermes, arguments first": (
        HERMES,
        '<tool_call>\n{"arguments": {"a": "\\u00e9"}, "name": "add"}\n</tool_call>',
        "",
        [("add", {"a": "é"})],
    ),
    "hermes, arguments as text": (
        HERMES,
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("add", {"a": 1})],
    ),
    "hermes, never closed": (HERMES, '<tool_call>\n{"name": "add", "arguments": {"a": 2}}', "", [("add", {"a": 2})]),
    "hermes, half a closing mark": (HERMES, '<tool_call>{"name":"add","arguments":{}}\n</tool_', "", [("add", {})]),
    "hermes, no mark": (HERMES, "It costs < 3 and <tool is no mark. ", "It costs < 3 and <tool is no mark. ", []),
    "hermes, another function": (
        HERMES,
        'x <tool_call>{"name": "rm", "arguments": {}}</tool_call> y',
        'x <tool_call>{"name": "rm", "arguments": {}}</tool_call> y',
        [],
    ),
    "hermes, no JSON": (HERMES, "<tool_call>\nadd(1)\n</tool_call>", "<tool_call>\nadd(1)\n</tool_call>", []),
    "hermes, cut in the name": (HERMES, '<tool_call>\n{"name": "ad', '<tool_call>\n{"name": "ad', []),
    "hermes, a refused call before a good one": (
        HERMES,
        '<tool_call>{"x": 1}</tool_call><tool_call>{"name":"add","arguments":{}}</tool_call>',
        '<tool_call>{"x": 1}</tool_call>',
        [("add", {})],
    ),
    "llama": (LLAMA, '{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1})]),
    "llama, tag": (LLAMA, '<|python_tag|>{"name": "add", "parameters": {"a": "{"}}', "", [("add", {"a": "{"})]),
    "llama, type first": (
        LLAMA,
        '\n{"type": "function", "name": "add", "parameters": {"a": 1}}',
        "",
        [("add", {"a": 1})],
    ),
    "llama, two": (
        LLAMA,
        '{"name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}',
        "",
        [("add", {"a": 1}), ("now", {})],
    ),
    "llama, text": (LLAMA, 'Say {"name": "add", "parameters": {}}', 'Say {"name": "add", "parameters": {}}', []),
    "llama, other JSON": (LLAMA, ' {"answer": {"name": 3}} ', ' {"answer": {"name": 3}} ', []),
    "llama, cut": (LLAMA, '{"name": "get_wea', '{"name": "get_wea', []),
    "mistral, list": (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": "]"}, "id": "abcdefghi"}, {"name": "now", "arguments": {}}]',
        "",
        [("add", {"a": "]"}), ("now", {})],
    ),
    "mistral, names": (
        MISTRAL,
        'Well[TOOL_CALLS]add[ARGS]{"a": {"b": 1}}[TOOL_CALLS]now[CALL_ID]abc[ARGS]{}',
        "Well",
        [("add", {"a": {"b": 1}}), ("now", {})],
    ),
    "mistral, name without mark": (MISTRAL, '[TOOL_CALLS]add{"a": 1}', "", [("add", {"a": 1})]),
    "mistral, another function": (MISTRAL, "[TOOL_CALLS]rm[ARGS]{}", "[TOOL_CALLS]rm[ARGS]{}", []),
    "mistral, no call": (MISTRAL, "[TOOL_CALLS] are (marks", "[TOOL_CALLS] are (marks", []),
    "mistral, cut": (MISTRAL, "[TOOL_CALLS]ad", "[TOOL_CALLS]ad", []),
    "pythonic": (
        PYTHONIC,
        "[get_weather(city='Oslo (\\'N\\')', n=-1, deep={'a': [True, None]}), now()]",
        "",
        [("get_weather", {"city": "Oslo ('N')", "n": -1, "deep": {"a": [True, None]}}), ("now", {})],
    ),
    "pythonic, JSON's constants": (PYTHONIC, "[add(a=true, b=null)]", "", [("add", {"a": True, "b": None})]),
    "pythonic, an object": (PYTHONIC, '[add(**{"a b": 1.5})]', "", [("add", {"a b": 1.5})]),
    "pythonic, Llama 4": (PYTHONIC, "<|python_start|>[add(a=1)]<|python_end|>", "", [("add", {"a": 1})]),
    "pythonic, odd escapes": (PYTHONIC, r"[add(a='\d\n', b='x, (y')]", "", [("add", {"a": "\\d\n", "b": "x, (y"})]),
    "pythonic, deep": (PYTHONIC, f"[add(a={'[' * 500})]", f"[add(a={'[' * 500})]", []),
    "pythonic, a list": (PYTHONIC, "[1, 2]", "[1, 2]", []),
    "pythonic, positional": (PYTHONIC, "[add(1)] then", "[add(1)] then", []),
    "pythonic, an expression": (PYTHONIC, "[add(a=1+open('x'))]", "[add(a=1+open('x'))]", []),
    "pythonic, cut": (PYTHONIC, "[add(a=1), now(", ", now(", [("add", {"a": 1})]),
    "pythonic, text": (PYTHONIC, "See [add(a=1)].", "See [add(a=1)].", []),
}


def feed(
    kind: ToolFormat,
    pieces: list[str],
    hidden: frozenset[str] = frozenset(),
    constraint: Constraint = Constraint.NONE,
) -> tuple[str, list[ToolCallDelta]]:
    """Return content and the calls' deltas."""
    parser = kind.parser(TOOLS, hidden, constraint)
    content = ""
    deltas: list[ToolCallDelta] = []
    for number, piece in enumerate(pieces):
        text, new = parser.feed(piece, finished=number == len(pieces) - 1)
        content += text
        deltas += new
    return content, deltas


def read(kind: ToolFormat, pieces: list[str], hidden: frozenset[str] = frozenset()) -> tuple[str, Calls, list[str]]:
    """Return content, calls and the calls' raw arguments."""
    content, deltas = feed(kind, pieces, hidden)
    assert [delta.index for delta in deltas if delta.id] == list(range(len({delta.index for delta in deltas})))
    calls = whole_calls(tuple(deltas))
    assert all(len(call.id) == 9 and call.id.isalnum() for call in calls)
    return content, [(c.name, json.loads(c.arguments)) for c in calls], [c.arguments for c in calls]


@pytest.mark.parametrize("case", CASES)
def test_whole_text(case: str) -> None:
    kind, text, content, calls = CASES[case]
    assert read(kind, [text])[:2] == (content, calls)


@pytest.mark.parametrize("case", CASES)
def test_one_character_at_a_time(case: str) -> None:
    kind, text, content, calls = CASES[case]
    assert read(kind, [*text])[:2] == (content, calls)


MARKS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|python_start|>", "{", "}", "[", "]",
    '{"name": "add", "arguments": ', '{"name": "add", "parameters": ', '{"a": "', '"}', '"', "\\", "'", ",", ";", ":",
    "add(", "now()", "a=", ")", "(", " ", "\n", "x", "add", "é", "<", "1",
]  # fmt: skip


@st.composite
def split_texts(draw: st.DrawFn) -> list[str]:
    """Draw a text made of cases and of marks in any order, in pieces."""
    parts = draw(st.lists(st.sampled_from(MARKS) | st.sampled_from([case[1] for case in CASES.values()]), max_size=12))
    text = "".join(parts)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("kind", [HERMES, LLAMA, MISTRAL, PYTHONIC], ids=lambda kind: kind.name)
@given(pieces=split_texts())
def test_a_split_never_matters(kind: ToolFormat, pieces: list[str]) -> None:
    def raw(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
        content, deltas = feed(kind, pieces)
        return content, [(call.name, call.arguments) for call in whole_calls(tuple(deltas))]

    assert raw(pieces) == raw(["".join(pieces)])


# The form, a forced reply, and its first call's beginning: there its name is known.
FORCED = {
    "hermes": (
        HERMES,
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {',
    ),
    "llama": (LLAMA, '{"name": "add", "parameters": {"a": 1}}', '{"name": "add", "parameters": {'),
    "llama, tag": (
        LLAMA,
        '<|python_tag|>{"name": "add", "parameters": {"a": 1}}',
        '<|python_tag|>{"name": "add", "parameters": {',
    ),
    "mistral, list": (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": {}}]',
        '[TOOL_CALLS] [{"name": "add", "arguments": {',
    ),
    "mistral, names": (MISTRAL, '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}', "[TOOL_CALLS]add[ARGS]{"),
    "pythonic": (PYTHONIC, "[add(a=1), now()]", "[add(a=1)"),
}


@pytest.mark.parametrize("case", FORCED)
def test_a_forced_reply_cut_anywhere_is_calls_and_nothing_else(case: str) -> None:
    kind, text, named = FORCED[case]
    # Grammars allow blanks between the reasoning and the calls.
    for before in ("", "\n\n"):
        for length in range(len(text) + 1):
            cut = before + text[:length]
            for pieces in ([cut], [*cut, ""]):
                content, deltas = feed(kind, pieces, constraint=Constraint.REPLY)
                assert content == "", cut
                assert bool(deltas) is (length >= len(named)), cut


@pytest.mark.parametrize("case", FORCED)
def test_a_strict_call_cut_before_its_name_is_no_content(case: str) -> None:
    kind, text, named = FORCED[case]
    starts_reply = kind is PYTHONIC or case == "llama"
    before = "" if starts_reply else "Well.\n"
    first = text.index("[" if kind is PYTHONIC else "{") + 1
    for length in range(first, len(named)):
        cut = before + text[:length]
        for pieces in ([cut], [*cut, ""]):
            assert feed(kind, pieces, constraint=Constraint.CALLS) == (before.rstrip(), []), cut
    # Half a mark may be text, and so is all that follows no mark.
    assert feed(HERMES, ["a <tool_c"], constraint=Constraint.CALLS) == ("a <tool_c", [])
    assert feed(HERMES, ["a\n<tool_call>"], constraint=Constraint.CALLS) == ("a", [])
    assert feed(MISTRAL, ["a[TOOL_CALLS]ad"], constraint=Constraint.CALLS) == ("a", [])
    assert feed(kind, ["a {\n"], constraint=Constraint.CALLS) == ("a {\n", [])


def test_arguments_stream_before_the_call_is_complete() -> None:
    parser = HERMES.parser(TOOLS, frozenset())
    assert parser.feed('<tool_call>\n{"name": "add", "argu', finished=False) == ("", ())
    _, (first,) = parser.feed('ments": {"a": ', finished=False)
    assert (first.name, first.arguments) == ("add", '{"a": ')
    assert first.id is not None
    assert parser.feed("12", finished=False) == ("", (ToolCallDelta(0, arguments="12"),))
    assert parser.feed("}}\n</tool_call>", finished=False) == ("", (ToolCallDelta(0, arguments="}"),))
    # Cut off: what was shown stays, as with OpenAI.
    assert parser.feed('<tool_call>{"name": "now", "arguments": {"x', finished=True)[1][0].arguments == '{"x'


def test_a_pythonic_call_may_have_so_many_parts_and_long_strings() -> None:
    most = MAX_PYTHONIC_MARKS - 4
    assert len(read(PYTHONIC, [f"[add(a=[{'1,' * most}])]"])[1]) == 1
    assert read(PYTHONIC, [f"[add(a=[{'1,' * (most + 1)}])]"])[1] == []
    assert len(read(PYTHONIC, [f"[add(a='{'1,' * 100_000}')]"])[1]) == 1


def test_a_hidden_mark_is_never_content() -> None:
    hidden = frozenset({"<|python_tag|>"})
    assert read(LLAMA, ["<|python_tag|>print(1)"], hidden)[:2] == ("print(1)", [])


TEMPLATES = {
    "[TOOL_CALLS]": "mistral",
    "<tool_call></tool_call>": "hermes",
    "<|python_tag|>": "llama3_json",
    'Respond in the format {"name": function name, "parameters": dictionary of argument name': "llama3_json",
    "[func_name1(params_name1=params_value1)]": "pythonic",
    "<tool_call>\n<function=example>": None,
    "{{ messages }}": None,
}


@pytest.mark.parametrize(("template", "name"), TEMPLATES.items())
def test_a_template_chooses_the_form(template: str, name: str | None) -> None:
    found = tool_format("auto", template)
    assert (found and found.name) == name


def test_names_of_other_servers_choose_a_form() -> None:
    found = {name: tool_format(name, "") for name in NAMES}
    assert {name: kind and kind.name for name, kind in found.items()} == {
        "mistral": "mistral",
        "hermes": "hermes",
        "qwen": "hermes",
        "qwen25": "hermes",
        "pythonic": "pythonic",
        "llama4_pythonic": "pythonic",
        "llama3_json": "llama3_json",
        "llama3": "llama3_json",
        "llama4_json": "llama3_json",
    }
    assert tool_format("none", "<tool_call>") is None
