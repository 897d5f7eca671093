"""Draw one workload: throughput against the speed of one user, a line for each arm."""

from __future__ import annotations

from typing import Any

from foretoken.bench.picture import TEXT, Mark, Picture

COLOURS = {
    "plain": "#7b8794",
    "auto": "#2563eb",
    "auto-ngram": "#0ea5e9",
    "ngram": "#14b8a6",
    "fixed-1-1-2": "#d6bcfa",
    "fixed-3-1-4": "#b794f4",
    "fixed-5-1-6": "#805ad5",
    "fixed-5-8-32": "#553c9a",
    "fixed-ngram-5-1-6": "#805ad5",
    "vllm-plain": "#f6ad55",
    "vllm-eagle3-3": "#dd6b20",
    "vllm-eagle3-5": "#c53030",
}


def draw(content: dict[str, Any]) -> str:
    """Return the picture of a result's rows as SVG text."""
    rows = content["rows"]
    arms: dict[str, list[Mark]] = {}
    for arm in dict.fromkeys(row["arm"] for row in rows):
        found = sorted((row for row in rows if row["arm"] == arm), key=lambda row: (row["concurrency"], row["rate"]))
        arms[arm] = [Mark(row["user_tokens_per_s"], row["tokens_per_s"], row["point"]) for row in found]
    title = f"{content['workload']}: output tok/s of the server against tok/s of one user ({content['device']['gpu']})"
    colours = {arm: COLOURS.get(arm, TEXT) for arm in arms}
    return Picture(title, "tok/s of one user (1 / TPOT p50)", "output tok/s of the server", arms, colours).svg()
