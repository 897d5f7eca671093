"""``foretoken serve --executor ray``: what the gateway, and each
verifier in the cluster, are started with.
"""

from __future__ import annotations

import asyncio
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foretoken import liveness
from foretoken.commands import kv_event_endpoints
from foretoken.commands.given import Given
from foretoken.errors import ConfigError
from foretoken.probes import FileProbe
from foretoken.service import Service
from foretoken.stack import VERIFIER_GRACE_S
from tests.support.command_line import ENVIRONMENT, foretoken, invoke, serve, words

SETTINGS = ("--threads", "3", "--disable-radix-cache", "--drain-timeout", "50", "--served-model-name", "a,b")
DRAFTERS = ("--drafter", "name=x,algorithm=NGRAM,placement=process", "--drafter", "name=y,algorithm=NGRAM")
ADDRESS = "10.0.0.1:7000"
INSTALLED = ("ray", "zmq", "msgspec")


@pytest.fixture(autouse=True)
def _extras_are_there(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in INSTALLED)
    yield


def own_words(service: Service) -> tuple[str, ...]:
    """Return the command line of one verifier of the cluster, without its address."""
    return service.command[service.command.index("--") + 1 :]


def test_the_gateway_follows_the_file_that_the_clusters_process_writes(
    tmp_path: Path, served: dict[str, tuple[Any, ...]], supervised: dict[str, Service]
) -> None:
    cluster = ("--executor", "ray", "--num-verifiers", "4", "--ray-address", "auto")
    serve(str(tmp_path), *cluster, *SETTINGS, *DRAFTERS, "--request-timeout", "9", "--insecure-links")
    assert list(supervised) == ["verifiers", "gateway"]
    invoke(*words(supervised["gateway"]))
    (gateway,) = served["gateway"]
    command = supervised["verifiers"].command
    assert gateway.verifiers == (f"file:{command[command.index('--file') + 1]}",)
    assert gateway.request_timeout_s == 9
    assert command[command.index("--num-verifiers") + 1] == "4"
    assert command[command.index("--ray-address") + 1] == "auto"
    assert command[command.index("--name") + 1] == "a"


def test_a_verifier_of_a_cluster_has_the_settings_of_the_command(
    tmp_path: Path, served: dict[str, tuple[Any, ...]], supervised: dict[str, Service]
) -> None:
    serve(str(tmp_path), "--executor", "ray", *SETTINGS, *DRAFTERS)
    line = own_words(supervised["verifiers"])
    supervised.clear()
    served.clear()
    invoke("serve", *line, "--executor", "ray", "--insecure-links", "--verifier-address", ADDRESS)
    assert list(supervised) == ["drafter x", "verifier"]
    # Its streams have their time before it is killed.
    assert supervised["verifier"].stop_grace_s == 50 + VERIFIER_GRACE_S
    invoke(*words(supervised["verifier"]))
    verifier, in_process = served["verifier"]
    assert (verifier.address, verifier.threads, verifier.disable_radix_cache) == (ADDRESS, 3, True)
    assert verifier.served_model_names == ("a", "b")
    assert ([drafter.name for drafter in verifier.drafters], list(in_process)) == (["x"], ["y"])


def test_a_token_is_made_for_both_sides(tmp_path: Path, supervised: dict[str, Service]) -> None:
    serve(str(tmp_path), "--executor", "ray")
    files = [service.command[service.command.index("--link-token-file") + 1] for service in supervised.values()]
    assert len(files) == 2 and len(set(files)) == 1
    # A verifier reads a file of its own machine.
    assert "--link-token-file" not in own_words(supervised["verifiers"])


def test_given_credentials_are_used_and_no_token_is_made(
    tmp_path: Path, served: dict[str, tuple[Any, ...]], supervised: dict[str, Service]
) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    for flags in (("--link-token-file", str(token)), ("--insecure-links",)):
        serve(str(tmp_path), "--executor", "ray", *flags)
        command = supervised["verifiers"].command
        assert "--link-token-file" not in command[: command.index("--")]
        assert set(flags) <= set(own_words(supervised["verifiers"]))


