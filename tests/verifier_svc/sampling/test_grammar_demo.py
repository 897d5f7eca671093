"""Grammars on the demo model with the n-gram drafter give whole values and plain decode's text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field
from tokenizers import Tokenizer

from foretoken.results import FinishReason
from foretoken.sampling import Grammar, SamplingParams
from tests.support.engine_harness import Harness, Request, Result
from tests.support.grammars import regex, schema
from tests.verifier_svc.test_demo_identity import DEMO, TEMPERATURES, harness
from tests.verifier_svc.test_identity import assert_same, assert_speculated
from verifier_svc.model.runner import ModelRunner
from verifier_svc.sampling.grammar import Matcher, Vocabulary, compile_grammar


class Argument(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: Literal["first", "second", "third"]
    kind: Literal["positional", "keyword"]
    default: int | None


class Function(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    function: str = Field(pattern="^[a-z_]{3,12}$")
    arguments: list[Argument] = Field(min_length=3, max_length=4)


# Names repeat in the prompt and in the output: the n-gram drafter finds them.
PROMPTS = (
    '[{"function": "add", "arguments": [{"name": "first", "kind": "positional", "default": null}]},\n ',
    "def is_even(number):\n    return number % 2 == 0\n\ndef is_odd(number):\n    return number % 2 == 1\n\n",
)
CALL = r"(assert is_(even|odd)\([0-9]{1,3}\) == (True|False)\n){5,6}"
GRAMMARS = {
    "schema": (PROMPTS[0], schema(Function.model_json_schema())),
    "object": (PROMPTS[0], Grammar("json_object")),
    "regex": (PROMPTS[1], regex(CALL)),
}


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    runner = ModelRunner(DEMO, threads=1, num_blocks=256, block_size=16)
    runner.warm_up()
    return runner


@pytest.fixture(scope="module")
def matchers() -> Iterator[dict[str, Matcher]]:
    vocabulary = Vocabulary(DEMO, vocab_limit=8192, eos_ids=frozenset({0, 3}))
    yield {name: compile_grammar(grammar, vocabulary) for name, (_, grammar) in GRAMMARS.items()}


def assert_whole(name: str, text: str) -> None:
    if name == "schema":
        Function.model_validate_json(text)
    elif name == "regex":
        assert re.fullmatch(CALL, text)


@pytest.mark.parametrize("temperature", TEMPERATURES.values(), ids=TEMPERATURES)
def test_outputs_are_whole_and_the_same_with_and_without_drafts(
    runner: ModelRunner, matchers: dict[str, Matcher], temperature: float
) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    names, requests = [], []
    for name, (prompt, grammar) in GRAMMARS.items():
        for seed in range(3):
            params = SamplingParams(temperature=temperature, seed=seed, max_tokens=180, grammar=grammar, logprobs=1)
            names.append(name)
            requests.append(Request(tokenizer.encode(prompt).ids, params, choice_index=seed, matcher=matchers[name]))
    expected: list[Result] = run(harness(runner, drafter=False), requests)
    # Blocks for about three of the nine.
    drafted = harness(runner, drafter=True, num_blocks=28)
    got = run(drafted, requests)
    assert_same(requests, expected, got)
    assert_speculated(got)
    assert drafted.scheduler.num_preemptions > 0
    num_whole = 0
    for name, result in zip(names, got, strict=True):
        assert result.finished is not None
        if result.finished.reason is FinishReason.STOP:
            num_whole += name != "object"
            assert_whole(name, tokenizer.decode(result.token_ids, skip_special_tokens=False))
    assert num_whole >= 3, "too few outputs came to their end"


def run(harness: Harness, requests: Sequence[Request]) -> list[Result]:
    results = harness.run(requests)
    harness.drain()
    return results
