"""The limits table: every field under, at and over its range, and values of wrong types."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from foretoken import limits
from foretoken.errors import ContextLengthError, InvalidRequestError
from foretoken.limits import LOGIT_BIAS_RANGE, SAMPLING_RANGES, ModelLimits, Range
from foretoken.sampling import DraftShape, Grammar, SamplingParams, SpeculationOptions
from foretoken.wire import sampling_from_proto, sampling_to_proto
from tests.support.sampling_limits import NUMBERS

MODEL = ModelLimits(vocab_size=100, max_model_len=16, drafter_names=("ngram", "eagle"))
INTEGERS = {name for name, allowed in SAMPLING_RANGES.items() if allowed.is_integer}
NOT_NUMBERS = [float("nan"), float("inf"), float("-inf"), True, "1", None, [1], 10**400, -(10**400)]


def field_at_fault(check, *arguments) -> str:
    """Return the field that the check's error names; empty if it raises none."""
    try:
        check(*arguments)
    except InvalidRequestError as error:
        # OpenAI's words about the context name no field.
        assert isinstance(error, ContextLengthError) or error.field in error.message
        assert len(error.message) < 400, "a hostile value does not flood the message"
        return error.field
    return ""


def with_value(field: str, value) -> SamplingParams:
    # A small min_tokens is only right below max_tokens, so that the table alone decides here.
    room = {"max_tokens": 1_000_000} if field == "min_tokens" else {}
    return replace(SamplingParams(), **room, **{field: value})


def just_outside(allowed: Range) -> list[float]:
    step = 1 if allowed.is_integer else 1e-9
    below = allowed.low if allowed.low_open else allowed.low - step
    return [below, allowed.high + step]


def test_every_number_of_the_parameters_has_a_range():
    numbers = {field.name for field in fields(SamplingParams)} - {
        "logit_bias",
        "stop_token_ids",
        "ignore_eos",
        "grammar",
        "allowed_token_ids",
        "bad_token_ids",
    }
    assert numbers == set(SAMPLING_RANGES)
    assert {"top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"} == INTEGERS


def test_the_table_is_what_the_documentation_says():
    assert NUMBERS.keys() == SAMPLING_RANGES.keys()
    for name, (low, high, below, above) in NUMBERS.items():
        allowed = SAMPLING_RANGES[name]
        assert low in allowed and high in allowed and below not in allowed and above not in allowed, name
    texts = (limits.MAX_STOP_STRINGS, limits.MAX_STOP_STRING_CHARS, limits.MAX_STOP_TOKEN_IDS)
    assert texts == (64, 256, 64)
    assert (Range(-100.0, 100.0), 1024) == (limits.LOGIT_BIAS_RANGE, limits.MAX_LOGIT_BIAS_ENTRIES)
    assert (16, 64, Range(0, 255)) == (limits.MAX_N, limits.MAX_PROMPTS_PER_REQUEST, limits.MAX_DRAFT_TOKENS)


@pytest.mark.parametrize("field", SAMPLING_RANGES)
def test_both_ends_of_a_range_are_allowed(field):
    allowed = SAMPLING_RANGES[field]
    low = 1e-9 if allowed.low_open else allowed.low
    for value in (low, allowed.high):
        assert field_at_fault(limits.check_sampling, with_value(field, value), MODEL) == ""


@pytest.mark.parametrize("field", SAMPLING_RANGES)
def test_values_outside_a_range_name_the_field(field):
    for value in just_outside(SAMPLING_RANGES[field]):
        assert field_at_fault(limits.check_sampling, with_value(field, value), MODEL) == field


@pytest.mark.parametrize("field", SAMPLING_RANGES)
def test_what_is_no_finite_number_names_the_field(field):
    for value in NOT_NUMBERS:
        if value is None:
            continue  # "not asked for", where a field has that
        assert field_at_fault(limits.check_sampling, with_value(field, value), MODEL) == field


@pytest.mark.parametrize("field", sorted(INTEGERS))
def test_integer_fields_take_no_fractions(field):
    assert field_at_fault(limits.check_sampling, with_value(field, 1.5), MODEL) == field
    assert field_at_fault(limits.check_sampling, with_value(field, 1.0), MODEL) == field


