"""What a server says of its drafters, which candidates it takes, and what a round sends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from foretoken.bench.client import Address
from foretoken.bench.completion import StreamError
from foretoken.bench.load import CompletedRequest, LoadResult
from foretoken.bench.prompts import LoadPrompt
from foretoken.bench.target import BenchTarget, RequestOptions
from foretoken.errors import ForetokenError, UnavailableError
from foretoken.tune.candidates import AUTO, PLAIN, Candidate, ShapeFlags
from foretoken.tune.measure import WARM_UP_LEN, Meter
from foretoken.tune.run import accepted
from foretoken.tune.server import attached_drafters, drafter_states
from tests.support.scripted_server import scripted_server

CHAIN = Candidate("eagle3 3-1-4", ("eagle3",), ShapeFlags(3, 1, 4))
NOWHERE = Address("127.0.0.1", 1)


def reply(value: object, status: str = "200 OK") -> Iterator[bytes]:
    text = json.dumps(value)
    yield f"HTTP/1.1 {status}\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode()


def drafter(name: str, state: str, reason: str = "") -> dict[str, str]:
    return {"name": name, "algorithm": name.upper(), "state": state, "reason": reason}


def verifiers(*drafters: dict[str, str]) -> dict[str, Any]:
    return {"verifiers": [{"drafters": list(drafters)}]}


def test_attached_drafters_are_named_with_their_algorithms() -> None:
    found = verifiers(drafter("eagle3", "attached"), drafter("old", "detached"), drafter("ngram", "attached"))
    with scripted_server(lambda body: reply(found)) as served:
        assert attached_drafters(served.address) == {"eagle3": "EAGLE3", "ngram": "NGRAM"}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (verifiers(drafter("eagle3", "broken", "no such head")), "drafter eagle3 is not attached: no such head"),
        (verifiers(drafter("eagle3", "connecting")), "drafter eagle3 is not attached: connecting"),
        ({"version": "0.33.0"}, "is no foretoken server, or wants a key: /version has status 200"),
        ([1], "is no foretoken server"),
    ],
)
def test_a_drafter_that_is_missing_and_another_server_are_refused(answer: object, message: str) -> None:
    with scripted_server(lambda body: reply(answer)) as served, pytest.raises(UnavailableError, match=message):
        attached_drafters(served.address)


def test_nobody_answers() -> None:
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1/version"):
        attached_drafters(NOWHERE)
    assert drafter_states(NOWHERE) is None


@pytest.mark.parametrize(
    ("answer", "status", "expected"),
    [
        (verifiers(drafter("a", "attached")), "200 OK", ["attached"]),
        (verifiers(), "200 OK", []),
        (verifiers(drafter("a", "attached"), drafter("b", "connecting")), "200 OK", ["attached", "connecting"]),
        (verifiers(drafter("a", "attached")), "503 Service Unavailable", None),
    ],
)
def test_a_ready_server_says_the_state_of_its_drafters(answer: object, status: str, expected: list[str] | None) -> None:
    with scripted_server(lambda body: reply(answer, status)) as served:
        assert drafter_states(served.address) == expected


def test_candidates_beyond_the_flags_are_left_out_and_other_refusals_are_not() -> None:
    def refuse(message: str) -> Any:
        def answer(body: dict[str, Any]) -> Iterator[bytes]:
            if "shape" in body["speculative"]:
                return reply({"error": {"message": message}}, "400 Bad Request")
            return reply({"usage": {"prompt_tokens": 1}})

        return answer

    said: list[str] = []
    options = RequestOptions("completions")
    with scripted_server(refuse("speculative.shape.topk must be at most 4")) as served:
        target = BenchTarget("server", served.address, "m", options)
        assert accepted([PLAIN, AUTO, CHAIN], target, said.append) == [PLAIN, AUTO]
    assert said == ["eagle3 3-1-4 is left out: the server's flags do not admit it"]
    with scripted_server(refuse("prompt must not be empty")) as served:
        target = BenchTarget("server", served.address, "m", options)
        with pytest.raises(StreamError, match="prompt must not be empty"):
            accepted([CHAIN], target, said.append)


class Clients:
    """Notes what it is asked to send."""

    def __init__(self, failures: list[str]) -> None:
        self._failures = failures
        self.sent: list[tuple[list[dict[str, Any]], int]] = []

    def drive(self, address: Address, streams: Any, timeout_s: float, limit: int) -> LoadResult:
        self.sent.append(([body for stream in streams for body in stream.bodies], limit))
        answers = [CompletedRequest(0.0, 1.0, 2.0, 5, 0, 10, ()) for _ in streams]
        return LoadResult(answers, 0.1, self._failures)


def meter(clients: Clients) -> Meter:
    def prompts(seed: str) -> Iterator[LoadPrompt]:
        for number in range(100):
            yield LoadPrompt.of_text(f"{seed} {number}", output_len=64)

    target = BenchTarget("server", NOWHERE, "m", RequestOptions("completions"))
    return Meter(target, prompts, clients, 4, 8, 9.0, 7, lambda candidate, rate: None)  # type: ignore[arg-type]


def test_a_round_has_the_same_prompts_for_each_candidate_and_salts_of_its_own() -> None:
    clients = Clients([])
    measured = meter(clients)
    # 8 requests of 10 tokens in 2 seconds.
    assert measured.rate(PLAIN, 0) == measured.rate(CHAIN, 0) == 40.0
    measured.rate(PLAIN, 1)
    (plain, limit), (chain, _), (later, _) = clients.sent
    assert limit == 4 and len(plain) == 8
    assert [body["prompt"] for body in plain] == [body["prompt"] for body in chain]
    assert not {body["prompt"] for body in plain} & {body["prompt"] for body in later}
    assert plain[0]["speculative"] == {"enabled": False} and chain[0]["speculative"] == CHAIN.speculative
    assert len({body["cache_salt"] for body in (*plain, *chain)}) == 16
    assert {body["max_tokens"] for body in plain} == {64} and plain[0]["ignore_eos"] is True


def test_a_warm_up_is_short_and_a_failed_request_ends_all() -> None:
    clients = Clients([])
    meter(clients).warm_up(CHAIN)
    ((bodies, _),) = clients.sent
    assert len(bodies) == 4 and {body["max_tokens"] for body in bodies} == {WARM_UP_LEN}
    with pytest.raises(ForetokenError, match="eagle3 3-1-4, 4 at once: a request failed: gone"):
        meter(Clients(["gone"])).rate(CHAIN, 0)
