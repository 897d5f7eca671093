"""Grammars in EBNF and in Lark, and refusals of unusable ones."""

from __future__ import annotations

import re

import pytest

from foretoken import limits
from foretoken.errors import InvalidRequestError
from foretoken.sampling import Grammar
from tests.support.grammars import ids_of
from verifier_svc.sampling.grammar import Vocabulary, compile_grammar

EBNF = """
# Three pairs at most.
root ::= pair{1,3} ("12" | tail)
pair ::= "ab" | "cd"
tail ::= [0-9]+ "x"?
"""


@pytest.mark.parametrize(
    "text", [EBNF, 'start: PAIR{1,3} ("12" | TAIL)\nPAIR: "ab" | "cd"\nTAIL: /[0-9]+x?/\n'], ids=["EBNF", "Lark"]
)
def test_a_grammar_may_be_ebnf_or_lark(vocab: Vocabulary, text: str) -> None:
    for tokens, ends in ((("ab", "cd", "12"), True), (("a", "b", "9", "x"), True), (("ab", "cd"), False)):
        matcher = compile_grammar(Grammar("lark", text), vocab)
        assert matcher.advance(ids_of(*tokens)) and matcher.is_accepting is ends
    for tokens in (("c", "c"), ("12",), ("ab", "ab", "ab", "ab")):
        assert not compile_grammar(Grammar("lark", text), vocab).advance(ids_of(*tokens))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('rule ::= "a"', "No 'root' rule"),
        ("root ::= other", "'other' not found"),
        ('root ::= "a', "end of input"),
        ("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "nested too deeply"),
        ('root ::= "' + "a" * limits.MAX_EBNF_BYTES + '"', "at most"),
        ("nothing", "cannot be used"),
    ],
)
def test_an_unusable_grammar_is_refused_with_the_reason(vocab: Vocabulary, text: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(reason)) as caught:
        compile_grammar(Grammar("lark", text), vocab)
    assert caught.value.field == "lark"


@pytest.mark.parametrize(
    ("schema", "reason"), [('{"type": "foo"}', "Invalid type: foo"), ('{"pattern": "("}', "unclosed group")]
)
def test_a_bad_schema_in_a_grammar_is_named_by_its_place_alone(vocab: Vocabulary, schema: str, reason: str) -> None:
    text = f'start: "a" value\nvalue: %json {schema}\nMORE: "b"\n'
    with pytest.raises(InvalidRequestError) as caught:
        compile_grammar(Grammar("lark", text), vocab)
    assert re.fullmatch(
        rf"the grammar cannot be used: at 2\(\d+\): failed to compile JSON schema: {reason}", caught.value.message
    )