@pytest.mark.parametrize("field", sorted(set(SAMPLING_RANGES) - INTEGERS))
def test_other_fields_take_integers(field):
    assert field_at_fault(limits.check_sampling, with_value(field, 1), MODEL) == ""


def test_the_default_parameters_are_allowed():
    limits.check_sampling(SamplingParams(), MODEL)


def test_min_tokens_may_not_exceed_max_tokens():
    assert field_at_fault(limits.check_sampling, SamplingParams(max_tokens=4, min_tokens=4), MODEL) == ""
    assert field_at_fault(limits.check_sampling, SamplingParams(max_tokens=4, min_tokens=5), MODEL) == "min_tokens"


def test_logit_bias():
    def fault(bias):
        return field_at_fault(limits.check_sampling, SamplingParams(logit_bias=bias), MODEL)

    assert fault({0: -100.0, 99: 100.0}) == ""
    for value in [*just_outside(LOGIT_BIAS_RANGE), *NOT_NUMBERS]:
        assert fault({1: value}) == "logit_bias"
    for token_id in (-1, 100, 1.0, True, "1", 10**400):
        assert fault({token_id: 1.0}) == "logit_bias"
    wide = replace(MODEL, vocab_size=10_000)
    most = limits.MAX_LOGIT_BIAS_ENTRIES
    assert field_at_fault(limits.check_sampling, SamplingParams(logit_bias=dict.fromkeys(range(most), 0.0)), wide) == ""
    over = SamplingParams(logit_bias=dict.fromkeys(range(most + 1), 0.0))
    assert field_at_fault(limits.check_sampling, over, wide) == "logit_bias"


def test_stop_token_ids():
    def fault(ids):
        return field_at_fault(limits.check_sampling, SamplingParams(stop_token_ids=ids), MODEL)

    assert fault((0, 99)) == ""
    for token_id in (-1, 100, 1.0, True, "1", 10**400):
        assert fault((token_id,)) == "stop_token_ids"
    assert fault((1,) * limits.MAX_STOP_TOKEN_IDS) == ""
    assert fault((1,) * (limits.MAX_STOP_TOKEN_IDS + 1)) == "stop_token_ids"


def test_speculation_options():
    def fault(**options):
        return field_at_fault(limits.check_speculation, SpeculationOptions(**options), MODEL)

    assert fault() == fault(drafter="ngram") == fault(max_draft_tokens=0) == fault(max_draft_tokens=255) == ""
    for value in [-1, 256, 1.5, *NOT_NUMBERS]:
        if value is not None:
            assert fault(max_draft_tokens=value) == "speculative.max_draft_tokens"
    assert fault(shape=DraftShape(1, 1, 2)) == fault(shape=DraftShape(64, 64, 256)) == ""
    for place, (name, allowed) in enumerate(limits.SHAPE_RANGES.items()):
        for value in (allowed.low - 1, allowed.high + 1, 1.5):
            shape = [value if index == place else 2 for index in range(3)]
            assert fault(shape=DraftShape(*shape)) == f"speculative.shape.{name}"
    long_names = ("a" * 64, "b" * 64)
    joined = replace(MODEL, drafter_names=long_names)
    limits.check_speculation(SpeculationOptions(drafter="+".join(long_names)), joined)
    for name in ("", "unknown", "n" * 65, "n+" * 600, "\ud800"):
        assert fault(drafter=name) == "speculative.drafter"
    with pytest.raises(InvalidRequestError, match="auto, merge, ngram, eagle"):
        limits.check_speculation(SpeculationOptions(drafter="eagl"), MODEL)
    gone = replace(MODEL, detached_drafters=("ngram",))
    limits.check_speculation(SpeculationOptions(drafter="ngram"), gone)
    with pytest.raises(InvalidRequestError, match="available: auto, merge, eagle;"):
        limits.check_speculation(SpeculationOptions(drafter="eagl"), gone)
    with pytest.raises(InvalidRequestError, match=r"auto cannot be joined"):
        limits.check_speculation(SpeculationOptions(drafter="ngram+auto"), MODEL)


