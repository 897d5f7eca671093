"""What the Ray application is made of, without a cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from foretoken.errors import ConfigError

pytestmark = [pytest.mark.anyio, pytest.mark.ray, pytest.mark.filterwarnings("ignore")]


def test_arguments_are_the_flags_of_serve() -> None:
    from foretoken.ray.command_line import parse, to_words

    arguments = {"threads": 2, "model": "demo", "insecure-links": True, "disable-radix-cache": False}
    words = to_words({**arguments, "drafter": ["name=a,algorithm=NGRAM", "name=b,algorithm=NGRAM"]})
    drafters = ["--drafter", "name=a,algorithm=NGRAM", "--drafter", "name=b,algorithm=NGRAM"]
    assert words == ["demo", "--threads", "2", "--insecure-links", *drafters]
    assert parse(words).values["threads"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "demo", "cheese": 2}, "--cheese"),
        ({"model": "demo", "threads": "two"}, "--threads"),
        ({"model": "demo", "threads": None}, "threads: expected text"),
        ({"threads": 2}, "MODEL"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    from foretoken.ray.command_line import parse, to_words

    with pytest.raises(ConfigError, match=message):
        parse(to_words(arguments))


@pytest.mark.parametrize(
    "arguments", [{"ssl-certfile": "/c", "ssl-keyfile": "/k"}, {"port": 8001}, {"num-verifiers": 2}]
)
def test_what_ray_serve_does_itself_is_refused(arguments: dict[str, Any]) -> None:
    from foretoken.ray import app

    with pytest.raises(ConfigError, match=f"{next(iter(arguments))}: has no effect in the Ray application"):
        app({"model": "demo", **arguments})


def test_verifiers_of_an_application_cannot_share_a_port_for_kv_events() -> None:
    from foretoken.ray import app

    with pytest.raises(ConfigError, match="kv-events: verifiers of the Ray application that share a node"):
        app({"model": "demo", "kv-events": "tcp://*:5557"})


@pytest.mark.parametrize(
    ("words", "has_gpus", "bundle"),
    [
        ([], False, {"CPU": 1}),
        ([], True, {"CPU": 1, "GPU": 1}),
        (["--threads", "3", "--device", "cpu"], True, {"CPU": 3}),
        # A cluster may have no GPU before it grows.
        (["--device", "cuda"], False, {"CPU": 1, "GPU": 1}),
    ],
)
def test_a_verifier_and_its_drafters_have_one_bundle(
    words: list[str], has_gpus: bool, bundle: dict[str, float]
) -> None:
    from foretoken.ray.command_line import parse
    from foretoken.ray.resources import bundles

    assert bundles(parse(["demo", *words]), has_gpus=has_gpus) == [bundle]


@pytest.mark.parametrize(("sequences", "wanted"), [({}, 0), ({"a": 0}, 0), ({"a": 8, "b": 12}, 2.5)])
def test_verifiers_follow_running_and_waiting_sequences(sequences: dict[str, float], wanted: float) -> None:
    from foretoken.ray.scaling import by_demand

    config = SimpleNamespace(get_target_ongoing_requests=lambda: 8.0)
    context = SimpleNamespace(aggregated_metrics={"sequences": sequences}, config=config)
    assert by_demand(context) == (wanted, {})


async def test_an_application_gets_http_only() -> None:
    from foretoken.ray.http_only import HttpOnly

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-request-id", b"a"), (b"b", b"c")]})

    async def answers(kind: str, *events: str) -> list[Message]:
        sent: list[Message] = []
        queue = [{"type": event} for event in events]

        async def receive() -> Message:
            return queue.pop(0)

        async def send(message: Message) -> None:
            sent.append(message)

        await HttpOnly(app)({"type": kind}, receive, send)
        return sent

    assert [message["headers"] for message in await answers("http")] == [[(b"b", b"c")]]
    started = await answers("lifespan", "lifespan.startup", "lifespan.shutdown")
    assert [message["type"] for message in started] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert await answers("websocket", "websocket.connect") == [{"type": "websocket.close"}]
