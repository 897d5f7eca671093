"""A drafter or its verifier goes away, and the drafter is attached again."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from foretoken.transports.transport import TransportClosedError
from tests.support.draft_requests import draft_request
from tests.support.drafter_process import (
    EPOCH,
    LONG_S,
    PROCESS_KINDS,
    SHORT_S,
    DrafterProcess,
    Kind,
    attached,
    attached_again,
    client_of,
    until,
)
from tests.support.environment import child_environment
from verifier_svc.drafters import remote
from verifier_svc.drafters.remote import DrafterClient
from verifier_svc.drafters.source import MAX_CONSECUTIVE_FAILURES


@pytest.mark.parametrize("kind", ["shared-memory", pytest.param("grpc", marks=pytest.mark.slow)])
def test_a_killed_drafter_is_noticed_at_once_and_attached_again(
    kind: Kind, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    process = DrafterProcess(tmp_path)
    with client_of(process.address, kind) as client:
        transport = attached(client)
        process.stop()
        transport.post(draft_request([[5]], epoch=EPOCH))
        killer = threading.Timer(SHORT_S, process.kill)
        assert transport.is_open(), "it only stands still"
        killer.start()
        # Something other than the time-out ends this.
        with pytest.raises(TransportClosedError):
            transport.receive(LONG_S)
        killer.join()
        assert not transport.is_open()
        until(lambda: client.transport is None)
        assert client.state == "connecting"
        process.start()
        again = attached_again(client, 2)
        again.post(draft_request([[6]], epoch=EPOCH, step_id=2))
        assert again.receive(LONG_S) is not None
    process.kill()
    events = [record.getMessage() for record in caplog.records if record.name == "verifier_svc.drafters.remote"]
    assert events.count(f"drafter mirror (MIRROR) attached over {kind}") == 2
    lost = [event for event in events if "is gone" in event]
    assert len(lost) == 1 and f"not attached over {kind}" in lost[0]
    # Others may draft meanwhile.
    assert lost[0].endswith("the drafter is gone; no drafts from it until it is")


@pytest.mark.slow
@pytest.mark.parametrize("kind", PROCESS_KINDS)
def test_a_drafter_that_is_restarted_in_a_loop_is_attached_in_the_end(kind: Kind, tmp_path: Path) -> None:
    """It dies while it starts, while it is being attached, and in use."""
    process = DrafterProcess(tmp_path)
    with client_of(process.address, kind) as client:
        attached(client)
        for lives_until in ("start", "socket", "attached", "start", "used"):
            process.kill()
            before = client.num_attaches
            process.start()
            if lives_until == "socket":
                process.info()
            elif lives_until in ("attached", "used"):
                transport = attached_again(client, before + 1)
                if lives_until == "used":
                    transport.post(draft_request([[5]], epoch=EPOCH))
                    assert transport.receive(LONG_S) is not None
        process.kill()
        before = client.num_attaches
        process.start()
        transport = attached_again(client, before + 1)
        transport.post(draft_request([[6]], epoch=EPOCH, step_id=2))
        assert transport.receive(LONG_S) is not None
    process.kill()


@pytest.mark.parametrize(("starts_within_s", "level"), [(LONG_S, logging.INFO), (0.0, logging.WARNING)])
def test_a_drafter_that_is_not_there_yet_is_a_warning_after_a_while(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    starts_within_s: float,
    level: int,
) -> None:
    monkeypatch.setattr(remote, "STARTS_WITHIN_S", starts_within_s)
    caplog.set_level(logging.DEBUG, logger="verifier_svc.drafters.remote")

    def levels() -> list[int]:
        return [record.levelno for record in caplog.records if record.name == "verifier_svc.drafters.remote"]

    with client_of(f"unix:{tmp_path}/nobody", "shared-memory"):
        until(lambda: len(levels()) >= 3)
    assert levels()[0] == level
    assert set(levels()[1:]) == {logging.DEBUG}


def test_an_idle_drafters_death_is_noticed_too(tmp_path: Path) -> None:
    process = DrafterProcess(tmp_path)
    with client_of(process.address, "shared-memory") as arena:
        attached(arena)
        process.kill()
        until(lambda: arena.transport is None and arena.state == "connecting")
        assert arena.reason


VERIFIER = """
import sys
from foretoken.drafting import TargetInfo
from verifier_svc.config import DrafterEndpoint
from verifier_svc.drafters.remote import DrafterClient
from tests.support.draft_requests import draft_request
client = DrafterClient(
    DrafterEndpoint(name="mirror", address=sys.argv[1], transport=sys.argv[2]), TargetInfo("m", 1000, 1024, 6, 16), 11
)
client.start()
while client.transport is None:
    pass
client.transport.post(draft_request([[5]], epoch=11))
assert client.transport.receive(600) is not None
print("drafted", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("kind", ["shared-memory", pytest.param("grpc", marks=pytest.mark.slow)])
def test_a_killed_verifier_frees_the_drafter(kind: Kind, process: DrafterProcess) -> None:
    command = [sys.executable, "-c", VERIFIER, process.address, kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=child_environment()) as verifier:
        assert verifier.stdout is not None
        assert verifier.stdout.readline() == b"drafted\n"
        info = process.info()
        assert (info.attached, info.transport, info.gauges["slots"]) == (True, kind, 1)
        verifier.kill()
    until(lambda: not process.info().attached)
    assert process.info().gauges["slots"] == 0


def test_a_client_of_nobody_closes_at_once(tmp_path: Path) -> None:
    with client_of(f"unix:{tmp_path}/nobody.sock", "shared-memory") as client:
        assert (client.state, client.transport) == ("connecting", None)
    assert list(tmp_path.iterdir()) == []


def test_gauges_are_looked_at_in_the_background_and_gone_with_the_attachment(
    client: DrafterClient, process: DrafterProcess
) -> None:
    transport = attached(client)
    until(lambda: "requests" in client.gauges)
    process.stop()
    # The drafter is silent. Giving it up meanwhile does not wait for its gauges.
    for _ in range(MAX_CONSECUTIVE_FAILURES):
        client.report_failure("late")
    until(lambda: client.gauges == {})
    assert client.state == "broken"
    process.resume()
    assert attached(client) is not transport
    until(lambda: "requests" in client.gauges)
