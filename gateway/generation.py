"""One client request on its way through the verifier: tokens become text, stop strings end it, readers take deltas.

A generation is its prompts, its parameters (the seed among them) and the tokens emitted so far; nothing else is needed
to go on elsewhere. It knows no HTTP and no gRPC.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from foretoken import limits
from foretoken.errors import ForetokenError, UnavailableError
from foretoken.results import FinishReason, SpeculationStats, TokenLogprobs
from foretoken.sampling import SamplingParams, SpeculationOptions
from foretoken.tracing import TraceContext
from gateway.detokenizer import Detokenizer
from gateway.messages import Finished, NewTokens, SequenceSpec
from gateway.resumable_sequence import Placement
from gateway.prediction import PairPlaces, PredictionMatch
from gateway.stop import StopMatcher
from gateway.tokenizer import Tokenizer
from gateway.verifier_pool import VerifierPool

# How often a reader learns that its generation waits for a verifier.
WAITING_NEWS_S = 5.0
# Called with the seconds since an output's last tokens and the number of tokens that came.
StepObserver = Callable[[float, int], None]


class ClientGoneError(Exception):
    """The client disconnected: nobody is left to answer."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and their text if the client sent text or wants it back."""

    ids: tuple[int, ...]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Everything that decides the output; checked against the limits before a Generation is made of it.

    ``sampling.max_tokens`` may be beyond the context: each output is cut to what its prompt leaves.
    """

    id: str
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    speculation: SpeculationOptions
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    cache_salt: str | None = None
    timeout_ms: int | None = None
    # The span that it belongs to.
    trace: TraceContext | None = None
    # The client's name of what asked for the sampling's grammar; empty: as in SamplingParams of common.proto.
    grammar_field: str = ""
    # What the client expects as each output: a draft.
    prediction_ids: tuple[int, ...] = ()

    @property
    def num_outputs(self) -> int:
        return len(self.prompts) * self.n


@dataclass(slots=True)
class Delta:
    """What is new in one output since its reader last took. ``finished``: nothing comes after it."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    # What each of these tokens added to the text.
    token_texts: list[str] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finished: bool = False