@pytest.mark.parametrize(
    "flags",
    [
        *(("--num-verifiers", "2"), ("--ray-address", "auto"), ("--insecure-links",)),
        *(("--discovery-interval", "5"), ("--routing-load-bound", "1.5"), ("--drain-timeout", "50")),
    ],
)
def test_what_has_an_effect_in_a_cluster_only_is_refused(tmp_path: Path, flags: tuple[str, ...]) -> None:
    result = foretoken("serve", str(tmp_path), *flags, "--dry-run")
    assert (result.returncode, result.stderr) == (2, f"foretoken: {flags[0]} has an effect with --executor ray only\n")


def test_each_verifier_publishes_kv_events_at_endpoints_of_its_own(
    tmp_path: Path, served: dict[str, tuple[Any, ...]], supervised: dict[str, Service]
) -> None:
    events = ("--kv-events", "tcp://*:5557", "--kv-events-replay", "ipc:///run/replay")
    serve(str(tmp_path), "--executor", "ray", "--num-verifiers", "3", *events)
    line = own_words(supervised["verifiers"])
    given = Given({"kv_events": events[1], "kv_events_replay": events[3]})
    endpoints = []
    for number in range(3):
        own = kv_event_endpoints.own_words(given, number, f"a-{number}", "m")
        supervised.clear()
        served.clear()
        invoke("serve", *line, *own, "--executor", "ray", "--insecure-links", "--verifier-address", ADDRESS)
        invoke(*words(supervised["verifier"]))
        verifier, _ = served["verifier"]
        endpoints.append((verifier.kv_events, verifier.kv_events_replay, verifier.kv_events_topic))
    assert endpoints == [
        ("tcp://*:5557", "ipc:///run/replay", "kv@a-0@m"),
        ("tcp://*:5558", "ipc:///run/replay-1", "kv@a-1@m"),
        ("tcp://*:5559", "ipc:///run/replay-2", "kv@a-2@m"),
    ]
    assert kv_event_endpoints.own_words(Given({}), 1, "a-1", "m") == []


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (
            ("--kv-events", "tcp://*:5557", "--kv-events-replay", "tcp://127.0.0.1:5558"),
            "--kv-events and --kv-events-replay need 2 ports each, one for each verifier: "
            "those from tcp://*:5557 and from tcp://127.0.0.1:5558 on overlap",
        ),
        (
            ("--kv-events", "tcp://*:65535"),
            "2 verifiers need a port each for KV events: there is no tcp://*:65536",
        ),
        (
            ("--kv-events", "tcp://*:5557", "--kv-events-topic", "kv@pod@m"),
            "--kv-events-topic names one verifier, and each of --num-verifiers needs a topic of its own",
        ),
    ],
)
def test_verifiers_that_would_share_an_endpoint_or_a_topic_are_refused(
    tmp_path: Path, supervised: dict[str, Service], flags: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(reason)}$"):
        serve(str(tmp_path), "--executor", "ray", "--num-verifiers", "2", *flags)
    assert not supervised
    serve(str(tmp_path), "--executor", "ray", *flags)
    assert supervised


def test_without_ray_one_line_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['ray'] = None\n")
    path = f"{tmp_path}:{ENVIRONMENT['PYTHONPATH']}"
    result = foretoken("serve", "demo", "--executor", "ray", PYTHONPATH=path)
    assert (result.returncode, result.stderr) == (
        2,
        "foretoken: --executor ray needs Ray: pip install 'foretoken[ray]'\n",
    )


def test_a_file_counts_as_ready_while_its_writer_lives(tmp_path: Path) -> None:
    file, path = tmp_path / "file", tmp_path / "s"
    probe = FileProbe(file, path)

    async def scenario() -> None:
        # The socket's file of a killed process: nothing answers there.
        file.touch()
        assert (await probe.is_ready(), await probe.last_turn()) == (False, None)
        file.unlink()
        with liveness.answering(path):
            assert not await probe.is_ready()
            assert await probe.last_turn() is not None
            file.touch()
            assert await probe.is_ready()
        await probe.close()

    asyncio.run(scenario())
