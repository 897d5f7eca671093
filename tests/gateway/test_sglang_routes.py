"""SGLang's routes beside /generate.

They give information, flush, abort, and check health by generating.
"""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import grpc
import pytest

from foretoken.errors import UnavailableError
from gateway.worker_aborts import abort_in_all_workers, aborts_socket, serve_aborts
from protos import gateway_pb2, gateway_pb2_grpc, verifier_pb2
from tests.gateway.conftest import Stack, events
from tests.gateway.deployment import deployment
from tests.gateway.scripted_verifier import ABORT, STOP, Player, steps

pytestmark = pytest.mark.anyio


async def until_aborted(player: Player) -> None:
    """Play two tokens, and the rest of the text never."""
    player.tokens([65, 66])
    await player.aborted.wait()
    player.finish(ABORT)


# Information.


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_server_info_has_the_acceptance_length(stack: Stack, path: str) -> None:
    info = (await stack.http.get(path)).json()
    assert (info["model_path"], info["served_model_name"]) == (str(stack.settings.model), "tiny")
    assert (info["context_length"], info["version"]) == (128, (await stack.http.get("/version")).json()["version"])
    # Nothing was drafted yet.
    del stack.verifier.info.drafters[:]
    (state,) = (await stack.http.get(path)).json()["internal_states"]
    assert "avg_spec_accept_length" not in state
    stack.verifier.info.drafters.extend(
        [
            verifier_pb2.DrafterState(name="a", num_drafts=10, num_draft_tokens=30, num_accepted_tokens=20),
            verifier_pb2.DrafterState(name="b", num_drafts=10, num_draft_tokens=30, num_accepted_tokens=5),
        ]
    )
    (state,) = (await stack.http.get(path)).json()["internal_states"]
    assert state["avg_spec_accept_length"] == 1 + 25 / 20


async def test_server_info_has_no_secrets(stack: Stack) -> None:
    text = (await stack.http.get("/server_info")).text
    assert not [word for word in ("key", "socket", "unix:") if word in text]


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
async def test_model_info(stack: Stack, path: str) -> None:
    info = (await stack.http.get(path)).json()
    assert (info["model_path"], info["tokenizer_path"]) == (str(stack.settings.model),) * 2
    assert (info["is_generation"], info["max_model_len"]) == (True, 128)


# The prefix cache.


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_flush_reaches_all_verifiers_unless_requests_run(stack: Stack, method: str, tmp_path: Any) -> None:
    stack.verifier.info.num_running = 0
    answer = await stack.http.request(method, "/flush_cache")
    assert (answer.status_code, answer.text, stack.verifier.num_flushes) == (200, "Cache flushed: 5 blocks.\n", 1)
    stack.verifier.info.num_running = 1
    answer = await stack.http.request(method, "/flush_cache")
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "requests run")


