"""Send a batch of sequences to a verifier, as a gateway does, and record the arrivals."""

from __future__ import annotations

import queue
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import grpc

from benchmarks.stack import StackError
from foretoken import rpc
from protos import common_pb2, verifier_pb2, verifier_pb2_grpc

TIMEOUT_S = 600.0
POLL_S = 1.0


class SessionClient:
    """One connection to the verifier at ``address``. Not for two threads at once."""

    def __init__(self, address: str) -> None:
        self._channel = rpc.sync_channel(address)
        self._stub: Any = verifier_pb2_grpc.VerifierServiceStub(self._channel)

    def __enter__(self) -> SessionClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def wait_ready(self, is_alive: Callable[[], bool], timeout_s: float) -> None:
        """Wait until the verifier answers. Raises StackError if ``is_alive`` returns false."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._stub.GetInfo(verifier_pb2.GetInfoRequest(), timeout=POLL_S, wait_for_ready=True)
                return
            except grpc.RpcError as error:
                if not is_alive() or time.monotonic() > deadline:
                    raise StackError(f"the verifier was not ready: {error.code()}") from error

    def info(self) -> verifier_pb2.GetInfoResponse:
        answer: verifier_pb2.GetInfoResponse = self._stub.GetInfo(verifier_pb2.GetInfoRequest(), timeout=TIMEOUT_S)
        return answer

    def run(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, *, temperature: float = 0.0
    ) -> list[list[tuple[float, int]]]:
        """Decode prompts that all have the same options (``decode``)."""
        return self.decode(
            [new_sequence(index, prompt, num_tokens, temperature) for index, prompt in enumerate(prompts)]
        )

    def decode(self, sequences: Sequence[verifier_pb2.Sequence]) -> list[list[tuple[float, int]]]:
        """Decode all sequences at once, and return the arrivals of each.

        Request ids are the sequences' indices. Times are perf_counter seconds, taken when gRPC
        delivers a message.

        Raises:
            StackError: a sequence failed, or the session ended before they did.
        """
        requests: queue.SimpleQueue[verifier_pb2.SessionRequest | None] = queue.SimpleQueue()
        for sequence in sequences:
            requests.put(verifier_pb2.SessionRequest(submit=sequence))
        arrivals: list[list[tuple[float, int]]] = [[] for _ in sequences]
        num_running = len(sequences)
        for response in self._stub.Session(_until_none(requests), timeout=TIMEOUT_S):
            now = time.perf_counter()
            for error in response.errors:
                requests.put(None)
                raise StackError(f"sequence {error.request_id}: {error.message}")
            for tokens in response.tokens:
                arrivals[int(tokens.request_id)].append((now, tokens.offset + len(tokens.token_ids)))
            num_running -= len(response.finished)
            if num_running == 0:
                # The end of our half ends the session.
                requests.put(None)
        if num_running:
            raise StackError(f"the session ended while {num_running} sequences ran")
        return arrivals


def new_sequence(index: int, prompt: Sequence[int], num_tokens: int, temperature: float = 0.0) -> verifier_pb2.Sequence:
    """Return a sequence of a batch. It is its own tenant, and only its length ends it."""
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
