"""What a new verifier's readiness waits for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from verifier_svc.drafters.awaited import MAX_AWAIT_S, MAX_PREPARE_S, AwaitedDrafters
from verifier_svc.drafters.handle import DrafterHandle


def drafter(
    name: str, *, num_attaches: int = 0, is_attaching: bool = False, is_preparing: bool = False
) -> DrafterHandle:
    """Return a handle's figures."""
    return cast(
        "DrafterHandle",
        SimpleNamespace(
            name=name,
            num_attaches=num_attaches,
            is_detached=False,
            is_attaching=is_attaching,
            is_preparing=is_preparing,
            # One that is being attached was not there before.
            reason="" if num_attaches else "nobody listens there",
        ),
    )


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_each_drafter_is_awaited_until_its_first_attachment() -> None:
    head, ngram = drafter("head"), drafter("ngram", num_attaches=1)
    awaited = AwaitedDrafters([head, ngram], Clock())
    assert awaited.is_waiting()
    head.num_attaches = 1  # type: ignore[misc]
    assert not awaited.is_waiting()
    # What a replaced source forgets does not matter.
    head.num_attaches = 0  # type: ignore[misc]
    assert not awaited.is_waiting()


def test_an_attached_drafter_is_awaited_until_it_is_prepared() -> None:
    head = drafter("head", num_attaches=1, is_preparing=True)
    awaited = AwaitedDrafters([head], Clock())
    assert awaited.is_waiting()
    head.is_preparing = False  # type: ignore[misc]
    assert not awaited.is_waiting()


def test_one_that_prepares_for_long_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    awaited = AwaitedDrafters([drafter("head", num_attaches=1, is_preparing=True)], clock)
    clock.now += MAX_AWAIT_S
    assert awaited.is_waiting() and not caplog.messages
    clock.now += MAX_PREPARE_S - MAX_AWAIT_S
    assert not awaited.is_waiting() and not awaited.is_waiting()
    assert caplog.messages == ["drafter head has not captured its graphs within 150 s; ready with what it has"]


def test_one_that_is_being_attached_has_as_long(caplog: pytest.LogCaptureFixture) -> None:
    """It compiles its kernels for that, where they never were. One that fails then is waited for no longer."""
    clock, head = Clock(), drafter("head", is_attaching=True)
    awaited = AwaitedDrafters([head], clock)
    clock.now += MAX_PREPARE_S - 0.1
    assert awaited.is_waiting() and not caplog.messages
    clock.now += 0.1
    assert not awaited.is_waiting()
    assert caplog.messages == [
        "drafter head has not attached within 150 s: it is still being attached; ready without it"
    ]
    failing = drafter("head", is_attaching=True)
    awaited = AwaitedDrafters([failing], clock)
    clock.now += MAX_AWAIT_S
    assert awaited.is_waiting()
    failing.is_attaching, failing.reason = False, "its self-test failed"  # type: ignore[misc]
    assert not awaited.is_waiting()
    assert caplog.messages[1:] == ["drafter head has not attached within 30 s: its self-test failed; ready without it"]


def test_one_that_is_missing_does_not_end_the_wait_for_one_that_prepares(caplog: pytest.LogCaptureFixture) -> None:
    clock, head = Clock(), drafter("head", num_attaches=1, is_preparing=True)
    awaited = AwaitedDrafters([drafter("ngram"), head], clock)
    clock.now += MAX_AWAIT_S
    assert awaited.is_waiting() and awaited.is_waiting()
    assert len(caplog.messages) == 1 and "ngram has not attached" in caplog.messages[0]
    head.is_preparing = False  # type: ignore[misc]
    assert not awaited.is_waiting()


def test_one_that_the_operator_takes_away_is_awaited_no_longer() -> None:
    head = drafter("head")
    awaited = AwaitedDrafters([head], Clock())
    assert awaited.is_waiting()
    head.is_detached = True
    assert not awaited.is_waiting()


def test_one_that_does_not_come_is_named_once_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    awaited = AwaitedDrafters([drafter("head"), drafter("ngram", num_attaches=1)], clock)
    clock.now += MAX_AWAIT_S - 0.1
    assert awaited.is_waiting() and not caplog.messages
    clock.now += 0.1
    assert not awaited.is_waiting() and not awaited.is_waiting()
    assert caplog.messages == ["drafter head has not attached within 30 s: nobody listens there; ready without it"]


def test_a_verifier_without_drafters_waits_for_none() -> None:
    assert not AwaitedDrafters().is_waiting()
