"""The measurements: which requests run, in which order.

benchmarks/figures.py has the formulas, and benchmarks/report.py judges the figures.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmarks.figures import Timing, concurrent_rate, decode_rate, timing_of
from benchmarks.prompts import BenchPrompt
from foretoken.bench.completion import StreamedCompletion

Progress = Callable[[str], None]
# Sends all bodies to the server at once, and returns their completions in order.
Complete = Callable[[Sequence[dict[str, Any]]], list[StreamedCompletion]]


class Decoder(Protocol):
    """Decodes one prompt greedily; reference.Reference is one."""

    def generate(self, prompt_ids: Sequence[int], num_tokens: int) -> tuple[list[int], Timing]: ...


class UnexpectedAnswerError(Exception):
    """The server's answer does not match the request, so its times mean nothing."""


@dataclass(frozen=True, slots=True)
class PairWorkload:
    """Prompts and their sampling options. Prompt i has seed i in every run."""

    name: str
    prompts: Sequence[BenchPrompt]
    num_tokens: int
    temperature: float = 0.0
    # The drafter's name in requests; None: the server chooses.
    drafter: str | None = None


@dataclass(frozen=True, slots=True)
class TimedCompletion:
    """One timed completion."""

    prompt_index: int
    timing: Timing
    text: str
    tokens_per_step: float
    num_draft_tokens: int
    # The server's figures of speculation for this request.
    speculation: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pair:
    """All prompts twice, interleaved; the two differ only in ``speculative.enabled``."""

    plain: list[TimedCompletion] = field(default_factory=list)
    speculative: list[TimedCompletion] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Return rate of all speculative runs / rate of all plain runs (figures.decode_rate)."""
        return rate_of(self.speculative) / rate_of(self.plain)

    def mismatches(self) -> list[int]:
        """Return the indices of prompts whose two texts differ."""
        both = zip(self.plain, self.speculative, strict=True)
        return [plain.prompt_index for plain, speculative in both if plain.text != speculative.text]


@dataclass(frozen=True, slots=True)
class ReferencePass:
    """All prompts three times, interleaved: served plain decode, engine alone, transformers."""

    served: list[Timing] = field(default_factory=list)
    engine: list[Timing] = field(default_factory=list)
    transformers: list[Timing] = field(default_factory=list)
    # Prompts for which transformers generated the served tokens.
    num_equal_outputs: int = 0

    def added_ms(self) -> list[float]:
        """Return for each prompt: milliseconds a token at the client - those in the engine."""
        return [a.ms_per_token - b.ms_per_token for a, b in zip(self.served, self.engine, strict=True)]


def rate_of(samples: Sequence[TimedCompletion]) -> float:
    """Return figures.decode_rate of the samples' timings."""
    return decode_rate([sample.timing for sample in samples])


