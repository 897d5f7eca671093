"""Time the round trip of a draft request through each transport, with a trivial drafter.

    python -m benchmarks.transports [--rows 1] [--steps 3000] [--gap-us 0] [--spin-us 0]

It prints p50 and p99 in microseconds at the verifier, and the CPU time a step of both processes.
The drafter runs in its own process, except in-process. ``--gap-us`` idles between steps, as during
a target's forward pass: a blocked waiter must then be woken from sleep, which spinning avoids.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import uvloop

from drafter_svc.config import DrafterSettings
from drafter_svc.server import serve
from foretoken.drafting import ROW_DTYPE, DraftBatch, DrafterNeeds, DraftRequest, TargetInfo, starts_of
from foretoken.transports.doorbell import default_spin_us
from foretoken.transports.transport import probe_request
from verifier_svc.config import DrafterEndpoint
from verifier_svc.drafters.in_process import InProcessClient
from verifier_svc.drafters.remote import DrafterClient
from verifier_svc.drafters.source import DraftSource, TransportName

EPOCH = 1
NODES = 8
TARGET = TargetInfo(
    checkpoint_hash="bench", vocab_size=1 << 15, max_model_len=4096, max_batch_slots=64, max_nodes=NODES
)
TIMEOUT_S = 30.0


class ConstantDrafter:
    """Answers each request with a chain of one shape, so that only the transport takes time."""

    @property
    def algorithm(self) -> str:
        return "CONSTANT"

    def needs(self, target: TargetInfo) -> DrafterNeeds:
        return DrafterNeeds()

    def attach(self, target: TargetInfo, weights: object) -> None:
        """Prepare nothing."""

    def draft(self, request: DraftRequest) -> DraftBatch:
        rows = request.num_rows
        return DraftBatch(
            request.epoch,
            request.step_id,
            np.arange(0, (rows + 1) * NODES, NODES, dtype=np.int32),
            np.zeros(rows * NODES, np.int32),
            np.tile(np.arange(-1, NODES - 1, dtype=np.int32), rows),
            np.zeros(rows * NODES, np.float32),
        )

    def release(self, batch_slots: object) -> None:
        """Release nothing."""

    def gauges(self) -> dict[str, float]:
        return {}


def run_drafter(address: str, spin_us: int) -> None:
    """Run the drafter in its own process."""
    uvloop.run(serve(DrafterSettings(name="constant", address=address), ConstantDrafter, spin_us))


def new_request(step_id: int, rows: int) -> DraftRequest:
    """Return the draft request of a decode step that gave each row two new tokens."""
    records = np.ones(rows, ROW_DTYPE)
    records["batch_slots"], records["max_nodes"] = np.arange(rows), NODES
    records["lengths"], records["prompt_lengths"] = 300 + 2 * step_id, 300
    nothing = [0] * rows
    starts = starts_of([2] * rows, nothing, nothing, nothing)
    return replace(probe_request(EPOCH, step_id), rows=records, starts=starts, new_tokens=np.ones(2 * rows, np.int32))


def measure(source: DraftSource, rows: int, steps: int, gap_us: int) -> tuple[np.ndarray, float]:
    """Return the microseconds of each round trip, and this process's CPU microseconds a step."""
    while (transport := source.transport) is None:
        time.sleep(0.01)
    trips = np.zeros(steps)
    used = cpu_us()
    for step in range(-100, steps):
        request = new_request(step + 101, rows)
        began = time.perf_counter_ns()
        transport.post(request)
        if transport.receive(TIMEOUT_S) is None:
            raise SystemExit("a draft did not come")
        if step >= 0:
            trips[step] = (time.perf_counter_ns() - began) / 1e3
        if gap_us:
            time.sleep(gap_us / 1e6)
    return trips, (cpu_us() - used) / (steps + 100)


def cpu_us() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return 1e6 * (usage.ru_utime + usage.ru_stime)


def process_cpu_us(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return 1e6 * (int(fields[11]) + int(fields[12])) / 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--gap-us", type=int, default=0)
    parser.add_argument("--spin-us", type=int, default=default_spin_us())
    arguments = parser.parse_args()
    print(f"{'transport':14} {'rows':>4} {'p50 us':>8} {'p99 us':>8} {'verifier cpu us':>16} {'drafter cpu us':>15}")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/d.sock"
        process = context.Process(target=run_drafter, args=(address, arguments.spin_us))
        process.start()
        transports: tuple[TransportName, ...] = ("shared-memory", "grpc", "in-process")
        for transport in transports:
            for rows in arguments.rows:
                source: DraftSource
                if transport == "in-process":
                    source = InProcessClient("constant", ConstantDrafter(), TARGET, EPOCH)
                else:
                    endpoint = DrafterEndpoint(name="constant", address=address, transport=transport)
                    source = DrafterClient(endpoint, TARGET, EPOCH, spin_us=arguments.spin_us)
                source.start()
                used = process_cpu_us(process.pid or 0)
                trips, own_cpu = measure(source, rows, arguments.steps, arguments.gap_us)
                drafter_cpu = (process_cpu_us(process.pid or 0) - used) / (arguments.steps + 100)
                source.close()
                p50, p99 = np.percentile(trips, (50, 99))
                print(f"{transport:14} {rows:4} {p50:8.1f} {p99:8.1f} {own_cpu:16.1f} {drafter_cpu:15.1f}", flush=True)
        process.terminate()
        process.join()


if __name__ == "__main__":
    main()
