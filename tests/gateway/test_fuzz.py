"""Random requests never end in an internal error, and the server is well afterwards."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from gateway.access.routes import ROUTES
from tests.chaos.fuzz import FIXED_REQUESTS, FixedAnswerError, Outcomes, fuzz, send_rpc
from tests.gateway.conftest import Stack
from tests.gateway.scripted_verifier import steps
from tests.support.fuzzed_requests import BODIES, GENERATE_RPC, PUBLIC_RPCS, FuzzedRequests, RpcRequest

pytestmark = pytest.mark.anyio
NUM_REQUESTS = 1000


def test_a_seed_makes_the_same_requests() -> None:
    first, again, other = FuzzedRequests(3), FuzzedRequests(3), FuzzedRequests(4)
    made = [(requests.rest(), requests.rpc()) for requests in (first, again, other) for _ in range(20)]
    assert made[:20] == made[20:40] != made[40:]


def test_bodies_of_all_routes_are_made() -> None:
    without_body = {"/flush_cache", "/v1/responses/{response_id}/cancel"}
    assert {route.path for route in ROUTES if route.method == "POST"} - without_body == {*BODIES}


def test_calls_of_all_public_rpcs_are_made() -> None:
    requests = FuzzedRequests(1)
    calls = [requests.rpc() for _ in range(400)]
    assert {*PUBLIC_RPCS} < {call.path for call in calls}
    assert {len(call.messages) for call in calls} == {0, 1, 2, 3, 4}


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
    assert sum(counts.values()) == NUM_REQUESTS + counts["fixed answer kept"]
    assert counts["fixed answer kept"] == len(FIXED_REQUESTS) == 4
    assert min(counts["HTTP 200"], counts["HTTP 400"], counts["gRPC OK"], counts["gRPC INVALID_ARGUMENT"]) > 20
    # Health checks of no service, and calls of no method.
    assert min(counts["gRPC NOT_FOUND"], counts["gRPC UNIMPLEMENTED"]) > 0
    core = stack.gateway.core
    assert (core.admission.num_requests, core.bodies.num_bytes, core.verifiers.num_sequences) == (0, 0, 0)
    assert (await stack.http.post("/v1/completions", json={"prompt": [5]})).status_code == 200


async def test_an_answer_that_the_run_changed_is_a_fault(stack: Stack) -> None:
    stack.verifier.script = steps([65], [66, 67])

    def change(_: int) -> None:
        stack.verifier.script = steps([65], [66, 68])

    outcomes = await fuzz(stack.url, stack.grpc_address, seed=1, num_requests=1, on_count=change)
    assert outcomes.counts["fixed answer changed"] == len(outcomes.faults) == 4
    assert all("another answer after the run" in fault for fault in outcomes.faults)


async def test_a_refused_fixed_request_stops_the_run(stack: Stack) -> None:
    with pytest.raises(FixedAnswerError, match="status 404"):
        await fuzz(stack.url + "/none", stack.grpc_address, seed=1, num_requests=1)


class FailingHandler(grpc.GenericRpcHandler):
    """Reads every call to its end and answers with INTERNAL."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        async def fail(requests: AsyncIterator[bytes], context: Any) -> None:
            async for _ in requests:
                pass
            await context.abort(grpc.StatusCode.INTERNAL, "a bug")

        return grpc.stream_stream_rpc_method_handler(fail)


@pytest.mark.parametrize("num_messages", [0, 1, 2])
async def test_an_internal_error_is_a_fault(num_messages: int) -> None:
    server = grpc.aio.server(handlers=[FailingHandler()])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    outcomes = Outcomes()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await send_rpc(channel, RpcRequest(GENERATE_RPC, (b"",) * num_messages), outcomes)
    await server.stop(None)
    assert outcomes.counts == {"gRPC INTERNAL": 1}
    assert outcomes.faults[0].startswith("INTERNAL a bug: ")