class Bench:
    """Sends the requests of every measurement to one server."""

    def __init__(self, complete: Complete, model: str, progress: Progress) -> None:
        """``model`` is the served name. ``progress`` gets a line after each measurement."""
        self._complete = complete
        self._model = model
        self._progress = progress

    def warm_up(self, workload: PairWorkload) -> None:
        """Send one untimed request of each kind."""
        for speculative in (False, True):
            self._request(workload, 0, speculative=speculative)

    def pairs(self, workload: PairWorkload, count: int) -> list[Pair]:
        """Measure ``count`` cold pairs. The order of the two alternates by prompt and by pair."""
        pairs = []
        for number in range(count):
            pair = Pair()
            for index in range(len(workload.prompts)):
                plain_first = (number + index) % 2 == 0
                for speculative in (not plain_first, plain_first):
                    samples = pair.speculative if speculative else pair.plain
                    samples.append(self._sample(workload, index, speculative=speculative))
            pairs.append(pair)
            drafts = workload.drafter or "speculative"
            self._progress(f"{workload.name}: pair {number + 1} of {count}, {drafts} / plain {pair.ratio:.3f}")
        return pairs

    def plain(self, workload: PairWorkload) -> list[TimedCompletion]:
        """Complete each prompt once, cold, without drafts."""
        return [self._sample(workload, index, speculative=False) for index in range(len(workload.prompts))]

    def drafted(self, workload: PairWorkload) -> list[TimedCompletion]:
        """Complete each prompt once, cold, with drafts."""
        return [self._sample(workload, index, speculative=True) for index in range(len(workload.prompts))]

    def outputs(self, workload: PairWorkload, salt: str) -> list[tuple[int, ...]]:
        """Return each prompt's output tokens, untimed. The history of ``salt`` then has them."""
        found = []
        for index in range(len(workload.prompts)):
            completion = self._request(workload, index, speculative=True, salt=salt, return_token_sources=True)
            found.append(completion.token_ids)
        return found

    def warm_pair(self, workload: PairWorkload, salt: str) -> Pair:
        """Measure one pair under a salt whose history has every prompt's output (``outputs``)."""
        pair = Pair()
        for index in range(len(workload.prompts)):
            pair.plain.append(self._sample(workload, index, speculative=False, salt=salt))
            pair.speculative.append(self._sample(workload, index, speculative=True, salt=salt))
        self._progress(f"warm history: n-gram / plain {pair.ratio:.3f}")
        return pair

    def concurrent(self, workload: PairWorkload, num_streams: int, rounds: int) -> list[float]:
        """Return each round's rate of ``num_streams`` plain streams (figures.concurrent_rate)."""
        rates = []
        for number in range(rounds):
            indices = [(number * num_streams + i) % len(workload.prompts) for i in range(num_streams)]
            bodies = [self._body(workload, index, speculative=False) for index in indices]
            for body in bodies:
                body["stream_options"]["continuous_usage_stats"] = True
            completions = self._complete(bodies)
            for index, completion in zip(indices, completions, strict=True):
                _check(completion, workload, index, speculative=False, cold=True)
            rates.append(concurrent_rate(completions))
            self._progress(f"{num_streams} plain streams: {rates[-1]:.0f} tok/s")
        return rates

    def references(
        self, workload: PairWorkload, outputs: Sequence[Sequence[int]], engine: Decoder, transformers: Decoder
    ) -> ReferencePass:
        """Measure server, engine and transformers in turn for each prompt; the others sleep.

        Raises:
            UnexpectedAnswerError: the engine's tokens differ from the served ones (``outputs``).
        """
        served, engine_times, transformers_times = [], [], []
        num_equal = 0
        for index, prompt in enumerate(workload.prompts):
            for turn in range(3):
                match (index + turn) % 3:
                    case 0:
                        served.append(self._sample(workload, index, speculative=False).timing)
                    case 1:
                        token_ids, timing = engine.generate(prompt.token_ids, workload.num_tokens)
                        engine_times.append(timing)
                        if token_ids != list(outputs[index]):
                            raise UnexpectedAnswerError(f"prompt {index}: the engine alone made other tokens")
                    case _:
                        token_ids, timing = transformers.generate(prompt.token_ids, workload.num_tokens)
                        transformers_times.append(timing)
                        num_equal += token_ids == list(outputs[index])
        ratio = decode_rate(served) / decode_rate(transformers_times)
        self._progress(f"plain / transformers {ratio:.2f}; {num_equal} outputs are transformers' own")
        return ReferencePass(served, engine_times, transformers_times, num_equal)

    def _sample(
        self, workload: PairWorkload, index: int, *, speculative: bool, salt: str | None = None
    ) -> TimedCompletion:
        completion = self._request(workload, index, speculative=speculative, salt=salt)
        return TimedCompletion(
            index,
            timing_of(completion),
            completion.text,
            completion.speculation["mean_tokens_per_step"],
            completion.speculation["num_draft_tokens"],
            completion.speculation,
        )

    def _request(
        self, workload: PairWorkload, index: int, *, speculative: bool, salt: str | None = None, **fields: Any
    ) -> StreamedCompletion:
        body = self._body(workload, index, speculative=speculative, salt=salt) | fields
        (completion,) = self._complete([body])
        _check(completion, workload, index, speculative=speculative, cold=salt is None)
        return completion

    def _body(
        self, workload: PairWorkload, index: int, *, speculative: bool, salt: str | None = None
    ) -> dict[str, Any]:
        """Return a request's body. Without ``salt`` it gets a new one: nothing is cached."""
        return {
            "model": self._model,
            "prompt": list(workload.prompts[index].token_ids),
            "max_tokens": workload.num_tokens,
            "temperature": workload.temperature,
            "seed": index,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_salt": salt or uuid.uuid4().hex,
            "speculative": {"enabled": speculative} | ({"drafter": workload.drafter} if workload.drafter else {}),
        }


def _check(
    completion: StreamedCompletion, workload: PairWorkload, index: int, *, speculative: bool, cold: bool
) -> None:
    """Raise UnexpectedAnswerError unless the completion matches its request."""
    prompt = workload.prompts[index]
    if completion.num_tokens != workload.num_tokens:
        raise UnexpectedAnswerError(f"prompt {index}: {completion.num_tokens} tokens, not {workload.num_tokens}")
    if completion.num_prompt_tokens != len(prompt.token_ids):
        raise UnexpectedAnswerError(f"prompt {index}: the server counted {completion.num_prompt_tokens} prompt tokens")
    if cold and completion.num_cached_tokens:
        raise UnexpectedAnswerError(f"prompt {index}: {completion.num_cached_tokens} tokens of a new salt were cached")
    if not completion.speculation:
        raise UnexpectedAnswerError("the server sends no metrics.speculative_decoding")
    if not speculative and completion.speculation["num_draft_tokens"]:
        raise UnexpectedAnswerError(f"prompt {index}: a plain request was drafted for")
