"""Define the limits of requests in one table, and check requests against them.

Gateway and verifier both call ``check_sampling`` and ``check_speculation``; neither trusts the
other. ``ModelLimits`` holds the limits that depend on the model (context length, vocabulary).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from foretoken import address
from foretoken.errors import ContextLengthError, InvalidRequestError
from foretoken.sampling import Grammar, SamplingParams, SpeculationOptions


@dataclass(frozen=True, slots=True)
class Range:
    """An inclusive range; ``low_open`` excludes the lower end.

    If both ends are ints, only ints fit.
    """

    low: float
    high: float
    low_open: bool = False

    @property
    def is_integer(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    def __contains__(self, value: object) -> bool:
        """Return whether ``value`` is a number in the range; NaN, booleans and text never are."""
        if isinstance(value, bool) or not isinstance(value, int if self.is_integer else (int, float)):
            return False
        # Comparisons with NaN are false.
        return (self.low < value if self.low_open else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        low, high = (str(end) if self.is_integer else f"{end:g}" for end in (self.low, self.high))
        return f"{'(' if self.low_open else '['}{low}, {high}]"


# Request fields that hold one number, named as in SamplingParams.
SAMPLING_RANGES: dict[str, Range] = {
    "temperature": Range(0.0, 2.0),
    "top_p": Range(0.0, 1.0, low_open=True),
    "top_k": Range(-1, 1_000_000),
    "min_p": Range(0.0, 1.0),
    "presence_penalty": Range(-2.0, 2.0),
    "frequency_penalty": Range(-2.0, 2.0),
    # The lower end keeps penalized float32 logits finite.
    "repetition_penalty": Range(0.01, 10.0),
    "seed": Range(-(2**63), 2**63 - 1),
    "max_tokens": Range(1, 1_000_000),
    "min_tokens": Range(0, 1_000_000),
    "logprobs": Range(0, 20),
    "prompt_logprobs": Range(0, 20),
}
LOGIT_BIAS_RANGE = Range(-100.0, 100.0)
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_ALLOWED_TOKEN_IDS = 8192
# Texts that a request bans, and the tokens of all their sequences: each text may have two.
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_BAD_TOKENS = 16_384
PRIORITY_RANGE = Range(-(2**31), 2**31 - 1)
# UTF-8 bytes of a grammar's text, by its kind.
MAX_GRAMMAR_BYTES = {"json_schema": 128 * 1024, "json_object": 0, "regex": 16 * 1024, "lark": 256 * 1024}
# UTF-8 bytes of a grammar in EBNF. Python converts it, in time that grows faster than the text.
MAX_EBNF_BYTES = 16 * 1024
MAX_N = 16
MAX_PROMPTS_PER_REQUEST = 64
MAX_DRAFT_TOKENS = Range(0, 255)
# Ranges of a request's draft shape, named as in DraftShape. The verifier's flags narrow them.
SHAPE_RANGES = {"num_steps": Range(1, 64), "topk": Range(1, 64), "num_draft_tokens": Range(2, 256)}
MAX_REQUEST_ID_CHARS = 128
# Of one output's id: the request's, and the numbers of prompt and choice.
MAX_OUTPUT_ID_CHARS = MAX_REQUEST_ID_CHARS + 16
MAX_CACHE_SALT_CHARS = 256
MAX_ADDRESS_CHARS = 256
# Drafters attached to one verifier at once, and drafter names in its life: counts are kept by name.
MAX_DRAFTERS = 16
MAX_DRAFTER_NAMES = 256
# Values of "speculative.drafter" that are not names.
DRAFTER_CHOICES = ("auto", "merge")
# Names of all drafters, joined: each has 64 characters at most (``NAME_RULE``).
MAX_DRAFTER_CHARS = MAX_DRAFTERS * 65
MAX_CHAT_MESSAGES = 1024
# Parts of the content of one message or prediction.
MAX_CONTENT_PARTS = 1024
# Metadata of a response; the limits are OpenAI's.
MAX_METADATA_PAIRS = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512
# Functions that one request offers, and the length of their names and descriptions.
MAX_TOOLS = 128
MAX_TOOL_NAME_CHARS = 64
MAX_TOOL_DESCRIPTION_CHARS = 16_384
# Size of all functions of a request, as JSON.
MAX_TOOLS_CHARS = 512 * 1024
# Tool calls of one reply whose form a grammar enforces.
MAX_TOOL_CALLS = 16
# Brackets, blanks and operators in the arguments of one call in Python: parsing takes some tens of
# milliseconds for these. A longer call is content.
MAX_PYTHONIC_MARKS = 8192
# Variables that one request gives to the chat template, and their bytes as JSON.
MAX_TEMPLATE_KWARGS = 64
MAX_TEMPLATE_KWARGS_BYTES = 64 * 1024
# Corpora of one drafter, and tokens that one call adds.
MAX_CORPORA = 64
MAX_CORPUS_TOKENS = 1_000_000
MAX_TIMEOUT_MS = 24 * 3600 * 1000
# Bytes of one REST body or one gRPC message.
MAX_BODY_BYTES = 8 * 1024 * 1024
# Contents of one JSON body. Parsing stops all streams, so these limits bound it to some tens of
# milliseconds.
MAX_JSON_VALUES = 524_288
MAX_JSON_STRINGS = 131_072
MAX_JSON_FIELDS = 32_768
MAX_JSON_CONTAINERS = 32_768
# Lists and objects inside each other. orjson writes 254 levels, and some are put around a value.
MAX_JSON_DEPTH = 128
# Size of one prompt's text, or of all messages of a chat. The gateway also refuses a text that can
# never fit the model's context. Bytes bound the tokens, because each byte may become a token.
MAX_PROMPT_CHARS = 2_000_000
MAX_PROMPT_BYTES = 4_000_000
# Tokens of the expected output, which must also fit the context.
MAX_PREDICTION_TOKENS = 32_768
# Token ids that one call of /tokenize returns or one of /detokenize takes.
MAX_TOKENIZED_IDS = 262_144
# Attempts of one sequence, far above the gateway's --resume-attempts.
MAX_ATTEMPTS = 1_000_000
MAX_CHOICE_INDEX = MAX_N - 1
# Size of a value in an error message.
MAX_SHOWN_CHARS = 64
MAX_SHOWN_BITS = 128
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
NAME_RULE = "1 to 64 characters of a-z, 0-9, '_', '.' and '-', the first a letter or digit"


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits that depend on the served model."""

    vocab_size: int
    max_model_len: int
    drafter_names: tuple[str, ...] = ()
    # Names of detached drafters. Requests may still use them; error messages leave them out.
    detached_drafters: tuple[str, ...] = ()


