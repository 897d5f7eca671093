"""Run one client request on the verifiers, and hand its outputs to a reader as deltas.

A generation's prompts, its parameters (with the seed) and the tokens emitted so far are all that
another verifier needs to continue it. This module knows no HTTP and no gRPC.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time

from foretoken.results import SpeculationStats
from gateway.fields import draw_seed
from gateway.generation_request import GenerationRequest
from gateway.messages import SequenceSpec
from gateway.news import DirectReader, News
from gateway.output import Delta, Output
from gateway.output_text import OutputText
from gateway.prediction import PairPlaces, PredictionMatch
from gateway.token_times import TokenObserver, TokenTimes
from gateway.tokenizer import Tokenizer
from gateway.verifier_pool import VerifierPool

# How often a reader learns that its generation waits for a verifier.
WAITING_NEWS_S = 5.0


class ClientGoneError(Exception):
    """The client disconnected, so nobody reads the answer."""


class Generation:
    """Runs all ``len(prompts) * n`` outputs of one request, prompt by prompt."""

    def __init__(
        self,
        request: GenerationRequest,
        verifiers: VerifierPool,
        tokenizer: Tokenizer,
        max_model_len: int,
        observer: TokenObserver,
    ) -> None:
        self.request = request
        self.started_at = time.monotonic()
        # Each prompt counted once.
        self.prompt_tokens = sum(len(prompt.ids) for prompt in request.prompts)
        self._verifiers = verifiers
        self._news = News()
        self._gone: ClientGoneError | None = None
        self.outputs: list[Output] = []
        places = PairPlaces(request.prediction_ids)
        for index, spec in enumerate(_specs(request, max_model_len)):
            text = OutputText(
                tokenizer.detokenizer(
                    skip_special_tokens=request.skip_special_tokens, kept_ids=request.kept_special_ids
                ),
                request.stop,
                include_stop=request.include_stop,
                min_tokens=spec.sampling.min_tokens,
            )
            prediction = PredictionMatch(request.prediction_ids, places)
            times = TokenTimes(self.started_at, observer)
            self.outputs.append(Output(index, spec, request, text, times, prediction, self._news.add, self._news.wake))

    @property
    def speculation(self) -> SpeculationStats:
        """The sum of the counts of all outputs that have ended."""
        return SpeculationStats.sum([o.finished.speculation for o in self.outputs if o.finished is not None])

    @property
    def drafter_of_tokens(self) -> str:
        """The drafter of most tokens of the first output that has one; empty if none has."""
        return next(filter(None, (output.drafter_of_tokens for output in self.outputs)), "")

    @property
    def completion_tokens(self) -> int:
        """Output tokens so far, without tokens after a stop string."""
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def prediction_tokens(self) -> tuple[int, int]:
        """Accepted and rejected tokens of the prediction so far, summed over outputs."""
        if not self.request.prediction_ids:
            return 0, 0
        matches = [output.prediction for output in self.outputs]
        return sum(match.num_accepted for match in matches), sum(match.num_rejected for match in matches)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache, each prompt counted once."""
        firsts = self.outputs[:: self.request.n]
        return sum(output.finished.num_cached_tokens for output in firsts if output.finished is not None)

    @property
    def done(self) -> bool:
        """Return whether the reader took every output to its end; False if the client is gone."""
        if self._news or self._gone is not None:
            return False
        return all(output.finished is not None for output in self.outputs)

    @property
    def num_resumes(self) -> int:
        return sum(output.num_resumes for output in self.outputs)

    @property
    def verifiers(self) -> list[str]:
        """The addresses of its outputs' verifiers, in the order of outputs and attempts."""
        sequences = [output.sequence for output in self.outputs if output.sequence is not None]
        return list(dict.fromkeys(address for sequence in sequences for address in sequence.verifiers))

    @property
    def time_to_first_token_s(self) -> float | None:
        """Seconds from the start to the first token of any output."""
        firsts = [output.times.to_first_s for output in self.outputs]
        return min((seconds for seconds in firsts if seconds is not None), default=None)

    @property
    def is_waiting(self) -> bool:
        """Return whether some output waits for a verifier."""
        return any(output.is_waiting for output in self.outputs)

    def start(self) -> None:
        """Submit all outputs; they wait if no verifier is up. Raises QueueFullError."""
        sequences = self._verifiers.start((output.spec, output) for output in self.outputs)
        for output, sequence in zip(self.outputs, sequences, strict=True):
            output.sequence = sequence

    async def wait(self, reader: DirectReader | None = None) -> list[Delta]:
        """Wait for news, then return it; a slow reader gets larger deltas, never more of them.

        Meanwhile ``reader`` takes the deltas of outputs that go on, as long as it keeps up. Its
        fault is raised here.

        Returns an empty list every WAITING_NEWS_S while an output waits for a verifier. Raises the
        error that ended the generation after the reader took everything before it.
        """
        while True:
            if self._gone is None and (deltas := self._news.take()):
                return deltas
            self._raise_failure()
            if not self.is_waiting:
                await self._news.wait(reader)
                continue
            try:
                async with asyncio.timeout(WAITING_NEWS_S):
                    await self._news.wait(reader)
            except TimeoutError:
                if self.is_waiting:
                    return []

    async def run(self) -> list[Delta]:
        """Wait for the end; return one delta per output, in order."""
        for output in self.outputs:
            while output.finished is None:
                self._raise_failure()
                self._news.clear()
                await self._news.wait()
        self._news.clear()
        return [output.take() for output in self.outputs]

    def abort(self) -> bool:
        """End all outputs with the text that they have; return whether any was not complete."""
        return any([output.abort() for output in self.outputs])

    def abort_output(self, output_id: str) -> bool:
        """End the output of this id; return whether there was one that was not complete."""
        ids = zip(self.request.output_ids, self.outputs, strict=False)
        return any([output.abort() for own, output in ids if own == output_id])

    def disconnect(self) -> None:
        """Raise ClientGoneError in whoever waits: the client is gone."""
        self._gone = ClientGoneError()
        self._news.wake()

    def check_client(self) -> None:
        """Raise ClientGoneError if the client is gone: an unread answer does not count."""
        if self._gone is not None:
            raise self._gone

    def close(self) -> None:
        """Drop the outputs that still run. Safe to call at any time and more than once."""
        for output in self.outputs:
            if output.finished is None and output.sequence is not None:
                output.sequence.drop()

    def _raise_failure(self) -> None:
        self.check_client()
        for output in self.outputs:
            if output.error is not None:
                raise output.error


def _specs(request: GenerationRequest, max_model_len: int) -> list[SequenceSpec]:
    """Return one sequence per choice; each prompt of a list is a request to the verifier."""
    specs = []
    for number, prompt in enumerate(request.prompts):
        max_tokens = request.max_tokens_after(prompt, max_model_len)
        sampling = dataclasses.replace(
            request.sampling,
            max_tokens=max_tokens,
            min_tokens=min(request.sampling.min_tokens, max_tokens),
            # With the same seed, equal prompts would get equal texts.
            seed=draw_seed(None) if request.draws_seeds and number else request.sampling.seed,
        )
        for choice_index in range(request.n):
            specs.append(
                SequenceSpec(
                    request_id=request.id if len(request.prompts) == 1 else f"{request.id}-{number}",
                    choice_index=choice_index,
                    prompt_ids=prompt.ids,
                    sampling=sampling,
                    speculation=request.speculation,
                    cache_salt=request.cache_salt,
                    timeout_ms=request.timeout_ms,
                    trace=request.trace,
                    prediction_ids=request.prediction_ids,
                    priority=request.priority,
                    returns_trees=request.returns_trees,
                )
            )
    return specs
