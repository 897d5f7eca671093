"""A drafter in the verifier's process: when it is attached, left alone, asked for its figures.

test_transports.py tests what it has in common with drafters elsewhere.
"""

from __future__ import annotations

from foretoken.drafting import DrafterNeeds, TargetInfo
from foretoken.errors import PreconditionError
from tests.support.draft_requests import draft_request
from tests.support.mirror_drafter import MirrorDrafter
from verifier_svc.drafters.in_process import InProcessClient
from verifier_svc.drafters.source import FIRST_BACKOFF_S, GAUGES_EVERY_S, MAX_BACKOFF_S

TARGET = TargetInfo(checkpoint_hash="m", vocab_size=1000, max_model_len=1024, max_batch_slots=6, max_nodes=16)
EPOCH = 11


def test_a_drafter_is_left_alone_for_its_backoff() -> None:
    class Refusing(MirrorDrafter):
        def needs(self, target: TargetInfo) -> DrafterNeeds:
            return DrafterNeeds()

        def attach(self, target: TargetInfo, weights: object) -> None:
            super().attach(target, None)
            raise PreconditionError("another target")

    now = 0.0
    drafter = Refusing()
    client = InProcessClient("mirror", drafter, TARGET, EPOCH, clock=lambda: now)
    assert client.transport is None and client.state == "broken"
    now = FIRST_BACKOFF_S * 0.9
    assert client.transport is None and len(drafter.attached) == 1
    now = FIRST_BACKOFF_S * 1.1
    assert client.transport is None and len(drafter.attached) == 2
    assert client.num_attaches == 0


def test_a_drafter_attaches_at_start_and_once() -> None:
    drafter = MirrorDrafter()
    client = InProcessClient("mirror", drafter, TARGET, EPOCH)
    assert client.state == "connecting"
    client.start()
    assert client.state == "attached" and len(drafter.attached) == 1
    client.start()
    assert client.transport is not None and len(drafter.attached) == client.num_attaches == 1


class Gauging(MirrorDrafter):
    """A drafter that reports how many requests it saw, and raises where a test asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_faulty = False

    def gauges(self) -> dict[str, float]:
        if self.is_faulty:
            raise RuntimeError("no figures")
        return super().gauges()


def test_gauges_are_read_after_drafts() -> None:
    now = [100.0]
    drafter = Gauging()
    source = InProcessClient("mirror", drafter, TARGET, EPOCH, clock=lambda: now[0])
    assert source.gauges == {}
    transport = source.transport
    assert transport is not None
    before = source.gauges["requests"]
    transport.post(draft_request([[5]], epoch=EPOCH))
    source.report_success()
    assert source.gauges["requests"] == before, "not after every draft"
    now[0] += GAUGES_EVERY_S
    source.report_success()
    assert source.gauges["requests"] == before + 1
    drafter.is_faulty = True
    now[0] += GAUGES_EVERY_S
    source.report_success()
    assert (source.state, source.gauges) == ("broken", {})
    assert source.reason.startswith("no gauges: ")
    drafter.is_faulty = False
    now[0] += MAX_BACKOFF_S
    assert source.transport is not None
    source.close()