def check_number(field: str, value: float, allowed: Range) -> None:
    """Raise InvalidRequestError naming ``field`` unless ``value`` is a number in ``allowed``."""
    if value not in allowed:
        kind = "an integer" if allowed.is_integer else "a number"
        raise InvalidRequestError(f"{field} must be {kind} in {allowed}, got {_shown(value)}", field=field)


def check_chars(field: str, count: int, most: int, *, least: int = 0) -> None:
    """Raise InvalidRequestError naming ``field`` unless ``count`` characters are allowed."""
    if not least <= count <= most:
        raise InvalidRequestError(f"{field} must have {least} to {most} characters, got {count}", field=field)


def check_text(field: str, value: str, max_chars: int, *, min_chars: int = 0) -> None:
    """Raise InvalidRequestError naming ``field`` for a wrong length or invalid Unicode."""
    check_chars(field, len(value), max_chars, least=min_chars)
    check_unicode(field, value)


def check_unicode(field: str, value: str) -> None:
    """Raise InvalidRequestError naming ``field`` for a text without a UTF-8 form."""
    # JSON can spell half of a surrogate pair, which has no UTF-8 form for the wire or a hash.
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{field} holds a lone surrogate", field=field) from error


def check_bytes(field: str, value: str, max_bytes: int) -> None:
    """Raise InvalidRequestError naming ``field`` if its UTF-8 form is longer than ``max_bytes``."""
    num_bytes = len(value.encode())
    if num_bytes > max_bytes:
        raise InvalidRequestError(f"{field} must have at most {max_bytes} bytes, got {num_bytes}", field=field)


