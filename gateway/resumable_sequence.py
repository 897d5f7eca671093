"""Run one sequence on a verifier, and resume it on another when that verifier is lost.

The prompt, the parameters and the tokens emitted so far decide the rest of a sequence. So any
verifier with the same model can resume it, by the prefill that a preempted sequence gets.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from foretoken.errors import ForetokenError, UnavailableError
from foretoken.results import FinishReason
from gateway.messages import Finished, NewTokens, OutputSink, SequenceSpec
from gateway.pauses import RESUME, WAIT, Pauses
from gateway.routing.prefix import prefix_keys
from gateway.verifier_client import VerifierClient


@dataclass(slots=True)
class Binding:
    """The model that one request's sequences began with; empty: none began yet."""

    fingerprint: str = ""


class Placer(Protocol):
    """Finds a verifier, now or later, and calls ``ResumableSequence.submit_to``."""

    def place(self, sequence: ResumableSequence) -> None: ...

    def forget(self, sequence: ResumableSequence) -> None:
        """Free what is held for a sequence that needs no verifier any more."""
        ...


class ResumableSequence:
    """One sequence. Implements SequenceSink for the verifier that it runs on now."""

    def __init__(
        self, spec: SequenceSpec, sink: OutputSink, placer: Placer, binding: Binding, *, resume_attempts: int
    ) -> None:
        """After ``resume_attempts`` accepted resumes a further loss is an error."""
        self.binding = binding
        self.deadline = None if spec.timeout_ms is None else _now() + spec.timeout_ms / 1e3
        # Resumes that a verifier accepted.
        self.num_resumes = 0
        # Output tokens that earlier attempts emitted.
        self.num_resumed_tokens = 0
        # Addresses of the verifiers that took it, one for each attempt.
        self.verifiers: list[str] = []
        self.pauses = Pauses()
        self._spec = spec
        self._sink = sink
        self._placer = placer
        self._resume_attempts = resume_attempts
        self._client: VerifierClient | None = None
        self._attempt = 0
        self._emitted: list[int] = []
        self._num_cached_tokens: int | None = None
        self._had_prompt_logprobs = False
        self._aborted = False

    @property
    def is_waiting(self) -> bool:
        """Return whether it waits for a verifier."""
        return self._client is None

    @property
    def was_lost(self) -> bool:
        """Return whether its next start is a resume."""
        return self._attempt > 0

    def prefix_keys(self) -> Iterator[int]:
        """Return the keys of the prompt's prefixes, by which its verifier is chosen."""
        return prefix_keys(self._spec.prompt_ids, self._spec.cache_salt)

    def submit_to(self, client: VerifierClient) -> None:
        """Start or resume on ``client``, which must be up."""
        left_ms = None if self.deadline is None else max(1, round(1e3 * (self.deadline - _now())))
        self.binding.fingerprint = client.fingerprint
        self._client = client
        self.verifiers.append(client.address)
        self.pauses.submitted(client.address)
        self.num_resumes += self.was_lost
        self.num_resumed_tokens = len(self._emitted)
        client.submit(
            dataclasses.replace(
                self._spec,
                attempt=self._attempt,
                output_ids=tuple(self._emitted),
                timeout_ms=left_ms,
                model_fingerprint=client.fingerprint,
            ),
            self,
        )

    def drafter_name(self, source: int) -> str | None:
        """Return the name of a drafter by its number in the tokens that come now.

        It is None for the target.
        """
        assert self._client is not None
        return self._client.info.drafter_name(source)

    def abort(self, *, kept_tokens: int) -> None:
        """End it early; its sink gets ``on_finished`` with figures up to ``kept_tokens``."""
        assert self._client is not None
        self._aborted = True
        self._client.abort(self._spec.request_id, self._spec.choice_index, kept_tokens=kept_tokens)

    def drop(self) -> None:
        """End the sequence, which nobody wants any more; its sink gets nothing from now on."""
        self._placer.forget(self)
        if self._client is not None:
            self._client.drop(self._spec.request_id, self._spec.choice_index)

    def fail(self, reason: str) -> None:
        """Drop the sequence, and send ``reason`` to its sink as an UnavailableError."""
        self.drop()
        self._sink.on_error(UnavailableError(reason))

    def on_waiting(self) -> None:
        """Report that no verifier is up for it now."""
        self.pauses.begin(WAIT, "no verifier is up")
        self._sink.on_waiting()

    def on_tokens(self, tokens: NewTokens) -> None:
        self.pauses.end()
        if self._num_cached_tokens is None:
            # From the first attempt, so that a resume does not change the answer.
            self._num_cached_tokens = tokens.num_cached_tokens
        self._emitted += tokens.ids
        if tokens.prompt_logprobs:
            if self._had_prompt_logprobs:
                tokens = tokens._replace(prompt_logprobs=())
            self._had_prompt_logprobs = True
        self._sink.on_tokens(tokens)

    def on_finished(self, finished: Finished) -> None:
        self.pauses.end()
        self._placer.forget(self)
        if self._num_cached_tokens is not None:
            finished = dataclasses.replace(finished, num_cached_tokens=self._num_cached_tokens)
        self._sink.on_finished(finished)

    def on_error(self, error: ForetokenError) -> None:
        self._placer.forget(self)
        self._sink.on_error(error)

    def on_refused(self, reason: str) -> None:
        self.num_resumes -= self.was_lost
        self.verifiers.pop()
        self._client = None
        self._placer.place(self)

    def on_lost(self, reason: str) -> None:
        self._client = None
        if self._aborted:
            # The output was complete; only the last attempt's figures are lost.
            self.on_finished(self._end(FinishReason.ABORT))
        elif len(self._emitted) >= self._spec.sampling.max_tokens:
            self.on_finished(self._end(FinishReason.LENGTH))
        elif self.num_resumes >= self._resume_attempts:
            times = f" after {self.num_resumes} resumes" if self.num_resumes else ""
            self.on_error(UnavailableError(f"the verifier was lost{times}: {reason}"))
        else:
            self._attempt += 1
            self.pauses.begin(RESUME, reason)
            self._placer.place(self)

    def _end(self, reason: FinishReason) -> Finished:
        return Finished(reason, len(self._spec.prompt_ids), 0, len(self._emitted))


def _now() -> float:
    return asyncio.get_running_loop().time()
