"""The one table of limits: every number in a request has its range here.

Gateway and verifier both call ``check_sampling`` and ``check_speculation``; neither trusts the other.
What depends on the model (context length, vocabulary) is passed in as ``ModelLimits``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from foretoken import address
from foretoken.errors import InvalidRequestError
from foretoken.sampling import Grammar, SamplingParams, SpeculationOptions


@dataclass(frozen=True, slots=True)
class Range:
    """An inclusive range; ``low_open`` leaves the lower end out. Ends that are ints admit integers only."""

    low: float
    high: float
    low_open: bool = False

    @property
    def is_integer(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    def __contains__(self, value: object) -> bool:
        """False for whatever is not a number of this range: NaN, infinities, booleans and text among them."""
        if isinstance(value, bool) or not isinstance(value, int if self.is_integer else (int, float)):
            return False
        # Comparisons with NaN are false.
        return (self.low < value if self.low_open else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        low, high = (str(end) if self.is_integer else f"{end:g}" for end in (self.low, self.high))
        return f"{'(' if self.low_open else '['}{low}, {high}]"


# Request fields that are one number each. Names are those of SamplingParams.
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
MAX_STOP_STRINGS = 4
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
# UTF-8 bytes of a grammar's text, by its kind.
MAX_GRAMMAR_BYTES = {"json_schema": 128 * 1024, "json_object": 0, "regex": 16 * 1024}
MAX_N = 16
MAX_PROMPTS_PER_REQUEST = 64
MAX_DRAFT_TOKENS = Range(0, 255)
MAX_REQUEST_ID_CHARS = 128
MAX_CACHE_SALT_CHARS = 256
MAX_DRAFTER_NAME_CHARS = 64
MAX_ADDRESS_CHARS = 256
# Attached to one verifier at once, and names in its life: what was drafted under a name is counted on.
MAX_DRAFTERS = 16
MAX_DRAFTER_NAMES = 256
# What "speculative.drafter" means by itself.
DRAFTER_CHOICES = ("auto", "merge")
MAX_CHAT_MESSAGES = 1024
# Parts of one message's content, or of a prediction's.
MAX_CONTENT_PARTS = 1024
# Of one drafter, and tokens that one call adds to one of them.
MAX_CORPORA = 64
MAX_CORPUS_TOKENS = 1_000_000
MAX_TIMEOUT_MS = 24 * 3600 * 1000
# Bytes of one REST body or one gRPC message.
MAX_BODY_BYTES = 8 * 1024 * 1024
# What one JSON body may hold. Its parser stops all streams meanwhile: these limits bound that
# to some tens of milliseconds.
MAX_JSON_VALUES = 524_288
MAX_JSON_STRINGS = 131_072
MAX_JSON_FIELDS = 32_768
MAX_JSON_CONTAINERS = 32_768
# Of one prompt's text, or of all messages of a chat. The gateway also refuses a text that can never
# fit the model's context. The bytes bound the tokens: there may be one a byte.
MAX_PROMPT_CHARS = 2_000_000
MAX_PROMPT_BYTES = 4_000_000
# Of the expected output; also no more than the context.
MAX_PREDICTION_TOKENS = 32_768
# Token ids that one call of /tokenize gives or one of /detokenize takes.
MAX_TOKENIZED_IDS = 262_144
# Attempts of one sequence; the gateway's --resume-attempts is far below.
MAX_ATTEMPTS = 1_000_000
MAX_CHOICE_INDEX = MAX_N - 1
# Of a value at fault, in the message.
MAX_SHOWN_CHARS = 64
MAX_SHOWN_BITS = 128
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
NAME_RULE = "1 to 64 characters of a-z, 0-9, '_', '.' and '-', the first a letter or digit"


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What requests are checked against that depends on the model served."""

    vocab_size: int
    max_model_len: int
    drafter_names: tuple[str, ...] = ()
    # Of them those that were detached: requests may name them still, and are told of others.
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
    """Raise InvalidRequestError naming ``field`` unless its length is in the range and it is proper Unicode."""
    check_chars(field, len(value), max_chars, least=min_chars)
    # JSON can spell halves of a surrogate pair, which have no UTF-8 form: neither wire nor hashes could take them.
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{field} holds a lone surrogate", field=field) from error


def check_bytes(field: str, value: str, max_bytes: int) -> None:
    """Raise InvalidRequestError naming ``field`` if its UTF-8 form is longer."""
    num_bytes = len(value.encode())
    if num_bytes > max_bytes:
        raise InvalidRequestError(f"{field} must have at most {max_bytes} bytes, got {num_bytes}", field=field)


def check_name(field: str, value: str) -> None:
    """Raise InvalidRequestError naming ``field`` unless it is a name as drafters and corpora have them."""
    if not is_name(value):
        raise InvalidRequestError(f"{field} must be {NAME_RULE}, got {_shown(value)}", field=field)


def is_name(value: str) -> bool:
    """Whether drafters and corpora may have it for a name."""
    return _NAME.fullmatch(value) is not None


def check_drafter_name(field: str, value: str) -> None:
    """Raise InvalidRequestError naming ``field`` unless a drafter may be called so."""
    check_name(field, value)
    if value in DRAFTER_CHOICES:
        raise InvalidRequestError(f"{field} must not be {value!r}, which means a choice of drafters", field=field)


