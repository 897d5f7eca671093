"""The workloads of a served load: prompts, lengths, arms, and the points to measure."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from benchmarks.arm_server import SERVED_NAME
from benchmarks.measure import UnexpectedAnswerError
from benchmarks.prompts import code_prompts
from foretoken.bench.load import CompletedRequest
from foretoken.bench.stream import UserStream

# Different held-out prompts; a larger load repeats them, each under a salt of its own.
MOST_CODE_PROMPTS = 640
# Ids below are special ones.
LEAST_RANDOM_ID = 16
CORE_ARMS = ("plain", "auto", "auto-ngram", "ngram", "fixed-1-1-2", "fixed-3-1-4", "fixed-5-1-6", "fixed-5-8-32")
# Of other loads: auto is held against shapes that a user might fix.
OTHER_ARMS = ("plain", "auto", "fixed-3-1-4", "fixed-5-1-6")
VLLM_ARMS = ("vllm-plain", "vllm-eagle3-3", "vllm-eagle3-5")
# Tokens that a step with a draft yields where weights are random.
ACCEPT_LENGTH = 4.0
# An answer of this schema does not end before the tokens do.
SCHEMA = {
    "type": "array",
    "minItems": 500,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "count": {"type": "integer"}},
        "required": ["name", "count"],
        "additionalProperties": False,
    },
}
# An n-gram drafter finds drafts in a text that repeats itself; a bias makes it so.
REPEATED_TOKEN = 100
REPEATED_BIAS = 100.0
JSON_SCHEMA: Mapping[str, Any] = {"structured_outputs": {"json": SCHEMA}}
LOGPROBS: Mapping[str, Any] = {"logprobs": 5}
NGRAM_DRAFTS: Mapping[str, Any] = {
    "speculative": {"drafter": "ngram"},
    "logit_bias": {str(REPEATED_TOKEN): REPEATED_BIAS},
}
# What the odd stream of a batch asks for.
NONE_ODD = "none odd"
ODD: Mapping[str, Mapping[str, Any]] = {
    NONE_ODD: {},
    "1 with a grammar": {"structured_outputs": {"regex": "[a-z ]*"}},
    "1 with logprobs": LOGPROBS,
    "1 with n-grams": NGRAM_DRAFTS,
}
ODD_GROUP = "odd"


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """One load: ``concurrency`` closed streams, or Poisson arrivals at ``percent`` of the best.

    Attributes:
        case: a name in ODD, or empty.
        times: each stream has so many times as many requests as in other loads.
    """

    concurrency: int = 0
    percent: int = 0
    case: str = ""
    times: int = 1

    @property
    def name(self) -> str:
        load = f"{self.percent}%" if self.percent else str(self.concurrency)
        return f"{load}, {self.case}" if self.case else load


@dataclass(frozen=True, slots=True)
class ServingWorkload:
    """What is sent, to which arms, at which points.

    Attributes:
        prompt_tokens: the length of random prompts; 0: held-out code of 200 to 400 tokens.
        weights: which checkpoint serves it.
        accept_length: a forced acceptance; 0: what the model accepts.
        mixed: every tenth request has a JSON schema, and every tenth wants logprobs.
    """

    name: str
    output_tokens: int
    arms: tuple[str, ...]
    points: tuple[LoadPoint, ...]
    prompt_tokens: int = 0
    weights: Literal["widened", "random"] = "widened"
    accept_length: float = 0.0
    mixed: bool = False

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of ``foretoken serve`` for a forced acceptance."""
        return ("--simulate-accept-length", f"{self.accept_length:g}") if self.accept_length else ()

    def prompts(self, model: Path, count: int) -> list[list[int]]:
        """Return up to ``count`` prompts as token ids."""
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        if not self.prompt_tokens:
            return [list(prompt.token_ids) for prompt in code_prompts(tokenizer, min(count, MOST_CODE_PROMPTS))]
        generator = random.Random(f"{self.name} {self.prompt_tokens}")
        size = tokenizer.get_vocab_size()
        return [
            [generator.randrange(LEAST_RANDOM_ID, size) for _ in range(self.prompt_tokens)]
            for _ in range(min(count, MOST_CODE_PROMPTS))
        ]

    def check(self, answers: Sequence[CompletedRequest]) -> None:
        """Raise UnexpectedAnswerError for an answer of the wrong length or a cached one."""
        for answer in answers:
            if answer.num_tokens != self.output_tokens:
                raise UnexpectedAnswerError(f"{answer.num_tokens} tokens, not {self.output_tokens}")
            if answer.num_cached_tokens:
                raise UnexpectedAnswerError(f"{answer.num_cached_tokens} prompt tokens were cached")


