"""What one run of overlapped steps learns of look-ups, and the next one knows."""

from __future__ import annotations

from dataclasses import dataclass, field

from verifier_svc.speculation.gap_times import StepGaps
from verifier_svc.speculation.lookup_yield import LookupYields
from verifier_svc.speculation.model_yield import ModelYield


@dataclass(frozen=True, slots=True)
class LookupRecord:
    """What a run leaves to the next. Only the engine thread uses it.

    Attributes:
        gaps: how late a step is launched that waits for look-ups.
        lookup_yields: what look-ups find of what rows promise.
        model_yield: what the model's trees yield where a look-up finds something.
    """

    gaps: StepGaps = field(default_factory=StepGaps)
    lookup_yields: LookupYields = field(default_factory=LookupYields)
    model_yield: ModelYield = field(default_factory=ModelYield)
