"""Sends a batch of sequences to a verifier, as a gateway does, and notes when their tokens come."""

from __future__ import annotations

import queue
import time
import uuid
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

from benchmarks.stack import StackError
from foretoken import rpc
from protos import common_pb2, verifier_pb2, verifier_pb2_grpc

TIMEOUT_S = 600.0


class VerifierClient:
    """One connection to the verifier at ``address``. Not for two threads at once."""

    def __init__(self, address: str) -> None:
        self._channel = rpc.sync_channel(address)
        self._stub: Any = verifier_pb2_grpc.VerifierServiceStub(self._channel)

    def __enter__(self) -> VerifierClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def info(self) -> verifier_pb2.GetInfoResponse:
        answer: verifier_pb2.GetInfoResponse = self._stub.GetInfo(verifier_pb2.GetInfoRequest(), timeout=TIMEOUT_S)
        return answer

    def run(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, *, temperature: float = 0.0
    ) -> list[list[tuple[float, int]]]:
        """All prompts at once, each a tenant of its own. For each, when tokens came and how many there were by then.

        Times are perf_counter seconds, taken as a message is handed over by gRPC.

        Raises:
            StackError: a sequence failed, or the session ended before they did.
        """
        requests: queue.SimpleQueue[verifier_pb2.SessionRequest | None] = queue.SimpleQueue()
        for index, prompt in enumerate(prompts):
            requests.put(verifier_pb2.SessionRequest(submit=_sequence(index, prompt, num_tokens, temperature)))
        arrivals: list[list[tuple[float, int]]] = [[] for _ in prompts]
        num_running = len(prompts)
        for response in self._stub.Session(_until_none(requests), timeout=TIMEOUT_S):
            now = time.perf_counter()
            for error in response.errors:
                requests.put(None)
                raise StackError(f"sequence {error.request_id}: {error.message}")
            for tokens in response.tokens:
                arrivals[int(tokens.request_id)].append((now, tokens.offset + len(tokens.token_ids)))
            num_running -= len(response.finished)
            if num_running == 0:
                # The session ends with our half of it.
                requests.put(None)
        if num_running:
            raise StackError(f"the session ended while {num_running} sequences ran")
        return arrivals


def _sequence(index: int, prompt: Sequence[int], num_tokens: int, temperature: float) -> verifier_pb2.Sequence:
    return verifier_pb2.Sequence(
        request_id=str(index),
        prompt_token_ids=prompt,
        sampling=common_pb2.SamplingParams(temperature=temperature, seed=index, max_tokens=num_tokens, ignore_eos=True),
        cache_salt=uuid.uuid4().hex,
    )


def _until_none(
    requests: queue.SimpleQueue[verifier_pb2.SessionRequest | None],
) -> Iterator[verifier_pb2.SessionRequest]:
    while (request := requests.get()) is not None:
        yield request
