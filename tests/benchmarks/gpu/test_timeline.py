"""Idle time from a few recorded kernels, by hand."""

from __future__ import annotations

from typing import Any

import pytest
from foretoken_kernels.gpu import overlap_rows

from benchmarks.gpu.timeline import STEP_KERNEL, DeviceSpan, Share, TraceError, spans_of, timeline_of


def event(name: str, start: float, length: float, **fields: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": length, "args": {"stream": 7}} | fields


def steps(count: int, *, gap: float = 6.0) -> list[DeviceSpan]:
    """Return steps of 100 us.

    Each has rows for 10, a microsecond of nothing, a pass up to 90 - gap, the gap, and sampling for
    10.
    """
    spans = []
    for number in range(count):
        at = 100.0 * number
        spans.append(DeviceSpan(STEP_KERNEL, at, at + 10))
        spans.append(DeviceSpan("matmul", at + 11, at + 90 - gap))
        spans.append(DeviceSpan("sample", at + 90, at + 100))
    return spans


def test_the_kernel_that_begins_a_step_has_this_name() -> None:
    assert hasattr(overlap_rows, STEP_KERNEL)


def test_what_occupies_the_gpu_is_read_from_a_trace() -> None:
    trace = {
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
            event("later", 20.5, 2),
            event("cudaGraphLaunch", 1, 50, cat="cuda_runtime"),
            event("Memcpy HtoD (Pinned -> Device)", 4, 1.25, cat="gpu_memcpy"),
            event("first", 3, 1),
            event("Memset (Device)", 30, 1, cat="gpu_memset"),
            {"ph": "s", "cat": "ac2g", "name": "ac2g", "ts": 3},
        ]
    }
    assert spans_of(trace) == [
        DeviceSpan("first", 3.0, 4.0),
        DeviceSpan("Memcpy HtoD (Pinned -> Device)", 4.0, 5.25),
        DeviceSpan("later", 20.5, 22.5),
        DeviceSpan("Memset (Device)", 30.0, 31.0),
    ]


def test_busy_and_idle_of_whole_steps() -> None:
    found = timeline_of(steps(13), edge_steps=1)
    assert found.step_us == [100.0] * 10 and found.busy_us == [93.0] * 10
    assert found.idle_share == pytest.approx(0.07)
    # Without recording the same work takes less time.
    assert found.idle_share_of(95.0) == pytest.approx(2 / 95)
    assert (found.small_gaps_us, found.num_small_gaps) == (pytest.approx(1.0), 1.0)
    assert found.gaps == [Share("matmul -> sample", 6.0, 1.0, 6.0)]
    assert found.work == [
        Share("matmul", 73.0, 1.0, 73.0),
        Share(STEP_KERNEL, 10.0, 1.0, 10.0),
        Share("sample", 10.0, 1.0, 10.0),
    ]


def test_work_that_overlaps_counts_once() -> None:
    """A copy runs beside the pass and ends in the gap after it."""
    copies = [DeviceSpan("copy", at + 50, at + 86) for at in (0.0, 100.0, 200.0, 300.0)]
    spans = sorted([*steps(4), *copies], key=lambda span: span.start_us)
    found = timeline_of(spans, edge_steps=0)
    assert found.busy_us == [95.0] * 3
    assert found.gaps == [Share("copy -> sample", 4.0, 1.0, 4.0)]
    assert found.work[1] == Share("copy", 36.0, 1.0, 36.0)


def test_work_without_a_gap_belongs_to_each_of_its_steps() -> None:
    spans = [*steps(4), DeviceSpan("background", 50.0, 250.0)]
    found = timeline_of(sorted(spans, key=lambda span: span.start_us), edge_steps=0)
    assert found.busy_us == [99.0, 100.0, 94.0]
    assert found.gaps == [Share("matmul -> sample", 2.0, pytest.approx(1 / 3), 6.0)]


def test_a_gap_at_the_end_of_a_step_is_one() -> None:
    spans = [span for span in steps(3) if span.name != "sample"]
    found = timeline_of(spans, edge_steps=0)
    assert found.gaps == [Share(f"matmul -> {STEP_KERNEL}", 16.0, 1.0, 16.0)]
    assert found.busy_us == [83.0, 83.0]


def test_a_trace_without_steady_steps_is_refused() -> None:
    with pytest.raises(TraceError, match="0 kernels and copies were recorded, and 0 overlapped steps"):
        timeline_of([])
    with pytest.raises(TraceError, match="and 11 overlapped steps"):
        timeline_of(steps(11))
    assert len(timeline_of(steps(12)).step_us) == 1