# The median time to the first token of few requests of 192 tokens, 20 at 4 and 80 at 16, differs by
# a fifth from run to run, since they end at much the same times. Three times as many take seconds.
AT_4, AT_16 = LoadPoint(4, times=3), LoadPoint(16, times=3)


def _closed(*concurrencies: int) -> tuple[LoadPoint, ...]:
    return tuple(LoadPoint(concurrency) for concurrency in concurrencies)


WORKLOADS: Mapping[str, ServingWorkload] = {
    workload.name: workload
    for workload in (
        ServingWorkload("core", 192, (*CORE_ARMS, *VLLM_ARMS), (*_closed(1), AT_4, AT_16, *_closed(64, 128, 256))),
        ServingWorkload(
            "long-1k", 1000, OTHER_ARMS, _closed(1, 16, 64), 1000, weights="random", accept_length=ACCEPT_LENGTH
        ),
        ServingWorkload(
            "long-8k", 1000, OTHER_ARMS, _closed(1, 16, 64), 8000, weights="random", accept_length=ACCEPT_LENGTH
        ),
        ServingWorkload("mixed", 192, OTHER_ARMS, (AT_16, *_closed(64)), mixed=True),
        ServingWorkload(
            "poisson",
            192,
            (*OTHER_ARMS, *VLLM_ARMS),
            tuple(LoadPoint(percent=percent) for percent in (25, 50, 75, 90)),
        ),
        ServingWorkload("odd", 192, ("fixed-ngram-5-1-6",), tuple(replace(AT_16, case=case) for case in ODD)),
        # Prompts alone: one token ends each request.
        ServingWorkload("prefill", 1, ("plain",), _closed(16), 1000, weights="random"),
    )
}


@dataclass(frozen=True, slots=True)
class Requests:
    """Makes the streams of one arm's points."""

    workload: ServingWorkload
    prompts: Sequence[list[int]]
    body: Mapping[str, Any]

    def closed(self, point: LoadPoint, count: int) -> list[UserStream]:
        """Return one stream of ``count`` requests for each user."""
        bodies = self._bodies()
        rounds = [[next(bodies) for _ in range(point.concurrency)] for _ in range(count)]
        streams = []
        for user in range(point.concurrency):
            is_odd = bool(ODD.get(point.case)) and user == point.concurrency - 1
            odd = ODD[point.case] if is_odd else {}
            requests = tuple({**each[user], **odd} for each in rounds)
            streams.append(UserStream(requests, group=ODD_GROUP if is_odd else ""))
        return streams

    def poisson(self, rate: float, seconds: float, seed: str) -> list[UserStream]:
        """Return requests that arrive at random for ``seconds``, ``rate`` a second on average."""
        generator = random.Random(seed)
        bodies = self._bodies()
        streams: list[UserStream] = []
        at = generator.expovariate(rate)
        while at < seconds or not streams:
            streams.append(UserStream((next(bodies),), at))
            at += generator.expovariate(rate)
        return streams

    def _bodies(self) -> Iterator[dict[str, Any]]:
        number = 0
        while True:
            more: Mapping[str, Any] = {}
            if self.workload.mixed:
                more = JSON_SCHEMA if number % 10 == 0 else LOGPROBS if number % 10 == 5 else {}
            yield {
                "model": SERVED_NAME,
                "prompt": self.prompts[number % len(self.prompts)],
                "max_tokens": self.workload.output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                "cache_salt": uuid.uuid4().hex,
                **self.body,
                **more,
            }
            number += 1
