"""Find the tokens that a grammar allows next, by llguidance. Knows no sequences and no requests.

llguidance (Microsoft, https://github.com/guidance-ai/llguidance) walks a trie of the vocabulary
with a lexer of lazily built derivatives and an Earley parser. LIMITS bounds its work for one token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark
from numpy.typing import NDArray

from foretoken import limits
from foretoken.errors import InvalidRequestError
from foretoken.sampling import Grammar

if TYPE_CHECKING:
    # Only the type stubs have this module.
    from llguidance._lib import JsonCompileOptions

Bits = NDArray[np.uint8]

# Another version may allow other tokens.
LLGUIDANCE_VERSION = metadata.version("llguidance")

# White space between two parts of a JSON value. It is bounded, because an unsure model never stops
# it.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
# llguidance before 1.8, which vLLM pins, repeats the pattern without a bound. For it, only the
# separators contain white space.
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
# LLParserLimits other than its defaults. One ms uses about 14,000 of lexer fuel, or 20,000 items.
LIMITS = {"step_lexer_fuel": 100_000, "step_max_items": 50_000, "max_lexer_states": 50_000, "verbose_errors": False}
MAX_MESSAGE_CHARS = 300
# A rule of GBNF, at the beginning of a line; Lark has no such sign outside of its texts.
_DEFINES = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
# Where a schema inside of a Lark grammar is at fault, and the lines around a fault.
_SCHEMA_PLACE = re.compile(r"at \d+\(\d+\): failed to compile JSON schema: ")
_LISTING = re.compile(r"\n *\d+ \| .*", re.DOTALL)
NO_TEXT = "no text of this model's tokens matches it"
_NOUNS = {
    "json_schema": "the JSON schema",
    "json_object": "the JSON grammar",
    "regex": "the regular expression",
    "lark": "the grammar",
}


class Vocabulary:
    """A checkpoint's tokenizer for grammars.

    Building it takes 0.02 s for 8,000 tokens, 1 s for 150,000.
    """

    def __init__(self, folder: Path, *, vocab_limit: int, eos_ids: frozenset[int]) -> None:
        """
        Args:
            folder: checkpoint folder with tokenizer.json.
            vocab_limit: ids below this one may be sampled.
            eos_ids: ids of the tokens that end a text.

        Raises:
            InvalidRequestError: this tokenizer cannot be used for grammars.
        """
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
        # End tokens never count as text, even if the tokenizer gives them some.
        control = frozenset(self.tokenizer.eos_tokens).union(self.eos_ids)
        self.text_bits = ~bits_of(control, vocab_limit) & all_bits(vocab_limit)


class Matcher:
    """One output's position in its grammar, with its own lexer.

    llguidance's copies share a lexer with its states and fuel: once one copy hit a limit, all would
    stop. So each output gets a newly made matcher, and no output depends on another.

    Attributes:
        allowed: uint8 [ceil(vocab_limit / 8)]. Bit ``id % 8`` of byte ``id // 8`` is set if the
            token may follow as text. Stop tokens are not text.
        is_accepting: whether the output so far is a complete text of the grammar.
        error: the limit that stopped the grammar; empty if none did.
        ahead: a matcher of the same grammar that reads drafts, with a lexer of its own. None: the
            drafts of this output are not looked at.
    """

    def __init__(self, text: str, vocabulary: Vocabulary) -> None:
        """Compile ``text``, a grammar in llguidance's form. This blocks but releases the GIL."""
        self._text = text
        self.ahead: Matcher | None = None
        self._vocabulary = vocabulary
        limits = LLParserLimits(**LIMITS)  # type: ignore[arg-type]
        self._matcher = LLMatcher(vocabulary.tokenizer, text, log_level=0, limits=limits)
        self.allowed: Bits
        self.is_accepting: bool
        self.error: str
        self._look()

    def advance(self, token_ids: Sequence[int]) -> bool:
        """Advance by tokens. Return False, and be unusable then, if the grammar forbids them."""
        known = self._matcher.consume_tokens(list(token_ids))
        self._look()
        return known

    def go_back(self, num_tokens: int) -> None:
        """Take back the last tokens.

        What may follow them is looked at with the next ``advance``.
        """
        self._matcher.rollback(num_tokens)

    def anew(self) -> Matcher:
        """Return a new matcher at the grammar's beginning. This compiles the grammar again.

        It looks ahead if this one does.
        """
        made = Matcher(self._text, self._vocabulary)
        if self.ahead is not None:
            made.look_ahead()
        return made

    def look_ahead(self) -> None:
        """Compile the grammar for ``ahead`` too, before the first token."""
        self.ahead = Matcher(self._text, self._vocabulary)

    def _look(self) -> None:
        """Read which tokens may follow, before a row needs them: no token means the text ends."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)[: len(self._vocabulary.text_bits)]
        self.allowed = bits & self._vocabulary.text_bits
        # llguidance also stops where only the end may follow. That is no error.
        self.error = short(self._matcher.get_error())
        self.is_accepting = not self.error and self._matcher.is_accepting()


def to_llguidance(grammar: Grammar) -> str:
    """Return the grammar in llguidance's own form.

    Raises InvalidRequestError, naming the grammar's kind, if the text is not even valid JSON or
    ends with an open escape.
    """
    if grammar.kind == "regex":
        if (len(grammar.text) - len(grammar.text.rstrip("\\"))) % 2:
            raise refusal(grammar, "it ends with a backslash that escapes nothing")
        # Like grammar_from_regex, but with ASCII \d and \w, as in JSON schemas and in other
        # servers.
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(grammar.text, 'dw')}/")
    if grammar.kind == "lark":
        return LLMatcher.grammar_from_lark(_lark_text(grammar))
    schema = grammar.text if grammar.kind == "json_schema" else '{"type": "object"}'
    try:
        return LLMatcher.grammar_from_json_schema(schema, defaults=_WHITESPACE_OPTIONS)
    except ValueError as error:
        raise refusal(grammar, str(error)) from error


def _lark_text(grammar: Grammar) -> str:
    """Return a grammar's text in Lark form, converted from GBNF (EBNF) if it is not Lark."""
    if _DEFINES.search(grammar.text) is None:
        return grammar.text
    limits.check_bytes(grammar.kind, grammar.text, limits.MAX_EBNF_BYTES)
    try:
        return gbnf_to_lark(grammar.text)
    except RecursionError:
        raise refusal(grammar, "it is nested too deeply") from None
    except Exception as error:
        # The converter raises bare exceptions for malformed grammars.
        raise refusal(grammar, str(error)) from error


