"""Collect what the verifier sends for one output of a generation; the reader may be slow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from foretoken import limits
from foretoken.errors import ForetokenError, UnavailableError
from foretoken.results import FinishReason, TokenLogprobs, VerifiedTree
from gateway.chat.grammar_fault import name_grammar_fault
from gateway.generation_request import GenerationRequest
from gateway.messages import Finished, NewTokens, SequenceSpec
from gateway.output_text import OutputText
from gateway.prediction import PredictionMatch
from gateway.resumable_sequence import ResumableSequence
from gateway.token_times import TokenTimes


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
        # What has come since the last ``take``. For a slow reader that may be much.
        self._delta: Delta | None = None
        self._last_text = ""

    @property
    def ended(self) -> bool:
        """Return whether the text is complete; the verifier's figures may still be missing."""
        return self.finish_reason is not None

    @property
    def is_waiting(self) -> bool:
        """Return whether it waits for a verifier."""
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