class Output:
    """One sequence's output. Implements OutputSink."""

    def __init__(
        self,
        index: int,
        spec: SequenceSpec,
        prompt: Prompt,
        request: GenerationRequest,
        detokenizer: Detokenizer,
        on_change: Callable[[Output], None],
        on_waiting: Callable[[], None],
        on_step: StepObserver,
        places: PairPlaces,
    ) -> None:
        self.index = index
        self.spec = spec
        self.prompt = prompt
        self.token_ids: list[int] = []
        self.sources: list[int] = []
        # Set once the verifier's figures are in.
        self.finished: Finished | None = None
        self.finish_reason: FinishReason | None = None
        # The stop string or stop token that ended the output.
        self.matched: str | int | None = None
        self.error: ForetokenError | None = None
        # time.monotonic() of the first and the last kept tokens; 0: none yet.
        self.first_token_at = 0.0
        self.last_token_at = 0.0
        self._num_first_tokens = 0
        # Where it runs; set when it is started.
        self.placement: Placement | None = None
        self.prediction = PredictionMatch(request.prediction_ids, places)
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(request.stop, include_stop=request.include_stop) if request.stop else None
        self._grammar_field = request.grammar_field
        self._on_change = on_change
        self._on_waiting = on_waiting
        self._on_step = on_step
        self._delta = Delta(index)
        # The delta's text in pieces: a reader may let thousands of them gather.
        self._pieces: list[str] = []

    @property
    def ended(self) -> bool:
        """Whether the text is complete, be the figures there or not."""
        return self.finish_reason is not None

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for a verifier."""
        return self.finished is None and self.placement is not None and self.placement.is_waiting

    @property
    def num_resumes(self) -> int:
        """How often it went on at a verifier after its loss."""
        return 0 if self.placement is None else self.placement.num_resumes

    @property
    def num_resumed_tokens(self) -> int:
        """Tokens that attempts before the last one emitted: its figures are about those after them."""
        return 0 if self.placement is None else self.placement.num_resumed_tokens

    def take(self) -> Delta:
        """What is new since the last call."""
        delta, self._delta = self._delta, Delta(self.index)
        delta.text = "".join(self._pieces)
        self._pieces.clear()
        return delta

    def on_waiting(self) -> None:
        self._on_waiting()

    def on_tokens(self, tokens: NewTokens) -> None:
        if self.ended:
            return
        delta = self._delta
        delta.prompt_logprobs.extend(tokens.prompt_logprobs)
        texts = self._to_texts(tokens.ids)
        kept = len(texts)
        self._pieces += texts
        delta.token_texts += texts
        delta.token_ids += tokens.ids[:kept]
        delta.sources += tokens.sources[:kept]
        delta.logprobs += tokens.logprobs[:kept]
        self.token_ids += tokens.ids[:kept]
        self.sources += tokens.sources[:kept]
        if self.spec.prediction_ids:
            self.prediction.feed(tokens.ids[:kept])
        if kept:
            self._note_time(kept)
        if self._matcher is not None and self._matcher.matched is not None:
            self._end(FinishReason.STOP, self._matcher.matched)
            assert self.placement is not None
            self.placement.abort(kept_tokens=len(self.token_ids))
        self._on_change(self)

    def on_finished(self, finished: Finished) -> None:
        if not self.ended and finished.reason is FinishReason.ABORT:
            self.on_error(UnavailableError("the verifier gave this request up"))
            return
        if not self.ended:
            self._flush()
            matched = self._matcher.matched if self._matcher is not None else None
            if matched is not None:
                self._end(FinishReason.STOP, matched)
            else:
                self._end(finished.reason, finished.stop_token_id)
        self._close(finished)

    def on_error(self, error: ForetokenError) -> None:
        if self.ended:
            # The text was complete and only the figures were missing.
            self._close(Finished(FinishReason.STOP, len(self.spec.prompt_ids), 0, len(self.token_ids)))
            return
        if self._grammar_field and error.field in limits.MAX_GRAMMAR_BYTES:
            error.field = self._grammar_field
        self.error = error
        self._on_change(self)

    def _to_texts(self, token_ids: tuple[int, ...]) -> list[str]:
        """What each token adds to the text that may be shown, for the tokens that are part of the output: a stop string
        may cut. A token's own text may come with a later one, when a character or a possible stop string is complete.
        """
        texts: list[str] = []
        for token_id in token_ids:
            text = self._detokenizer.feed((token_id,))
            if self._matcher is not None:
                honour = len(self.token_ids) + len(texts) + 1 >= self.spec.sampling.min_tokens
                text = self._matcher.feed(text, honour=honour)
            texts.append(text)
            if self._matcher is not None and self._matcher.matched is not None:
                break
        return texts

    @property
    def token_gap_s(self) -> float | None:
        """Mean seconds a token, of those behind the first message: that may bring several, if it was waited for. None
        without any."""
        count = len(self.token_ids) - self._num_first_tokens
        return (self.last_token_at - self.first_token_at) / count if count > 0 else None

    def _flush(self) -> None:
        """Text that waited for more tokens: there are none."""
        text = self._detokenizer.flush()
        if self._matcher is not None:
            text = self._matcher.feed(text, honour=len(self.token_ids) >= self.spec.sampling.min_tokens)
            text += self._matcher.flush()
        self._pieces.append(text)

    def _note_time(self, num_tokens: int) -> None:
        now = time.monotonic()
        if self.first_token_at:
            self._on_step(now - self.last_token_at, num_tokens)
        else:
            self.first_token_at, self._num_first_tokens = now, num_tokens
        self.last_token_at = now

    def _end(self, reason: FinishReason, matched: str | int | None) -> None:
        self.finish_reason, self.matched = reason, matched

    def _close(self, finished: Finished) -> None:
        self.finished = finished
        self._delta.finished = True
        self._on_change(self)


class Generation:
    """All outputs of one request: ``len(prompts) * n`` of them, those of one prompt beside each other."""

    def __init__(
        self,
        request: GenerationRequest,
        verifiers: VerifierPool,
        tokenizer: Tokenizer,
        max_model_len: int,
        on_step: StepObserver,
    ) -> None:
        self.request = request
        self.started_at = time.monotonic()
        self._verifiers = verifiers
        self._news = asyncio.Event()
        self._changed: dict[int, Output] = {}
        self._gone: BaseException | None = None
        self.outputs: list[Output] = []
        places = PairPlaces(request.prediction_ids)
        for index, spec in enumerate(_specs(request, max_model_len)):
            detokenizer = tokenizer.detokenizer(skip_special_tokens=request.skip_special_tokens)
            prompt = request.prompts[index // request.n]
            self.outputs.append(
                Output(index, spec, prompt, request, detokenizer, self._on_change, self._news.set, on_step, places)
            )

    @property
    def speculation(self) -> SpeculationStats:
        """The counts of all outputs that have ended, added up."""
        return SpeculationStats.sum([o.finished.speculation for o in self.outputs if o.finished is not None])

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens, each prompt counted once."""
        return sum(len(prompt.ids) for prompt in self.request.prompts)

    @property
    def completion_tokens(self) -> int:
        """Output tokens so far; those after a stop string are no part of the output."""
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def prediction_tokens(self) -> tuple[int, int]:
        """Tokens of the prediction that came true in the outputs so far, and all others of it; summed over outputs."""
        matches = [output.prediction for output in self.outputs]
        return sum(match.num_accepted for match in matches), sum(match.num_rejected for match in matches)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache held, each prompt counted once."""
        firsts = self.outputs[:: self.request.n]
        return sum(output.finished.num_cached_tokens for output in firsts if output.finished is not None)

    @property
    def done(self) -> bool:
        """Whether every output has ended and been taken, by a client that is still there."""
        return self._gone is None and not self._changed and all(output.finished is not None for output in self.outputs)

    @property
    def num_resumes(self) -> int:
        return sum(output.num_resumes for output in self.outputs)

    @property
    def is_waiting(self) -> bool:
        """Whether some output waits for a verifier."""
        return any(output.is_waiting for output in self.outputs)

    def start(self) -> None:
        """Submit all outputs; while no verifier is there, they wait for one. Raises QueueFullError."""
        placements = self._verifiers.start((output.spec, output) for output in self.outputs)
        for output, placement in zip(self.outputs, placements, strict=True):
            output.placement = placement

    async def wait(self) -> list[Delta]:
        """What is new since the last call; a slow reader gets larger deltas, never more of them.

        Nothing, every WAITING_NEWS_S, while an output waits for a verifier. Raises the error that ended the
        generation, once what came before it has been taken.
        """
        while self._gone is not None or not self._changed:
            self._raise_failure()
            self._news.clear()
            if not self.is_waiting:
                await self._news.wait()
                continue
            try:
                async with asyncio.timeout(WAITING_NEWS_S):
                    await self._news.wait()
            except TimeoutError:
                return []
        changed, self._changed = self._changed, {}
        deltas = [output.take() for output in changed.values() if output.error is None]
        return deltas or await self.wait()

    async def run(self) -> list[Delta]:
        """Wait for the end; returns one delta an output, in order."""
        for output in self.outputs:
            while output.finished is None:
                self._raise_failure()
                self._news.clear()
                await self._news.wait()
        self._changed = {}
        return [output.take() for output in self.outputs]

    def disconnect(self) -> None:
        """The client is gone: whoever waits gets ClientGoneError."""
        self._gone = ClientGoneError()
        self._news.set()

    def check_client(self) -> None:
        """Raise ClientGoneError if the client is gone: an answer that it did not wait for was not given."""
        if self._gone is not None:
            raise self._gone

    def close(self) -> None:
        """Drop what still runs. Safe to call at any time and more than once."""
        for output in self.outputs:
            if output.finished is None and output.placement is not None:
                output.placement.drop()

    def _on_change(self, output: Output) -> None:
        self._changed[output.index] = output
        self._news.set()

    def _raise_failure(self) -> None:
        self.check_client()
        for output in self.outputs:
            if output.error is not None:
                raise output.error


def _specs(request: GenerationRequest, max_model_len: int) -> list[SequenceSpec]:
    """What to submit: one sequence a choice; prompts of a list are requests of their own to the verifier."""
    specs = []
    for number, prompt in enumerate(request.prompts):
        room = max_model_len - len(prompt.ids)
        max_tokens = min(request.sampling.max_tokens, room)
        sampling = dataclasses.replace(
            request.sampling, max_tokens=max_tokens, min_tokens=min(request.sampling.min_tokens, max_tokens)
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
                )
            )
    return specs
