"""Decide how many verifiers Ray Serve runs.

Ray's controller runs this module: it imports nothing of foretoken.
"""

from __future__ import annotations

from typing import Any

# What a verifier reports: its sequences that run or wait.
SEQUENCES = "sequences"


def by_demand(context: Any) -> tuple[float, dict[str, Any]]:
    """Return how many verifiers the load needs.

    Each should have ``target_ongoing_requests`` sequences, running or waiting.

    Ray rounds up and applies the bounds and delays of its ``autoscaling_config``. If the target is
    ``--max-running-requests``, another verifier starts when requests wait.

    Args:
        context: ``ray.serve.config.AutoscalingContext``.
    """
    sequences = (context.aggregated_metrics or {}).get(SEQUENCES, {})
    return sum(sequences.values()) / context.config.get_target_ongoing_requests(), {}