def test_names_and_addresses_of_drafters():
    def fault(check, value):
        return field_at_fault(lambda: check("it", value))

    for name in ("a", "ngram-2", "0" * 64):
        assert fault(limits.check_drafter_name, name) == ""
    for name in ("", "A", "-a", "a" * 65, "a b", "auto", "merge", "\ud800"):
        assert fault(limits.check_drafter_name, name) == "it"
    for address in ("unix:/a", "host:1", "[::1]:65535"):
        assert fault(limits.check_address, address) == ""
    for address in ("", "unix:a", "host", ":1", "host:0", "host:65536", "unix:/" + "a" * 256, "unix:/\ud800"):
        assert fault(limits.check_address, address) == "it"


def test_prompts():
    def fault(ids):
        return field_at_fault(limits.check_prompt, ids, MODEL)

    assert fault([0]) == fault([99] * 15) == ""
    for ids in ([], [1] * 16, [-1], [100], [1.0], [True]):
        assert fault(ids) == "prompt"
    with pytest.raises(InvalidRequestError) as caught:
        limits.check_prompt([], MODEL, field="messages")
    assert caught.value.field == "messages"


def test_texts_and_counts():
    def text_fault(value):
        return field_at_fault(lambda: limits.check_text("cache_salt", value, 4, min_chars=1))

    assert text_fault("a") == text_fault("äöüß") == ""
    for value in ("", "abcde", "\ud83d", "a\udc00"):
        assert text_fault(value) == "cache_salt"
    assert field_at_fault(lambda: limits.check_count("n", 2, 2, least=1)) == ""
    for count in (0, 3):
        assert field_at_fault(lambda count=count: limits.check_count("n", count, 2, least=1)) == "n"


def test_ranges_are_shown_as_people_write_them():
    assert str(Range(0, 1_000_000)) == "[0, 1000000]"
    assert str(Range(0.0, 1.0, low_open=True)) == "(0, 1]"
    with pytest.raises(InvalidRequestError, match=r"top_k must be an integer in \[-1, 1000000\], got 1.5"):
        limits.check_number("top_k", 1.5, SAMPLING_RANGES["top_k"])


def test_token_masks_have_bounds_and_cross_the_wire():
    params = replace(SamplingParams(), allowed_token_ids=(3, 1), bad_token_ids=((1,), (2, 3, 2)))
    assert field_at_fault(limits.check_sampling, params, MODEL) == ""
    assert sampling_from_proto(sampling_to_proto(params)) == params
    for wrong, field in (
        ({"allowed_token_ids": (MODEL.vocab_size,)}, "allowed_token_ids"),
        ({"allowed_token_ids": (1,) * (limits.MAX_ALLOWED_TOKEN_IDS + 1)}, "allowed_token_ids"),
        ({"bad_token_ids": ((1, MODEL.vocab_size),)}, "bad_words"),
        ({"bad_token_ids": ((),)}, "bad_words"),
        ({"bad_token_ids": ((1,),) * (2 * limits.MAX_BAD_WORDS + 1)}, "bad_words"),
        ({"bad_token_ids": ((1,) * (limits.MAX_BAD_TOKENS + 1),)}, "bad_words"),
    ):
        assert field_at_fault(limits.check_sampling, replace(params, **wrong), MODEL) == field


@pytest.mark.parametrize("kind", ["json_schema", "regex", "lark"])
def test_a_grammar_has_its_bytes(kind):
    most = limits.MAX_GRAMMAR_BYTES[kind]
    for text, field in (("a" * most, ""), ("a" * (most + 1), kind), ("é" * (most // 2 + 1), kind), ("\ud800", kind)):
        params = replace(SamplingParams(), grammar=Grammar(kind, text))
        assert field_at_fault(limits.check_sampling, params, MODEL) == field


@pytest.mark.parametrize(
    "grammar",
    [
        None,
        Grammar("json_object"),
        Grammar("json_schema", "{}"),
        Grammar("regex", ""),
        Grammar("regex", "é"),
        Grammar("lark", 'start: "a"'),
    ],
)
def test_a_grammar_crosses_the_wire(grammar):
    params = replace(SamplingParams(), grammar=grammar)
    assert sampling_from_proto(sampling_to_proto(params)) == params
