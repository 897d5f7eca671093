"""Compute a GPU's idle time from a recording of its work."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from benchmarks.figures import median

# Categories in a Chrome trace of PyTorch's profiler that occupy the GPU.
CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
# The first kernel of each overlapped step (foretoken_kernels.gpu.overlap_rows).
STEP_KERNEL = "_lay_out_rows"
# The first steps of a run capture graphs, and the last ones have fewer rows.
EDGE_STEPS = 5
# Between two kernels of one graph the GPU takes about a microsecond. In a longer gap it waits.
SMALL_GAP_US = 2.0


class TraceError(Exception):
    """The recording has no steady steps."""


class DeviceSpan(NamedTuple):
    """One kernel, copy or fill. Times are microseconds of the trace's clock."""

    name: str
    start_us: float
    end_us: float


class Share(NamedTuple):
    """Time and count of one kind of kernel or gap in a step.

    A gap's name has the kernel before it and the kernel after it.
    """

    name: str
    us_per_step: float
    count_per_step: float
    longest_us: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Successive whole steps. Times are microseconds; lists begin with the largest.

    Attributes:
        step_us: the time of each step, from its first kernel to the first kernel of the next step.
        busy_us: the time of each step in which the GPU worked. Overlapping work counts once.
        small_gaps_us: the sum of all gaps below SMALL_GAP_US in an average step.
    """

    step_us: list[float]
    busy_us: list[float]
    small_gaps_us: float
    num_small_gaps: float
    gaps: list[Share]
    work: list[Share]

    @property
    def idle_share(self) -> float:
        """The idle share of the recording: an upper bound, because recording makes gaps longer."""
        return 1 - sum(self.busy_us) / sum(self.step_us)

    def idle_share_of(self, step_us: float) -> float:
        """Return the idle share if a step of ``step_us``, without recording, does the same work."""
        return 1 - median(self.busy_us) / step_us


def spans_of(trace: dict[str, Any]) -> list[DeviceSpan]:
    """Return the GPU's work in a Chrome trace, sorted by start."""
    found = [
        DeviceSpan(event["name"], float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in CATEGORIES
    ]
    return sorted(found, key=lambda span: span.start_us)


def timeline_of(spans: Sequence[DeviceSpan], edge_steps: int = EDGE_STEPS) -> Timeline:
    """Return the whole steps in ``spans``, without ``edge_steps`` at either end.

    ``spans`` are sorted by start.

    Raises:
        TraceError: there are no whole steps.
    """
    starts = [span.start_us for span in spans if span.name.startswith(STEP_KERNEL)]
    borders = starts[edge_steps : len(starts) - edge_steps]
    if len(borders) < 2:
        raise TraceError(f"{len(spans)} kernels and copies were recorded, and {len(starts)} overlapped steps")
    inside = _inside(spans, borders[0], borders[-1])
    busy = _busy(inside)
    return _summary(borders, inside, busy)


def _inside(spans: Iterable[DeviceSpan], first_us: float, last_us: float) -> list[DeviceSpan]:
    """Return the spans cut to a window."""
    return [
        DeviceSpan(span.name, max(span.start_us, first_us), min(span.end_us, last_us))
        for span in spans
        if span.start_us < last_us and span.end_us > first_us
    ]


class _Busy(NamedTuple):
    """Time without a gap, with the names of its first span and of the span that ended last."""

    start_us: float
    end_us: float
    first: str
    last: str


def _busy(spans: Iterable[DeviceSpan]) -> list[_Busy]:
    """Merge ``spans``, sorted by start, into times without a gap."""
    found: list[_Busy] = []
    for span in spans:
        if not found or span.start_us > found[-1].end_us:
            found.append(_Busy(span.start_us, span.end_us, span.name, span.name))
        elif span.end_us > found[-1].end_us:
            found[-1] = found[-1]._replace(end_us=span.end_us, last=span.name)
    return found


def _summary(borders: Sequence[float], spans: Sequence[DeviceSpan], busy: Sequence[_Busy]) -> Timeline:
    num_steps = len(borders) - 1
    small: list[float] = []
    gaps: dict[str, list[float]] = defaultdict(list)
    # The window ends where the next step's first kernel begins.
    end = _Busy(borders[-1], borders[-1], STEP_KERNEL, STEP_KERNEL)
    for before, after in pairwise([*busy, end]):
        gap_us = after.start_us - before.end_us
        if gap_us >= SMALL_GAP_US:
            gaps[f"{before.last} -> {after.first}"].append(gap_us)
        elif gap_us > 0:
            small.append(gap_us)
    work: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        work[span.name].append(span.end_us - span.start_us)
    return Timeline(
        step_us=[after - before for before, after in pairwise(borders)],
        busy_us=_busy_by_step(borders, busy),
        small_gaps_us=sum(small) / num_steps,
        num_small_gaps=len(small) / num_steps,
        gaps=_shares(gaps, num_steps),
        work=_shares(work, num_steps),
    )


def _busy_by_step(borders: Sequence[float], busy: Iterable[_Busy]) -> list[float]:
    found = [0.0] * (len(borders) - 1)
    step = 0
    for each in busy:
        while borders[step + 1] <= each.start_us:
            step += 1
        # Work without a gap may go on through several steps.
        last = step
        while last < len(found) and borders[last] < each.end_us:
            found[last] += min(each.end_us, borders[last + 1]) - max(each.start_us, borders[last])
            last += 1
    return found


def _shares(found: dict[str, list[float]], num_steps: int) -> list[Share]:
    shares = [Share(name, sum(times) / num_steps, len(times) / num_steps, max(times)) for name, times in found.items()]
    return sorted(shares, key=lambda share: -share.us_per_step)
