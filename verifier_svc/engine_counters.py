"""What the engine did so far. Its thread writes, any may read."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class EngineCounters:
    """What the engine did since it started. Times are seconds."""

    num_steps: int = 0
    # Of them those that ran ahead of the engine's thread.
    num_resident_steps: int = 0
    num_generated_tokens: int = 0
    num_prompt_tokens: int = 0
    num_fallback_steps: int = 0
    phase_seconds: dict[str, float] = field(default_factory=dict)

    def add_time(self, phase: str, seconds: float) -> None:
        self.phase_seconds[phase] = self.phase_seconds.get(phase, 0.0) + seconds
