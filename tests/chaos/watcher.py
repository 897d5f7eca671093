"""Polls the verifier's figures: blocks, sequences, and whether speculation returns after deaths."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc

from foretoken import rpc
from protos import verifier_pb2, verifier_pb2_grpc

POLL_S = 0.25
ANSWER_S = 1.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer of the verifier. ``at``: time.monotonic(). Counts begin with the ``epoch``."""

    at: float
    epoch: int
    num_blocks: int
    num_free_blocks: int
    num_running: int
    num_waiting: int
    num_preemptions: int
    attached: bool
    num_attaches: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_steps: int = 0
    num_overlapped_steps: int = 0

    @property
    def is_idle(self) -> bool:
        """Return whether there is no sequence and every block is free."""
        return self.num_running == self.num_waiting == 0 and self.num_free_blocks == self.num_blocks


class Watcher:
    """Polls one verifier's address. ``latest`` is None while nothing answers."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.latest: Sample | None = None
        # The last sample of each verifier so far, by epoch.
        self.epochs: dict[int, Sample] = {}
        self.first_seen: dict[int, float] = {}
        self.changed = asyncio.Event()
        # Replacements followed by accepted drafts, and whether one is still unproved.
        self.num_proofs = 0
        self.owes_proof = False
        self._struck: Sample | None = None
        self._baseline: Sample | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Watcher]:
        """Poll until the block is left."""
        task = asyncio.create_task(self._poll())
        try:
            yield self
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def struck(self) -> None:
        """Note that verifier or drafter is about to die: later drafts must be accepted again."""
        self.owes_proof, self._baseline = True, None
        self._struck = self.latest or self._struck

    async def next_sample(self) -> Sample | None:
        """Return the next sample; None if the verifier did not answer."""
        self.changed.clear()
        await self.changed.wait()
        return self.latest

    async def wait_attached(self, within_s: float) -> bool:
        """Wait until every drafter is attached; return whether that happened in time."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            sample = await self.next_sample()
            if sample is not None and sample.attached:
                return True
        return False

    def acceptance(self, since: dict[int, Sample] | None = None) -> tuple[int, int]:
        """Return all verifiers' drafted and accepted tokens since a copy of ``epochs``."""
        before = since or {}
        drafted = sum(s.num_draft_tokens for s in self.epochs.values()) - sum(
            s.num_draft_tokens for s in before.values()
        )
        accepted = sum(s.num_accepted_tokens for s in self.epochs.values()) - sum(
            s.num_accepted_tokens for s in before.values()
        )
        return drafted, accepted

    def steps(self, since: dict[int, Sample]) -> tuple[int, int]:
        """Return all verifiers' steps and overlapped steps since a copy of ``epochs``."""
        return (
            sum(s.num_steps for s in self.epochs.values()) - sum(s.num_steps for s in since.values()),
            sum(s.num_overlapped_steps for s in self.epochs.values())
            - sum(s.num_overlapped_steps for s in since.values()),
        )

    async def _poll(self) -> None:
        while True:
            # A channel that has failed waits before it connects again; a new one does not.
            async with rpc.async_channel(self._address) as channel:
                stub = verifier_pb2_grpc.VerifierServiceStub(channel)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    while True:
                        info = await stub.GetInfo(verifier_pb2.GetInfoRequest(), timeout=ANSWER_S)
                        self.take(_sample(info))
                        await asyncio.sleep(POLL_S)
            self.take(None)
            await asyncio.sleep(POLL_S)

    def take(self, sample: Sample | None) -> None:
        """Take one more answer; None: there was none."""
        self.latest = sample
        if sample is not None:
            self.epochs[sample.epoch] = sample
            self.first_seen.setdefault(sample.epoch, sample.at)
            if self.owes_proof:
                self._judge(sample)
        self.changed.set()

    def _judge(self, sample: Sample) -> None:
        before = self._struck
        is_new_verifier = before is None or sample.epoch != before.epoch
        if not sample.attached or not (is_new_verifier or (before and sample.num_attaches > before.num_attaches)):
            return
        if self._baseline is None or self._baseline.epoch != sample.epoch:
            self._baseline = sample
        elif sample.num_accepted_tokens > self._baseline.num_accepted_tokens:
            self.owes_proof = False
            self.num_proofs += 1


def _sample(info: verifier_pb2.GetInfoResponse) -> Sample:
    drafters = info.drafters
    return Sample(
        at=time.monotonic(),
        epoch=info.epoch,
        num_blocks=info.num_blocks,
        num_free_blocks=info.num_free_blocks,
        num_running=info.num_running,
        num_waiting=info.num_waiting,
        num_preemptions=info.num_preemptions,
        attached=bool(drafters) and all(drafter.state == "attached" for drafter in drafters),
        num_attaches=sum(drafter.num_attaches for drafter in drafters),
        num_draft_tokens=sum(drafter.num_draft_tokens for drafter in drafters),
        num_accepted_tokens=sum(drafter.num_accepted_tokens for drafter in drafters),
        num_steps=info.num_steps,
        num_overlapped_steps=info.num_resident_steps,
    )
