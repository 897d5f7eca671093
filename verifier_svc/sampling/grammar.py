"""Grammars over a model's tokens: which tokens may follow, by llguidance. Knows no sequences and no requests.

llguidance (Microsoft, https://github.com/guidance-ai/llguidance) walks a trie of the vocabulary with a lexer of lazily
built derivatives and an Earley parser; what it may spend on one token is limited below.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from numpy.typing import NDArray

from foretoken.errors import InvalidRequestError
from foretoken.sampling import Grammar

if TYPE_CHECKING:
    # There for type checkers only.
    from llguidance._lib import JsonCompileOptions

Bits = NDArray[np.uint8]

# Another version may allow other tokens.
LLGUIDANCE_VERSION = metadata.version("llguidance")

# White space between two parts of a JSON value: a model that is not sure would go on with it for ever.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
# llguidance before 1.8, which vLLM pins, applies the pattern again and again. There white space is part of the
# separators, and stands nowhere else.
_SPACE = WHITESPACE.replace("{1,", "{0,")
_WHITESPACE_OPTIONS: JsonCompileOptions = (
    {"whitespace_pattern": WHITESPACE}
    if tuple(map(int, LLGUIDANCE_VERSION.split(".")[:2])) >= (1, 8)
    else {
        "whitespace_flexible": False,
        "item_separator": f"{_SPACE},{_SPACE}",
        "key_separator": f"{_SPACE}:{_SPACE}",
    }
)
# LLParserLimits beyond its defaults. Fuel of the lexer is about 14 000 a millisecond, items about 20 000.
LIMITS = {"step_lexer_fuel": 100_000, "step_max_items": 50_000, "max_lexer_states": 50_000, "verbose_errors": False}
MAX_MESSAGE_CHARS = 300
NO_TEXT = "no text of this model's tokens matches it"
_NOUNS = {"json_schema": "the JSON schema", "json_object": "the JSON grammar", "regex": "the regular expression"}


class Vocabulary:
    """A checkpoint's tokenizer as grammars see it. Building it takes 0.02 s for 8 000 tokens, 1 s for 150 000."""

    def __init__(self, folder: Path, *, vocab_limit: int, eos_ids: frozenset[int]) -> None:
        """``vocab_limit``: ids below it may be sampled. Raises InvalidRequestError where grammars cannot be served."""
        self.path = folder / "tokenizer.json"
        self.eos_ids = sorted(token_id for token_id in eos_ids if token_id < vocab_limit)
        if not self.path.is_file():
            raise InvalidRequestError("structured output needs a tokenizer.json, which this model does not have")
        try:
            self.tokenizer = LLTokenizer(self.path.read_text(encoding="utf-8"), eos_token=self.eos_ids or None)
        except (OSError, ValueError) as error:
            raise InvalidRequestError(f"structured output cannot use this model's tokenizer: {error}") from error
        if self.tokenizer.vocab_size < vocab_limit:
            raise InvalidRequestError("structured output needs a tokenizer.json that knows all of the model's tokens")
        # The end of the text is no text, whatever else the tokenizer says of it.
        control = frozenset(self.tokenizer.eos_tokens).union(self.eos_ids)
        self.text_bits = ~bits_of(control, vocab_limit) & bits_of(range(vocab_limit), vocab_limit)


class Matcher:
    """One output's place in its grammar, with a lexer of its own.

    Copies that llguidance makes share a lexer, and with it the states and the fuel that it may spend: once one of them
    hit a limit, none of them could go on. So each output's matcher is made anew, and no output depends on another.

    Attributes:
        allowed: uint8 [ceil(vocab_limit / 8)]; bit ``id % 8`` of byte ``id // 8``: the token may follow as text. Stop
            tokens end a text and are not part of it.
        is_accepting: whether the output so far is a whole text of the grammar.
        error: why the grammar cannot go on, or empty: a limit was hit.
    """

    def __init__(self, text: str, vocabulary: Vocabulary) -> None:
        """``text``: the grammar in llguidance's own form. Blocks without the GIL."""
        self._text = text
        self._vocabulary = vocabulary
        limits = LLParserLimits(**LIMITS)  # type: ignore[arg-type]
        self._matcher = LLMatcher(vocabulary.tokenizer, text, log_level=0, limits=limits)
        self.allowed: Bits
        self.is_accepting: bool
        self.error: str
        self._look()

    def advance(self, token_ids: Sequence[int]) -> bool:
        """Go on by tokens; False if they do not follow, after which the matcher is spent."""
        known = self._matcher.consume_tokens(list(token_ids))
        self._look()
        return known

    def anew(self) -> Matcher:
        """Another one, at the grammar's beginning. Compiles it again."""
        return Matcher(self._text, self._vocabulary)

    def _look(self) -> None:
        """Read off what may follow. Masks are made ahead of the row that needs them, which shows where a text ends."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)[: len(self._vocabulary.text_bits)]
        self.allowed = bits & self._vocabulary.text_bits
        # Where only the end may follow, llguidance stops: that is no error of its.
        self.error = short(self._matcher.get_error())
        self.is_accepting = not self.error and self._matcher.is_accepting()


def to_llguidance(grammar: Grammar) -> str:
    """The grammar in llguidance's own form. Raises InvalidRequestError naming the kind if it is not even JSON."""
    if grammar.kind == "regex":
        if (len(grammar.text) - len(grammar.text.rstrip("\\"))) % 2:
            raise refusal(grammar, "it ends with a backslash that escapes nothing")
        # As grammar_from_regex, but that \d and \w are ASCII, as in the patterns of JSON schemas and at the peers.
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(grammar.text, 'dw')}/")
    schema = grammar.text if grammar.kind == "json_schema" else '{"type": "object"}'
    try:
        return LLMatcher.grammar_from_json_schema(schema, defaults=_WHITESPACE_OPTIONS)
    except ValueError as error:
        raise refusal(grammar, str(error)) from error


def compile_grammar(grammar: Grammar, vocabulary: Vocabulary) -> Matcher:
    """A matcher at the beginning. Blocks without the GIL; how long is for a process of its own to find out first.

    Raises InvalidRequestError naming the grammar's kind, with llguidance's message.
    """
    first = Matcher(to_llguidance(grammar), vocabulary)
    if first.error or not (first.is_accepting or first.allowed.any()):
        raise refusal(grammar, first.error or NO_TEXT)
    return first


def refusal(grammar: Grammar, reason: str) -> InvalidRequestError:
    """The error of a grammar that cannot be served."""
    return InvalidRequestError(f"{_NOUNS[grammar.kind]} cannot be used: {short(reason)}", field=grammar.kind)


def short(message: str) -> str:
    """One line of llguidance's messages, which repeat the grammar: what is at fault, or the first characters."""
    fault = re.search(r"^error: (.+)$", message, re.MULTILINE)
    line = fault[1] if fault else " ".join(message.replace("<non-verbose/>", "").split())
    if line == "NoExtensionBias":
        return NO_TEXT
    return line if len(line) <= MAX_MESSAGE_CHARS else f"{line[:MAX_MESSAGE_CHARS]}..."


def bits_of(token_ids: Sequence[int] | frozenset[int], vocab_limit: int) -> Bits:
    """uint8 [ceil(vocab_limit / 8)]: the bits of these ids; ids from ``vocab_limit`` on are left out."""
    flags = np.zeros(-(-vocab_limit // 8) * 8, np.bool_)
    flags[[token_id for token_id in token_ids if token_id < vocab_limit]] = True
    return np.packbits(flags, bitorder="little")
