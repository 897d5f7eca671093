"""How long the GPU waits for the host where a step is launched after the last one was read."""

from __future__ import annotations

from foretoken.models.device_batch import seq_bucket

# Seconds before any gap was measured.
FIRST_GAP_S = 5e-4
# The least weight of a new gap, and the most times what is known that it counts as.
GAP_SMOOTHING, MOST_GAP_RATIO = 0.05, 4.0


class StepGaps:
    """The gaps before steps with prompts, and before all others.

    The host takes longer to launch prompts.
    """

    def __init__(self) -> None:
        self._gaps = {False: GapTimes(), True: GapTimes()}

    def seconds(self, batch: int, *, has_prompts: bool) -> float:
        """Return the seconds as GapTimes.seconds does."""
        return self._gaps[has_prompts].seconds(batch)

    def observe(self, batch: int, seconds: float, *, has_prompts: bool) -> None:
        """Record a gap as GapTimes.observe does."""
        self._gaps[has_prompts].observe(batch, seconds)


class GapTimes:
    """Seconds between a step's end and the launch of the next one, by the sequences in a batch."""

    def __init__(self) -> None:
        # By rounded batch size: the mean, and how many gaps are in it.
        self._means: dict[int, tuple[float, int]] = {}

    def seconds(self, batch: int) -> float:
        """Return the gap with ``batch`` sequences.

        It is the gap at the nearest batch size that was measured.
        """
        if not self._means:
            return FIRST_GAP_S
        size = seq_bucket(batch)
        # Sizes are powers of two.
        nearest = min(self._means, key=lambda known: max(known, size) / min(known, size))
        return self._means[nearest][0]

    def observe(self, batch: int, seconds: float) -> None:
        """Learn from a launch, ``seconds`` after the end of the step before."""
        size = seq_bucket(batch)
        count = self._means[size][1] + 1 if size in self._means else 1
        known = self.seconds(batch)
        mean = known + max(1 / (count + 1), GAP_SMOOTHING) * (min(seconds, MOST_GAP_RATIO * known) - known)
        self._means[size] = mean, count