def check_name(field: str, value: str) -> None:
    """Raise InvalidRequestError naming ``field`` unless a drafter or corpus may have this name."""
    if not is_name(value):
        raise InvalidRequestError(f"{field} must be {NAME_RULE}, got {_shown(value)}", field=field)


def is_name(value: str) -> bool:
    """Return whether a drafter or corpus may have this name."""
    return _NAME.fullmatch(value) is not None


def check_drafter_name(field: str, value: str) -> None:
    """Raise InvalidRequestError naming ``field`` unless a drafter may have this name."""
    check_name(field, value)
    if value in DRAFTER_CHOICES:
        raise InvalidRequestError(f"{field} must not be {value!r}, which means a choice of drafters", field=field)


def check_address(field: str, value: str) -> None:
    """Raise InvalidRequestError naming ``field`` unless it is a service's address."""
    check_text(field, value, MAX_ADDRESS_CHARS)
    try:
        address.check_address(value)
    except ValueError as error:
        raise InvalidRequestError(f"{field}: {error}", field=field) from None


def check_count(field: str, count: int, most: int, *, least: int = 0) -> None:
    """Raise InvalidRequestError naming ``field`` unless ``count`` items are allowed."""
    if not least <= count <= most:
        raise InvalidRequestError(f"{field} must have {least} to {most} items, got {count}", field=field)


