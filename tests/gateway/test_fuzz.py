"""Random requests never end in an internal error, and the server is well afterwards."""

from __future__ import annotations

import pytest

from gateway.access.routes import ROUTES
from tests.chaos.fuzz import fuzz
from tests.gateway.conftest import Stack
from tests.gateway.scripted_verifier import steps
from tests.support.fuzzed_requests import BODIES, FuzzedRequests

pytestmark = pytest.mark.anyio
NUM_REQUESTS = 1000


def test_a_seed_makes_the_same_requests() -> None:
    first, again, other = FuzzedRequests(3), FuzzedRequests(3), FuzzedRequests(4)
    made = [(requests.rest(), requests.rpc()) for requests in (first, again, other) for _ in range(20)]
    assert made[:20] == made[20:40] != made[40:]


def test_bodies_of_all_routes_are_made() -> None:
    without_body = {"/flush_cache", "/v1/responses/{response_id}/cancel"}
    assert {route.path for route in ROUTES if route.method == "POST"} - without_body == {*BODIES}


def test_requests_show_the_keys_that_there_are() -> None:
    requests = FuzzedRequests(1, ["first", "second"], "operator")
    made = [requests.rest() for _ in range(400)]
    shown = {key for request in made for key in request.headers.items()}
    assert {("authorization", "Bearer first"), ("x-api-key", "second"), ("x-api-key", "operator")} <= shown
    operators = [request for request in made if request.path == "/v1/drafters"]
    assert sum("operator" in str(request.headers) for request in operators) > len(operators) / 2


async def test_random_requests_find_no_fault(stack: Stack) -> None:
    stack.verifier.script = steps([65], [66, 67])
    outcomes = await fuzz(stack.url, stack.grpc_address, seed=1, num_requests=NUM_REQUESTS)
    assert outcomes.faults == []
    # They reach all stages.
    counts = outcomes.counts
    assert sum(counts.values()) == NUM_REQUESTS
    assert min(counts["HTTP 200"], counts["HTTP 400"], counts["gRPC OK"], counts["gRPC INVALID_ARGUMENT"]) > 20
    core = stack.gateway.core
    assert (core.admission.num_requests, core.bodies.num_bytes, core.verifiers.num_sequences) == (0, 0, 0)
    assert (await stack.http.post("/v1/completions", json={"prompt": [5]})).status_code == 200