async def test_a_foreign_page_flushes_nothing(stack: Stack) -> None:
    stack.verifier.info.num_running = 0
    for site, status in [("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)]:
        assert (await stack.http.get("/flush_cache", headers={"sec-fetch-site": site})).status_code == status
    assert stack.verifier.num_flushes == 2


async def test_without_a_verifier_there_is_nothing_to_flush_or_tell(settings: Any, tokenizer: Any) -> None:
    async with deployment(settings, tokenizer) as running:
        for path in ("/flush_cache", "/server_info"):
            assert (await running.http.get(path)).status_code == 503


# Aborts.


async def started(stack: Stack, path: str, body: dict[str, object], **more: Any) -> asyncio.Task[Any]:
    num_before = len(stack.verifier.submitted)
    task = asyncio.create_task(stack.http.post(path, json=body, **more))
    await stack.verifier.until(lambda: len(stack.verifier.submitted) > num_before)
    return task


async def test_a_request_is_aborted_by_the_clients_name(stack: Stack) -> None:
    stack.verifier.script = until_aborted
    first = await started(stack, "/generate", {"input_ids": [5], "rid": "mine"})
    second = await started(stack, "/generate", {"input_ids": [5], "rid": "other"})
    answer = await stack.http.post("/abort_request", json={"rid": "mine"})
    assert (answer.status_code, answer.json()) == (200, {"num_aborted": 1})
    result = (await first).json()
    assert result["meta_info"]["finish_reason"] == {"type": "abort", "message": "Aborted by /abort_request."}
    assert (result["output_ids"], result["text"]) == ([65, 66], stack.tokenizer.decode([65, 66]))
    assert not second.done()
    assert (await stack.http.post("/abort_request", json={"abort_all": True})).json() == {"num_aborted": 1}
    assert (await second).json()["output_ids"] == [65, 66]
    # They are gone.
    assert (await stack.http.post("/abort_request", json={"abort_all": True})).json() == {"num_aborted": 0}
    assert await stack.metric("foretoken_request_success_total", finished_reason="abort") == 2
    assert await stack.metric("foretoken_gateway_num_requests") == 0


@pytest.mark.parametrize(
    ("url", "body"),
    [("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})],
)
async def test_a_request_is_aborted_by_the_name_in_its_body(stack: Stack, url: str, body: dict[str, object]) -> None:
    stack.verifier.script = until_aborted
    answer = await started(stack, url, body | {"request_id": "mine"}, headers={"x-request-id": "another"})
    for name, count in (("another", 0), ("mine", 1)):
        assert (await stack.http.post("/abort_request", json={"rid": name})).json() == {"num_aborted": count}
    assert (await answer).status_code == 200


@pytest.mark.parametrize("has_list", [True, False])
async def test_one_prompt_of_a_list_is_aborted_by_its_own_id(stack: Stack, has_list: bool) -> None:
    async def play(player: Player) -> None:
        player.tokens([65, 66])
        await (player.aborted if player.sequence.prompt_token_ids[0] == 6 else go_on).wait()
        player.finish(ABORT if player.aborted.is_set() else STOP)

    go_on = asyncio.Event()
    stack.verifier.script = play
    # As long as a name may be.
    six = "6" * 128
    rid: list[str] | str = ["five", six] if has_list else six
    answer = await started(stack, "/generate", {"input_ids": [[5], [6]], "rid": rid})
    await stack.verifier.until(lambda: len(stack.verifier.submitted) == 2)
    for name, count in ((six if has_list else f"{six}_1", 1), ("seven", 0)):
        assert (await stack.http.post("/abort_request", json={"rid": name})).json() == {"num_aborted": count}
    go_on.set()
    assert [item["meta_info"]["finish_reason"]["type"] for item in (await answer).json()] == ["stop", "abort"]


async def test_a_stream_is_aborted_by_the_answers_id(stack: Stack) -> None:
    stack.verifier.script = until_aborted
    body = {"messages": [{"role": "user", "content": "a"}], "stream": True, "n": 2}
    text = ""
    async with stack.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for part in answer.aiter_text():
            if not text:
                name = json.loads(part.removeprefix("data: ").partition("\n")[0])["id"]
                aborted = await stack.http.post("/abort_request", json={"rid": name, "abort_message": "why"})
                assert aborted.json() == {"num_aborted": 1}
            text += part
    ends = [choice["finish_reason"] for chunk in events(text) for choice in chunk["choices"] if choice["finish_reason"]]
    assert ends == ["abort", "abort"]


async def test_a_request_that_waits_for_a_verifier_is_aborted(settings: Any, tokenizer: Any) -> None:
    async with deployment(settings, tokenizer) as running:
        await running.start(until_aborted)
        await running.kill()
        task = asyncio.create_task(running.http.post("/generate", json={"input_ids": [5], "rid": "waits"}))
        await running.until(lambda: running.gateway.verifiers.num_waiting == 1)
        assert (await running.http.post("/abort_request", json={"rid": "waits"})).json() == {"num_aborted": 1}
        result = (await task).json()
        assert (result["output_ids"], result["meta_info"]["finish_reason"]["type"]) == ([], "abort")
        assert running.gateway.verifiers.num_sequences == 0


async def test_a_grpc_call_is_aborted_by_its_request_id(stack: Stack) -> None:
    stack.verifier.script = until_aborted
    async with grpc.aio.insecure_channel(stack.grpc_address) as channel:
        call = gateway_pb2_grpc.GatewayServiceStub(channel).Generate(
            gateway_pb2.GenerateRequest(token_ids=gateway_pb2.TokenIds(ids=[5]), request_id="rpc")
        )
        await call.read()
        assert (await stack.http.post("/abort_request", json={"rid": "rpc"})).json() == {"num_aborted": 1}
        last = await call.read()
        assert last.HasField("complete")
        assert await call.read() is grpc.aio.EOF


@pytest.mark.parametrize("body", [{}, {"rid": ""}, {"rid": "x" * 145}, {"rid": 5}, {"abort_all": "yes"}, {"id": "a"}])
async def test_an_abort_needs_a_name(stack: Stack, body: dict[str, object]) -> None:
    assert (await stack.http.post("/abort_request", json=body)).status_code == 400


async def test_a_worker_that_is_not_there_has_no_requests_but_a_silent_one_may(tmp_path: Any) -> None:
    assert await abort_in_all_workers(tmp_path, 3, "a", "acme") == 0
    asked: list[tuple[str | None, str]] = []

    def abort(name: str | None, tenant: str) -> int:
        asked.append((name, tenant))
        return 2

    async with serve_aborts(aborts_socket(tmp_path, 0), abort), serve_aborts(aborts_socket(tmp_path, 2), abort):
        assert await abort_in_all_workers(tmp_path, 3, 'a "name"\n', "acme") == 4
        assert await abort_in_all_workers(tmp_path, 3, None, "") == 4
    assert asked == [('a "name"\n', "acme"), ('a "name"\n', "acme"), (None, ""), (None, "")]
    with (
        socket.socket(socket.AF_UNIX) as silent,
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(UnavailableError),
    ):
        silent.bind(str(aborts_socket(tmp_path, 1)))
        silent.listen()
        patch.setattr("gateway.worker_aborts.ABORT_TIMEOUT_S", 0.05)
        await abort_in_all_workers(tmp_path, 3, "a", "acme")


# Health.


async def test_health_generate_makes_a_token(stack: Stack) -> None:
    stack.verifier.script = steps([65])
    assert (await stack.http.get("/health_generate")).status_code == 200
    (sequence,) = stack.verifier.submitted
    assert (list(sequence.prompt_token_ids), sequence.sampling.max_tokens) == ([0], 1)


async def test_health_generate_is_unavailable_if_nothing_comes(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(player: Player) -> None:
        player.error(grpc.StatusCode.DEADLINE_EXCEEDED, "too late")

    stack.verifier.script = fail
    assert (await stack.http.get("/health_generate")).status_code == 503
    monkeypatch.setattr("gateway.sglang.info.HEALTH_TIMEOUT_S", 0.2)
    stack.verifier.script = until_aborted
    answer = await stack.http.get("/health_generate")
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "service_unavailable_error")
    await stack.verifier.until(lambda: len(stack.verifier.aborts) == 1)