def check_address(field: str, value: str) -> None:
    """Raise InvalidRequestError naming ``field`` unless it is where a service may listen."""
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
    # In a few calls, as thousands may come at once; the loop below finds the one at fault.
    if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size):
        return
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise InvalidRequestError(f"{field}: token id {_shown(token_id)} is not in [0, {vocab_size})", field=field)


def check_sampling(params: SamplingParams, model: ModelLimits) -> None:
    """Raise InvalidRequestError naming the first field that is out of its range."""
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
    if params.min_tokens > params.max_tokens:
        raise InvalidRequestError("min_tokens must not be greater than max_tokens", field="min_tokens")
    if params.grammar is not None:
        check_grammar(params.grammar.kind, params.grammar)


def check_grammar(field: str, grammar: Grammar) -> None:
    """Raise InvalidRequestError naming ``field`` if the grammar is too long; whether it compiles is seen later."""
    most = MAX_GRAMMAR_BYTES[grammar.kind]
    check_text(field, grammar.text, most)
    check_bytes(field, grammar.text, most)


# Between names of drafters whose trees a request wants merged; no name has it.
DRAFTER_JOIN = "+"


def named_drafters(options: SpeculationOptions) -> tuple[str, ...]:
    """Drafters that a request names; none where it leaves the choice to the verifier."""
    return () if options.drafter in DRAFTER_CHOICES else tuple(options.drafter.split(DRAFTER_JOIN))


def check_speculation(options: SpeculationOptions, model: ModelLimits) -> None:
    """Raise InvalidRequestError for a draft width out of range or a drafter that was never configured."""
    if options.max_draft_tokens is not None:
        check_number("speculative.max_draft_tokens", options.max_draft_tokens, MAX_DRAFT_TOKENS)
    check_text("speculative.drafter", options.drafter, MAX_DRAFTER_NAME_CHARS)
    joined = [name for name in DRAFTER_CHOICES if name in named_drafters(options)]
    if joined:
        raise InvalidRequestError(
            f"speculative.drafter: {joined[0]} stands by itself; names of drafters are joined by {DRAFTER_JOIN}",
            field="speculative.drafter",
        )
    unknown = [repr(name) for name in named_drafters(options) if name not in model.drafter_names]
    if unknown:
        there = [name for name in model.drafter_names if name not in model.detached_drafters]
        names = ", ".join((*DRAFTER_CHOICES, *there))
        raise InvalidRequestError(
            f"speculative.drafter: there is no drafter {', '.join(unknown)}; there is: {names}; "
            f"drafters are joined by {DRAFTER_JOIN}; speculative.enabled false does without any",
            field="speculative.drafter",
        )


def check_tokens(field: str, count: int, most: int) -> None:
    """Raise InvalidRequestError naming ``field`` unless ``count`` tokens are allowed."""
    if count > most:
        raise InvalidRequestError(f"{field} has {count} tokens, and may have {most}", field=field)


def check_prompt_length(field: str, num_tokens: int, max_model_len: int, *, at_least: bool = False) -> None:
    """Raise InvalidRequestError naming ``field`` unless a prompt of this length fits the context.

    ``at_least``: the prompt may have more; it has not been encoded.
    """
    if num_tokens >= max_model_len:
        raise InvalidRequestError(
            f"{field} has {'at least ' if at_least else ''}{num_tokens} tokens; this model's context is "
            f"{max_model_len} tokens and at least one must be left for the output",
            field=field,
        )


def check_prompt(prompt_ids: Sequence[int], model: ModelLimits, *, field: str = "prompt") -> None:
    """Raise InvalidRequestError unless the prompt is non-empty, fits the context and has valid ids."""
    if not prompt_ids:
        raise InvalidRequestError(f"{field} must not be empty", field=field)
    check_prompt_length(field, len(prompt_ids), model.max_model_len)
    check_token_ids(field, prompt_ids, model.vocab_size)


def check_prediction_length(field: str, num_tokens: int, max_model_len: int, *, at_least: bool = False) -> None:
    """Raise InvalidRequestError naming ``field`` if a predicted output of this length is too long.

    ``at_least``: it may have more; it has not been encoded.
    """
    if num_tokens > max_model_len:
        raise InvalidRequestError(
            f"{field} has {'at least ' if at_least else ''}{num_tokens} tokens; this model's context is "
            f"{max_model_len} tokens",
            field=field,
        )
    check_tokens(field, num_tokens, MAX_PREDICTION_TOKENS)


def check_prediction(prediction_ids: Sequence[int], model: ModelLimits, *, field: str = "prediction") -> None:
    """Raise InvalidRequestError unless the predicted output, which may be empty, fits the context and has valid ids."""
    check_prediction_length(field, len(prediction_ids), model.max_model_len)
    check_token_ids(field, prediction_ids, model.vocab_size)


def _shown(value: object) -> str:
    """A value at fault, for a message: short, whatever it is. Python refuses to print very long integers."""
    if isinstance(value, int) and value.bit_length() > MAX_SHOWN_BITS:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."