def compile_grammar(grammar: Grammar, vocabulary: Vocabulary) -> Matcher:
    """Return a matcher at the grammar's beginning.

    This blocks but releases the GIL. Let a separate process check first how long it takes.

    Raises InvalidRequestError, naming the grammar's kind, with llguidance's message.
    """
    first = Matcher(to_llguidance(grammar), vocabulary)
    if first.error or not (first.is_accepting or first.allowed.any()):
        raise refusal(grammar, first.error or NO_TEXT)
    return first


def refusal(grammar: Grammar, reason: str) -> InvalidRequestError:
    """Return the error for a grammar that cannot be served."""
    return InvalidRequestError(f"{_NOUNS[grammar.kind]} cannot be used: {short(reason)}", field=grammar.kind)


def short(message: str) -> str:
    """Return the fault that a message of llguidance names, or else the message's beginning."""
    message = _LISTING.sub("", message)
    place = _SCHEMA_PLACE.match(message)
    fault = re.search(r"^error: (.+)$", message, re.MULTILINE)
    line = fault[1] if fault else " ".join(message.replace("<non-verbose/>", "").split())
    if place and fault:
        line = f"{place[0]}{line}"
    if line == "NoExtensionBias":
        return NO_TEXT
    return line if len(line) <= MAX_MESSAGE_CHARS else f"{line[:MAX_MESSAGE_CHARS]}..."


def bits_of(token_ids: Sequence[int] | frozenset[int], vocab_limit: int) -> Bits:
    """Return these ids as bits, uint8 [ceil(vocab_limit / 8)]; drop ids from ``vocab_limit`` up."""
    flags = np.zeros(-(-vocab_limit // 8) * 8, np.bool_)
    flags[[token_id for token_id in token_ids if token_id < vocab_limit]] = True
    return np.packbits(flags, bitorder="little")


def all_bits(vocab_limit: int) -> Bits:
    """Return all ids below ``vocab_limit`` as bits."""
    return np.packbits(np.arange(-(-vocab_limit // 8) * 8) < vocab_limit, bitorder="little")