def check_token_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidRequestError naming ``field`` unless all ids are tokens of the model."""
    # A few fast calls for thousands of ids; the loop below finds the id at fault.
    if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size):
        return
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise InvalidRequestError(f"{field}: token id {_shown(token_id)} is not in [0, {vocab_size})", field=field)


def check_sampling(params: SamplingParams, model: ModelLimits) -> None:
    """Raise InvalidRequestError naming the first field that exceeds its limits."""
    for field, allowed in SAMPLING_RANGES.items():
        value = getattr(params, field)
        if value is not None:
            check_number(field, value, allowed)
    check_count("logit_bias", len(params.logit_bias), MAX_LOGIT_BIAS_ENTRIES)
    for token_id, bias in params.logit_bias.items():
        check_token_ids("logit_bias", (token_id,), model.vocab_size)
        check_number("logit_bias", bias, LOGIT_BIAS_RANGE)
    check_count("stop_token_ids", len(params.stop_token_ids), MAX_STOP_TOKEN_IDS)
    check_token_ids("stop_token_ids", params.stop_token_ids, model.vocab_size)
    check_count("allowed_token_ids", len(params.allowed_token_ids), MAX_ALLOWED_TOKEN_IDS)
    check_token_ids("allowed_token_ids", params.allowed_token_ids, model.vocab_size)
    check_count("bad_words", len(params.bad_token_ids), 2 * MAX_BAD_WORDS)
    check_tokens("bad_words", sum(map(len, params.bad_token_ids)), MAX_BAD_TOKENS)
    for sequence in params.bad_token_ids:
        check_count("bad_words", len(sequence), MAX_BAD_TOKENS, least=1)
        check_token_ids("bad_words", sequence, model.vocab_size)
    if params.min_tokens > params.max_tokens:
        raise InvalidRequestError("min_tokens must not be greater than max_tokens", field="min_tokens")
    if params.grammar is not None:
        check_grammar(params.grammar.kind, params.grammar)


def check_grammar(field: str, grammar: Grammar) -> None:
    """Raise InvalidRequestError naming ``field`` if the grammar is too long.

    It is compiled later.
    """
    most = MAX_GRAMMAR_BYTES[grammar.kind]
    check_text(field, grammar.text, most)
    check_bytes(field, grammar.text, most)


# Joins the names of drafters whose trees a request wants merged; no name contains it.
DRAFTER_JOIN = "+"


def named_drafters(options: SpeculationOptions) -> tuple[str, ...]:
    """Return the drafters that a request names; () if the verifier chooses."""
    return () if options.drafter in DRAFTER_CHOICES else tuple(options.drafter.split(DRAFTER_JOIN))


def check_speculation(options: SpeculationOptions, model: ModelLimits) -> None:
    """Raise InvalidRequestError for an invalid draft width or an unknown drafter."""
    if options.max_draft_tokens is not None:
        check_number("speculative.max_draft_tokens", options.max_draft_tokens, MAX_DRAFT_TOKENS)
    if options.shape is not None:
        for name, allowed in SHAPE_RANGES.items():
            check_number(f"speculative.shape.{name}", getattr(options.shape, name), allowed)
    check_text("speculative.drafter", options.drafter, MAX_DRAFTER_CHARS)
    joined = [name for name in DRAFTER_CHOICES if name in named_drafters(options)]
    if joined:
        raise InvalidRequestError(
            f"speculative.drafter: {joined[0]} cannot be joined with {DRAFTER_JOIN}; only names of drafters can",
            field="speculative.drafter",
        )
    unknown = [repr(name) for name in named_drafters(options) if name not in model.drafter_names]
    if unknown:
        there = [name for name in model.drafter_names if name not in model.detached_drafters]
        names = ", ".join((*DRAFTER_CHOICES, *there))
        raise InvalidRequestError(
            f"speculative.drafter: there is no drafter {', '.join(unknown)}; available: {names}; "
            f"join drafters with {DRAFTER_JOIN}; set speculative.enabled to false to use none",
            field="speculative.drafter",
        )


def check_tokens(field: str, count: int, most: int) -> None:
    """Raise InvalidRequestError naming ``field`` unless ``count`` tokens are allowed."""
    if count > most:
        raise InvalidRequestError(f"{field} has {count} tokens; it may have at most {most}", field=field)


def check_prompt_length(field: str, num_tokens: int, max_model_len: int, *, at_least: bool = False) -> None:
    """Raise ContextLengthError naming ``field`` unless a prompt of this length fits the context.

    ``at_least``: the prompt has not been encoded and may have more tokens.

    The words are OpenAI's, because clients search for them. The completion counts as one token,
    the fewest that a request needs: a larger ``max_tokens`` is cut to what the prompt leaves.
    """
    if num_tokens >= max_model_len:
        more = "at least " if at_least else ""
        raise ContextLengthError(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{more}{num_tokens + 1} tokens ({more}{num_tokens} in the messages, 1 in the completion). "
            "Please reduce the length of the messages or completion.",
            field=field,
        )


def check_prompt_size(field: str, num_chars: int, max_model_len: int, *, num_bytes: int = 0) -> None:
    """Raise ContextLengthError naming ``field`` for a text that is too long to be encoded."""
    for count, most, unit in ((num_chars, MAX_PROMPT_CHARS, "characters"), (num_bytes, MAX_PROMPT_BYTES, "bytes")):
        if count > most:
            raise ContextLengthError(
                f"This model's maximum context length is {max_model_len} tokens. However, your messages have "
                f"{count} {unit}, and at most {most} are encoded. Please reduce the length of the messages.",
                field=field,
            )


def check_prompt(prompt_ids: Sequence[int], model: ModelLimits, *, field: str = "prompt") -> None:
    """Raise InvalidRequestError unless the prompt has valid ids, at least one, and fits."""
    if not prompt_ids:
        raise InvalidRequestError(f"{field} must not be empty", field=field)
    check_prompt_length(field, len(prompt_ids), model.max_model_len)
    check_token_ids(field, prompt_ids, model.vocab_size)


def check_prediction_length(field: str, num_tokens: int, max_model_len: int, *, at_least: bool = False) -> None:
    """Raise InvalidRequestError naming ``field`` if a predicted output of this length is too long.

    ``at_least``: it has not been encoded and may have more tokens.
    """
    if num_tokens > max_model_len:
        raise InvalidRequestError(
            f"{field} has {'at least ' if at_least else ''}{num_tokens} tokens; this model's context is "
            f"{max_model_len} tokens",
            field=field,
        )
    check_tokens(field, num_tokens, MAX_PREDICTION_TOKENS)


def check_prediction(prediction_ids: Sequence[int], model: ModelLimits, *, field: str = "prediction") -> None:
    """Raise InvalidRequestError unless a predicted output fits the context and has valid ids."""
    check_prediction_length(field, len(prediction_ids), model.max_model_len)
    check_token_ids(field, prediction_ids, model.vocab_size)


def _shown(value: object) -> str:
    """Return a value for an error message, shortened.

    Python refuses to print very long integers.
    """
    if isinstance(value, int) and value.bit_length() > MAX_SHOWN_BITS:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."
