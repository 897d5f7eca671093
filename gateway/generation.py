"""Run one client request on the verifiers, and hand its outputs to a reader as deltas.

A generation's prompts, its parameters (with the seed) and the tokens emitted so far are all that
another verifier needs to continue it. This module knows no HTTP and no gRPC.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from foretoken import limits
from foretoken.errors import ForetokenError, UnavailableError
from foretoken.results import FinishReason, SpeculationStats, TokenLogprobs, VerifiedTree
from foretoken.sampling import SamplingParams, SpeculationOptions
from foretoken.tracing import TraceContext
from gateway.chat.grammar_fault import name_grammar_fault
from gateway.messages import Finished, NewTokens, SequenceSpec
from gateway.output_text import OutputText
from gateway.prediction import PairPlaces, PredictionMatch
from gateway.resumable_sequence import ResumableSequence
from gateway.token_times import TokenObserver, TokenTimes
from gateway.tokenizer import Tokenizer
from gateway.verifier_pool import VerifierPool

# How often a reader learns that its generation waits for a verifier.
WAITING_NEWS_S = 5.0


class ClientGoneError(Exception):
    """The client disconnected, so nobody reads the answer."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and their text if the client sent text or wants it back."""

    ids: tuple[int, ...]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Everything that decides the output. Check it against the limits before you make a Generation.

    ``sampling.max_tokens`` may exceed the context: each output gets what its prompt leaves.
    """

    id: str
    prompts: tuple[Prompt, ...]
    sampling: SamplingParams
    speculation: SpeculationOptions
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    # Special tokens that are text all the same: they mark tool calls or reasoning.
    kept_special_ids: frozenset[int] = frozenset()
    cache_salt: str | None = None
    timeout_ms: int | None = None
    # The parent of its spans.
    trace: TraceContext | None = None
    # The client's name for the field that set the grammar; empty: the name in common.proto.
    grammar_field: str = ""
    # Which tool's schema begins on a line of the grammar; None: the answer's.
    schema_tools: Mapping[int, str | None] = field(default_factory=dict)
    # The output that the client expects: a draft.
    prediction_ids: tuple[int, ...] = ()
    # Lower numbers start first.
    priority: int = 0
    # Whether the answer shows the trees that its steps verify.
    returns_trees: bool = False
    # Whether the answer names the drafter of each token and node.
    names_drafters: bool = False

    @property
    def num_outputs(self) -> int:
        return len(self.prompts) * self.n

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.ids) for prompt in self.prompts)

    def max_tokens_after(self, prompt: Prompt, max_model_len: int) -> int:
        """Return the most tokens of one output after ``prompt``."""
        return min(self.sampling.max_tokens, max_model_len - len(prompt.ids))

    def max_output_tokens(self, max_model_len: int) -> int:
        """Return the most tokens of all outputs together."""
        return self.n * sum(self.max_tokens_after(prompt, max_model_len) for prompt in self.prompts)


@dataclass(slots=True)
class Delta:
    """What one output gained since the last delta; ``finished``: it is the last one."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    # The text that each of these tokens added.
    token_texts: list[str] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    # The names of these sources, None for the target; empty unless requested.
    drafters: list[str | None] = field(default_factory=list)
    # For each token, whether the prediction had it there; empty without a prediction.
    predicted: list[bool] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    # The newest draft tree that was verified for these tokens, if requested.
    tree: VerifiedTree | None = None
    # The names of the sources of its nodes.
    tree_drafters: list[str | None] = field(default_factory=list)
    # The tokens' text, and at the end the text that waited.
    text: str = ""
    finished: bool = False


class DirectReader(Protocol):
    """Takes the deltas of a step at once, so that no task has to wake up for them."""

    @property
    def keeps_up(self) -> bool:
        """Whether it can take deltas now; otherwise they are merged until ``Generation.wait``."""
        ...

    def take(self, deltas: list[Delta]) -> None: ...


