"""Pass the events of one verifier session to the sequences that they belong to."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from foretoken import wire
from foretoken.errors import ForetokenError, error_from_code
from gateway import verifier_wire
from gateway.messages import NewTokens, SequenceSink, SequenceSpec
from protos import verifier_pb2

logger = logging.getLogger(__name__)

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE.value[0]
# All that a client learns about a fault of ours.
INTERNAL_ERROR = "internal error"


@dataclass(slots=True)
class _Route:
    """Where one sequence's events go; ``next_offset`` counts the output tokens sent on."""

    sink: SequenceSink
    attempt: int
    next_offset: int


class SequenceRoutes:
    """The running sequences of one session, by request id and choice index."""

    def __init__(self, abort: Callable[[str, int], None]) -> None:
        """``abort`` ends a sequence at the verifier."""
        self._abort = abort
        self._routes: dict[tuple[str, int], _Route] = {}

    def __len__(self) -> int:
        return len(self._routes)

    def add(self, spec: SequenceSpec, sink: SequenceSink) -> None:
        """Pass the sequence's events to ``sink`` from now on."""
        key = (spec.request_id, spec.choice_index)
        assert key not in self._routes, key
        self._routes[key] = _Route(sink, spec.attempt, len(spec.output_ids))

    def drop(self, request_id: str, choice_index: int) -> None:
        """Abort a sequence; its sink gets nothing from now on."""
        if self._routes.pop((request_id, choice_index), None) is not None:
            self._abort(request_id, choice_index)

    def lose_all(self, reason: str) -> None:
        """Report to every sink that the session broke."""
        routes, self._routes = self._routes, {}
        for route in routes.values():
            route.sink.on_lost(reason)

    def dispatch(self, response: verifier_pb2.SessionResponse) -> None:
        """Pass on all events of one message."""
        for tokens in response.tokens:
            try:
                self._on_tokens(tokens)
            except Exception:
                # A fault in one sequence's text must not end the session of all others.
                logger.exception("cannot take tokens", extra={"request_id": tokens.request_id})
                self._fail(tokens)
        for finished in response.finished:
            route = self._take(finished)
            if route is not None:
                route.sink.on_finished(verifier_wire.finished_from_proto(finished))
        for error in response.errors:
            route = self._take(error)
            if route is None:
                continue
            if error.code == UNAVAILABLE:
                route.sink.on_refused(error.message)
            else:
                route.sink.on_error(error_from_code(error.code, error.message, error.field))

    def _find(self, event: verifier_pb2.Tokens | verifier_pb2.Finished | verifier_pb2.SequenceError) -> _Route | None:
        """Return the event's route; None if it was dropped or the event is from another attempt."""
        route = self._routes.get((event.request_id, event.choice_index))
        return route if route is not None and route.attempt == event.attempt else None

    def _take(self, event: verifier_pb2.Finished | verifier_pb2.SequenceError) -> _Route | None:
        """Remove and return the route of a sequence that ends, as ``_find`` does."""
        route = self._find(event)
        if route is not None:
            del self._routes[event.request_id, event.choice_index]
        return route

    def _on_tokens(self, tokens: verifier_pb2.Tokens) -> None:
        route = self._find(tokens)
        if route is None:
            return
        known = route.next_offset - tokens.offset
        if known < 0:
            raise ValueError(f"output tokens {route.next_offset}-{tokens.offset} never came")
        # One access to each field: reading a repeated one costs as much as ten of Python's own.
        ids = tuple(tokens.token_ids[known:])
        prompt_logprobs = tokens.prompt_logprobs
        if not ids and not prompt_logprobs:
            return
        route.next_offset += len(ids)
        logprobs = tokens.logprobs
        route.sink.on_tokens(
            NewTokens(
                ids,
                tuple(tokens.sources[known:]) or (0,) * len(ids),
                wire.logprobs_from_proto(logprobs[known:]) if logprobs else (),
                wire.logprobs_from_proto(prompt_logprobs) if prompt_logprobs else (),
                tokens.num_cached_tokens if tokens.HasField("num_cached_tokens") else None,
                verifier_wire.tree_from_proto(tokens.tree) if tokens.HasField("tree") else None,
            )
        )

    def _fail(self, tokens: verifier_pb2.Tokens) -> None:
        """End one sequence with an internal error for its client."""
        route = self._routes.get((tokens.request_id, tokens.choice_index))
        if route is not None:
            self.drop(tokens.request_id, tokens.choice_index)
            route.sink.on_error(ForetokenError(INTERNAL_ERROR))
