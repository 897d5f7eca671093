"""One reading of a gateway's metrics, and what was counted between two."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from foretoken.telemetry import PREFIX, VERIFIER_LABEL, parse

BUCKET, BOUND_LABEL = "_bucket", "le"
# Ends of the names of what begins at zero with its process.
_COUNTS = ("_total", BUCKET, "_sum", "_count")


class Series(NamedTuple):
    """Identifies a sample: its name without the prefix ``foretoken_``, its labels in order."""

    name: str
    labels: tuple[tuple[str, str], ...] = ()

    def label(self, name: str) -> str:
        """Return the value of a label; empty if it lacks the label."""
        return dict(self.labels).get(name, "")

    @property
    def histogram(self) -> Series | None:
        """What the parts of one histogram have in common; None for other samples."""
        for end in _COUNTS[1:]:
            if self.name.endswith(end):
                labels = tuple(pair for pair in self.labels if pair[0] != BOUND_LABEL)
                return Series(self.name.removesuffix(end), labels)
        return None


Values = Mapping[Series, float]


@dataclass(frozen=True, slots=True)
class Reading:
    """What ``/metrics`` showed. ``at``: seconds of a clock that never goes back."""

    at: float
    values: Values

    @classmethod
    def of(cls, text: str, at: float) -> Reading:
        """Parse Prometheus' text format; samples of other names than ours are left out.

        Raises ValueError for another text.
        """
        return cls(
            at,
            {
                Series(sample.name.removeprefix(PREFIX), tuple(sorted(sample.labels.items()))): sample.value
                for family in parse(text)
                for sample in family.samples
                if sample.name.startswith(PREFIX)
            },
        )


def increases(before: Reading, after: Reading) -> dict[Series, float]:
    """Return by how much each sample has risen, never below zero.

    A total that fell has restarted at zero, and with it all parts of its histogram. A count that
    was not there counts from zero if its process was; otherwise nothing is known of its beginning.
    """
    restarted = {
        series.histogram
        for series, value in before.values.items()
        if series.histogram is not None and after.values.get(series, 0.0) < value
    }
    found = {}
    for series, value in after.values.items():
        start = before.values.get(series)
        if start is None:
            start = 0.0 if _counted_from_zero(series, before) else value
        is_new = value < start or (series.histogram is not None and series.histogram in restarted)
        found[series] = value if is_new else value - start
    return found


def _counted_from_zero(series: Series, before: Reading) -> bool:
    """Return whether a series that ``before`` lacks was zero then."""
    if not series.name.endswith(_COUNTS):
        # A total that a drafter reports: it may have run before it attached.
        return False
    verifier = series.label(VERIFIER_LABEL)
    return not verifier or any(
        value == 1.0 and other.name == "verifier_up" and other.label(VERIFIER_LABEL) == verifier
        for other, value in before.values.items()
    )


def total(values: Values, name: str, **labels: str | Iterable[str]) -> float:
    """Return the sum of a metric's samples whose labels have the given values, or one of these."""
    wanted = {label: {texts} if isinstance(texts, str) else set(texts) for label, texts in labels.items()}
    return sum(
        value
        for series, value in values.items()
        if series.name == name and all(series.label(label) in texts for label, texts in wanted.items())
    )


def by_label(values: Values, name: str, label: str, **labels: str) -> dict[str, float]:
    """Return a metric's sums by one label, over its samples that have the other labels' values."""
    sums: dict[str, float] = {}
    for series, value in values.items():
        if series.name == name and all(series.label(other) == text for other, text in labels.items()):
            key = series.label(label)
            sums[key] = sums.get(key, 0.0) + value
    return sums


def quantile(values: Values, name: str, share: float) -> float | None:
    """Return a quantile of a histogram, as Prometheus' histogram_quantile does.

    It is None without observations.

    ``share``: of the observations that are at most as large, 0 to 1. Within a bucket observations
    are taken as spread evenly. Beyond the last bound the answer is infinite, where Prometheus
    returns this bound.
    """
    counts = {float(bound): count for bound, count in by_label(values, name + BUCKET, BOUND_LABEL).items()}
    num_observed = max(counts.values(), default=0.0)
    if not num_observed:
        return None
    rank, lower, below = share * num_observed, 0.0, 0.0
    for bound, count in sorted(counts.items()):
        if count >= rank and count > below:
            return bound if math.isinf(bound) else lower + (bound - lower) * (rank - below) / (count - below)
        lower, below = bound, count
    return math.inf


def bucket_bounds(values: Values, name: str) -> tuple[float, ...]:
    """Return the finite upper bounds of a histogram's buckets in order.

    There are none if it was not shown.
    """
    return tuple(sorted(filter(math.isfinite, map(float, by_label(values, name + BUCKET, BOUND_LABEL)))))
