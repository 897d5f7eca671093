"""Hold what differs between a run on the CPU and one on a GPU: load, schedule, flags and times.

On a GPU a verifier needs 30 to 100 s to start while its kernels compile and its graphs are
captured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tests.chaos.client import PATIENCE_S
from tests.chaos.schedule import SECONDS_PER_DEATH, Process


@dataclass(frozen=True, slots=True)
class Device:
    """The terms of a run on one kind of device. Each time is the longest that passes.

    Attributes:
        num_clients: clients that send requests at the same time.
        seconds_per_death: how often each process dies.
        ready_s: until ``foretoken serve`` is ready.
        attached_s: from then until the drafters are attached.
        recovery_s: from a death until drafts are accepted again.
        verifier_wait_s: a new request's wait for a verifier.
        patience_s: from a request to the end of its answer.
        gone_s: from the end of ``foretoken serve`` to that of its last process.
        flags: more flags of ``foretoken serve``.
    """

    name: str
    num_clients: int
    seconds_per_death: Mapping[Process, float]
    ready_s: float
    attached_s: float
    recovery_s: float
    verifier_wait_s: float
    patience_s: float
    gone_s: float
    flags: tuple[str, ...] = ()

    def serve_flags(self, num_verifier_deaths: int) -> list[str]:
        """Return flags of ``foretoken serve`` with which every stream survives the deaths."""
        return [
            *("--device", self.name, "--numerics", "strict"),
            # The gateway that dies is the only one, however many cores there are.
            *("--gateway-workers", "1"),
            *("--resume-attempts", str(num_verifier_deaths + 10), "--verifier-wait", f"{self.verifier_wait_s:g}"),
            *self.flags,
        ]


CPU = Device(
    name="cpu",
    num_clients=12,
    seconds_per_death=SECONDS_PER_DEATH,
    ready_s=180.0,
    attached_s=30.0,
    recovery_s=60.0,
    verifier_wait_s=120.0,
    patience_s=PATIENCE_S,
    gone_s=0.0,
)
CUDA = Device(
    name="cuda",
    num_clients=16,
    seconds_per_death={"verifier": 45.0, "drafter": 15.0, "head": 30.0, "gateway": 60.0},
    ready_s=480.0,
    attached_s=120.0,
    recovery_s=240.0,
    verifier_wait_s=400.0,
    patience_s=570.0,
    # The daemon of MPS goes last.
    gone_s=10.0,
    # With a fixed shape every step drafts. The demo model is so fast that its drafts may not pay.
    flags=(
        *("--speculative-num-steps", "3", "--speculative-eagle-topk", "2"),
        *("--speculative-num-draft-tokens", "6"),
    ),
)
DEVICES = {device.name: device for device in (CPU, CUDA)}
