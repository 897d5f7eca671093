"""What a verifier and its drafters take of a Ray cluster: one bundle of a placement group."""

from __future__ import annotations

from foretoken.commands.given import Given
from foretoken.common_settings import ComputeSettings

# Ranks of one verifier, and its drafters, share a machine.
STRATEGY = "STRICT_PACK"


def bundles(given: Given, *, has_gpus: bool) -> list[dict[str, float]]:
    """Return the bundles of one verifier. ``has_gpus``: whether the cluster has any."""
    device = given.settings(ComputeSettings).device
    # Ray only counts cores; it does not keep a process to them.
    bundle = {"CPU": float(given.values.get("threads") or 1)}
    if device == "cuda" or (device == "auto" and has_gpus):
        bundle["GPU"] = 1.0
    return [bundle]
