"""Read a server's counters from GET /metrics, and what happened between two readings."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from foretoken.bench.client import Address, get
from foretoken.bench.completion import StreamError

# Labels that split a counter. Sums are taken over all others.
KEPT_LABELS = ("phase", "reason", "drafter", "position")

Counters = dict[str, float]


def counters(address: Address) -> Counters:
    """Return all counters of ``address``, foretoken's or vLLM's, by name and kept labels.

    Raises:
        StreamError: the server did not answer, or not with metrics.
    """
    status, body = get(address, "/metrics", 30.0)
    if status != 200:
        raise StreamError(f"{address}/metrics: status {status}: {body[:200]!r}")
    return parse(body.decode())


def parse(text: str) -> Counters:
    """Return the counters of one exposition, without the server's prefix and without ``_total``.

    foretoken shows some of its counters under vLLM's names, too: those are left out.
    """
    found: Counters = {}
    families = list(text_string_to_metric_families(text))
    is_ours = any(family.name.startswith("foretoken_") for family in families)
    for family in families:
        if family.type != "counter" or (is_ours and family.name.startswith("vllm:")):
            continue
        for sample in family.samples:
            if not sample.name.endswith("_total"):
                continue
            name = sample.name.removesuffix("_total").removeprefix("foretoken_").removeprefix("vllm:")
            labels = ",".join(f"{label}={sample.labels[label]}" for label in KEPT_LABELS if label in sample.labels)
            key = f"{name}{{{labels}}}" if labels else name
            found[key] = found.get(key, 0.0) + sample.value
    return found


def increase(before: Mapping[str, float], after: Mapping[str, float]) -> Counters:
    """Return how far each counter rose; those that did not are left out."""
    rises = {key: value - before.get(key, 0.0) for key, value in after.items()}
    return {key: rise for key, rise in rises.items() if rise > 0}


def total(found: Mapping[str, float], name: str) -> float:
    """Return the sum of a counter over its labels."""
    return sum(value for key, value in found.items() if key.partition("{")[0] == name)


def by_label(found: Mapping[str, float], name: str, label: str) -> Counters:
    """Return a counter's sums by the values of one label; samples without it are left out."""
    sums: Counters = {}
    for key, value in found.items():
        of_key, _, labels = key.partition("{")
        pairs = dict(pair.partition("=")[::2] for pair in labels.rstrip("}").split(","))
        if of_key == name and label in pairs:
            sums[pairs[label]] = sums.get(pairs[label], 0.0) + value
    return sums


def tokens_per_step(found: Mapping[str, float]) -> float:
    """Return tokens of a row's decode step, from the counters' rises.

    A row that verified a tree gives one token and the accepted ones, a row without a draft one.
    vLLM does not count rows without a draft.
    """
    accepted = total(found, "spec_decode_num_accepted_tokens")
    if not accepted:
        return 1.0
    rows = total(found, "spec_decode_num_drafts") + total(found, "fallback_steps")
    return (rows + accepted) / rows