class Output:
    """Collects the output of one sequence. Implements OutputSink."""

    def __init__(
        self,
        index: int,
        spec: SequenceSpec,
        request: GenerationRequest,
        text: OutputText,
        times: TokenTimes,
        prediction: PredictionMatch,
        on_change: Callable[[Output], None],
        on_waiting: Callable[[], None],
    ) -> None:
        self.index = index
        self.spec = spec
        self.prompt = request.prompts[index // request.n]
        self.token_ids: list[int] = []
        self.sources: list[int] = []
        self.times = times
        self.prediction = prediction
        # Set when the verifier's figures arrive.
        self.finished: Finished | None = None
        self.finish_reason: FinishReason | None = None
        # The stop string or stop token that ended the output.
        self.matched: str | int | None = None
        self.error: ForetokenError | None = None
        # Set when it starts.
        self.sequence: ResumableSequence | None = None
        self._text = text
        self._grammar_field = request.grammar_field
        self._schema_tools = request.schema_tools
        self._names_drafters = request.names_drafters
        self._on_change = on_change
        self._on_waiting = on_waiting
        # What nobody took yet: much may gather for a slow reader.
        self._delta: Delta | None = None
        self._last_text = ""

    @property
    def ended(self) -> bool:
        """Whether the text is complete; the verifier's figures may still be missing."""
        return self.finish_reason is not None

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for a verifier."""
        return self.finished is None and self.sequence is not None and self.sequence.is_waiting

    @property
    def num_resumes(self) -> int:
        """How often a verifier continued it after another was lost."""
        return 0 if self.sequence is None else self.sequence.num_resumes

    @property
    def num_resumed_tokens(self) -> int:
        """Tokens from attempts before the last one; the verifier's figures leave them out."""
        return 0 if self.sequence is None else self.sequence.num_resumed_tokens

    @property
    def drafter_of_tokens(self) -> str:
        """The name of the drafter of most of its tokens; empty if there is none.

        The verifier's figures say which one drafted most, but an output that is dropped gets none.
        """
        counts = Counter(self.sources[self.num_resumed_tokens :])
        # The target's own.
        del counts[0]
        if not counts or self.sequence is None or self.is_waiting:
            return ""
        return self.sequence.drafter_name(counts.most_common(1)[0][0]) or ""

    def take(self) -> Delta:
        """Return what is new since the last call."""
        delta, self._delta = self._delta or Delta(self.index), None
        delta.text = "".join(delta.token_texts) + self._last_text
        self._last_text = ""
        delta.finished = self.finished is not None
        return delta

    def on_waiting(self) -> None:
        self._on_waiting()

    def on_tokens(self, tokens: NewTokens) -> None:
        if self.finish_reason is not None:
            return
        ids, sources, logprobs, prompt_logprobs, _, tree = tokens
        texts = self._text.feed(ids)
        kept = len(texts)
        if kept < len(ids):
            # A stop string cut off the last tokens.
            ids, sources, logprobs = ids[:kept], sources[:kept], logprobs[:kept]
        delta = self._delta
        if delta is None:
            delta = self._delta = Delta(
                self.index, [*ids], texts, [*sources], logprobs=[*logprobs], prompt_logprobs=[*prompt_logprobs]
            )
        else:
            delta.token_ids += ids
            delta.token_texts += texts
            delta.sources += sources
            delta.logprobs += logprobs
            delta.prompt_logprobs += prompt_logprobs
        if tree is not None:
            delta.tree = tree
        if self._names_drafters:
            self._name_drafters(delta, sources, tree)
        self.token_ids += ids
        self.sources += sources
        if self.spec.prediction_ids:
            delta.predicted += self.prediction.feed(ids)
        if kept:
            self.times.record(kept)
        if self._text.matched is not None:
            self.finish_reason, self.matched = FinishReason.STOP, self._text.matched
            assert self.sequence is not None
            self.sequence.abort(kept_tokens=len(self.token_ids))
        self._on_change(self)

    def _name_drafters(self, delta: Delta, sources: Iterable[int], tree: VerifiedTree | None) -> None:
        """Name the sources of what has just come.

        Another verifier may number its drafters differently.
        """
        assert self.sequence is not None
        delta.drafters += map(self.sequence.drafter_name, sources)
        if tree is not None:
            delta.tree_drafters = list(map(self.sequence.drafter_name, tree.sources))

    def on_finished(self, finished: Finished) -> None:
        if not self.ended:
            if finished.reason is FinishReason.ABORT:
                self.on_error(UnavailableError("the verifier aborted this request"))
                return
            self._last_text = self._text.flush()
            if self._text.matched is not None:
                self.finish_reason, self.matched = FinishReason.STOP, self._text.matched
            else:
                self.finish_reason, self.matched = finished.reason, finished.stop_token_id
        self._close(finished)

    def on_error(self, error: ForetokenError) -> None:
        if self.ended:
            # The text was complete; only the figures were missing.
            self._close(Finished(FinishReason.STOP, len(self.spec.prompt_ids), 0, len(self.token_ids)))
            return
        if self._grammar_field and error.field in limits.MAX_GRAMMAR_BYTES:
            name_grammar_fault(error, self._grammar_field, self._schema_tools)
        self.error = error
        self._on_change(self)

    def abort(self) -> bool:
        """End the output with the text that it has; return whether it was not complete."""
        if self.ended or self.error is not None or self.sequence is None:
            return False
        self._last_text = self._text.flush()
        self.finish_reason, self.matched = FinishReason.ABORT, self._text.matched
        if self.is_waiting:
            self.sequence.drop()
            self._close(Finished(FinishReason.ABORT, len(self.spec.prompt_ids), 0, len(self.token_ids)))
        else:
            # The verifier's figures close it.
            self.sequence.abort(kept_tokens=len(self.token_ids))
        return True

    def _close(self, finished: Finished) -> None:
        self.finished = finished
        self._on_change(self)


class News:
    """Collects outputs that have something new, until the reader of their generation takes it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed: dict[int, Output] = {}
        # Takes deltas while its task waits.
        self._reader: DirectReader | None = None
        self._fault: Exception | None = None
        self._wake = asyncio.Event()

    def __bool__(self) -> bool:
        return bool(self._changed)

    def add(self, output: Output) -> None:
        """Note that an output has something new."""
        if not self._changed:
            # After the whole message of the verifier, which may change several outputs.
            self._loop.call_soon(self._announce)
        self._changed[output.index] = output

    def wake(self) -> None:
        """End the present ``wait``."""
        self._wake.set()

    def clear(self) -> None:
        """Leave what is new with the outputs; the next news is announced again."""
        self._changed.clear()

    def take(self) -> list[Delta]:
        """Return what is new, in the order of the outputs."""
        changed, self._changed = self._changed, {}
        return [changed[index].take() for index in sorted(changed) if changed[index].error is None]

    async def wait(self, reader: DirectReader | None = None) -> None:
        """Return after ``wake``, or with news that ``reader`` did not take. Raise its fault.

        The reader takes the deltas of outputs that go on, as long as it keeps up.
        """
        self._wake.clear()
        self._reader = reader
        try:
            await self._wake.wait()
        finally:
            self._reader = None
        if self._fault is not None:
            raise self._fault

    def _announce(self) -> None:
        """Let the direct reader take what one message brought, or wake the task that waits."""
        reader = self._reader
        if reader is None or not reader.keeps_up or self._fault is not None or self._has_ends():
            self._wake.set()
            return
        try:
            reader.take(self.take())
        except Exception as error:
            self._fault = error
            self._wake.set()

    def _has_ends(self) -> bool:
        """Return whether an output with news has ended or failed: then the task has more to do."""
        return any(output.finished is not None or output.error is not None for output in self._changed.values())


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
        """Whether the reader took every output to its end; False if the client is gone."""
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
        """Whether some output waits for a verifier."""
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
                    priority=request.priority,
                    returns_trees=request.returns_trees,
                )
            )
    return specs
