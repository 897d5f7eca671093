"""Turn the verifiers' figures into metrics.

Whichever gateway process is scraped shows them once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter

from foretoken.telemetry import DRAFTER_LABEL, VERIFIER_LABEL, Family, Labels, MetricRegistry
from gateway.messages import DrafterInfo, VerifierInfo

Samples = Iterable[tuple[float, Labels]]

# A drafter that keeps inventing names must not fill the memory.
MAX_DRAFTER_GAUGES = 512

# Name, help text, field of VerifierInfo or DrafterInfo, and whether vLLM also has the metric.
_GAUGES = (
    ("num_requests_running", "Sequences in the running batch.", "num_running", True),
    ("num_requests_waiting", "Sequences in the queue.", "num_waiting", True),
    ("kv_cache_free_blocks", "Free KV blocks.", "num_free_blocks", False),
)
_COUNTERS = (
    ("num_preemptions", "Sequences preempted.", "num_preemptions", True),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "num_prefix_cache_queries", True),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", "num_prefix_cache_hits", True),
    ("engine_steps", "Engine steps.", "num_steps", False),
    ("engine_prompt_tokens", "Prompt tokens of sequences that started.", "num_prompt_tokens", False),
    ("engine_generated_tokens", "Tokens emitted, before stop strings trim them.", "num_generated_tokens", False),
    ("plain_batch_steps", "Steps whose batch was too large to speculate.", "num_plain_batch_steps", False),
    ("fallback_steps", "Root-only batch rows of requests that wanted drafts.", "num_fallback_steps", False),
)
_DRAFTER_COUNTERS = (
    ("spec_decode_num_drafts", "Drafts verified.", "num_drafts", True),
    ("spec_decode_num_draft_tokens", "Tokens drafted.", "num_draft_tokens", True),
    ("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", "num_accepted_tokens", True),
    ("spec_decode_num_rejected_drafts", "Late, stale or malformed drafts.", "num_rejected_drafts", False),
    ("drafter_requests_awaited", "Draft requests that a step waited for.", "num_awaited", False),
    ("drafter_wait_time_us", "Microseconds of waits for drafts that other work did not hide.", "wait_us", False),
    ("drafter_attaches", "Times the drafter was attached.", "num_attaches", False),
)


class VerifierMetrics:
    """Declares a metric for each figure of GetInfo."""

    def __init__(self, model_name: str) -> None:
        self._registry = MetricRegistry("verifier", {"model_name": model_name})
        self._infos: Mapping[str, VerifierInfo | None] = {}
        # Metrics named by drafters.
        self._num_gauges = 0
        self._registry.observed_gauge(
            "verifier_up",
            "Whether the verifier answered this scrape.",
            lambda: [(float(info is not None), {VERIFIER_LABEL: name}) for name, info in self._infos.items()],
        )
        self._declare_verifier_metrics()
        self._declare_drafter_metrics()

    @property
    def in_vllm(self) -> set[str]:
        """Names that vLLM also has."""
        return self._registry.in_vllm

    def families(self, infos: Mapping[str, VerifierInfo | None]) -> list[Family]:
        """Return all metrics; ``infos`` has each verifier's figures, None if it does not answer."""
        self._infos = infos
        self._declare_gauges_of_drafters()
        return self._registry.families()

    def close(self) -> None:
        self._registry.close()

    def _declare_verifier_metrics(self) -> None:
        gauge, counter = self._registry.observed_gauge, self._registry.observed_counter
        for name, text, field, vllm in _GAUGES:
            gauge(name, text, self._of(attrgetter(field)), vllm=vllm)
        for name, text, field, vllm in _COUNTERS:
            counter(name, text, self._of(attrgetter(field)), vllm=vllm)
        gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", self._of(_kv_usage), vllm=True)
        gauge("cache_config_info", "1 for each verifier, with the size of its KV cache.", self._cache_config, vllm=True)
        counter("step_time_us", "Microseconds in steps, by phase.", self._by("phase", lambda i: i.step_time_us))
        counter(
            "overlap_blocked_steps",
            "Steps on a GPU after which the next one could not overlap with the host's work, by reason.",
            self._by("reason", lambda i: i.overlap_blocked_steps),
        )
        counter(
            "fallback_reasons",
            "Root-only batch rows of requests that wanted drafts, by reason.",
            self._by("reason", lambda i: i.fallback_reasons),
        )

    def _declare_drafter_metrics(self) -> None:
        gauge, counter = self._registry.observed_gauge, self._registry.observed_counter
        for name, text, field, vllm in _DRAFTER_COUNTERS:
            counter(name, text, self._per_drafter(attrgetter(field)), vllm=vllm)
        text = "Drafted tokens that were accepted, by depth from 0."
        counter("spec_decode_num_accepted_tokens_per_pos", text, self._per_position, vllm=True)
        text = "1 while hardly any of the drafter's last drafts had an accepted token, or half as many as usual."
        gauge("drafter_low_acceptance", text, self._per_drafter(attrgetter("has_low_acceptance")))
        gauge("drafter_info", "1 for each configured drafter, with its transport and state.", self._drafter_info)

    def _declare_gauges_of_drafters(self) -> None:
        """Declare a metric for each new gauge that a drafter reports, unless its name is in use."""
        for name in sorted({name for drafter, _ in self._drafters() for name in drafter.gauges}):
            metric = f"drafter_{name}"
            if metric not in self._registry.names and self._num_gauges < MAX_DRAFTER_GAUGES:
                self._num_gauges += 1
                self._registry.observed_gauge(metric, "The drafter reports it: docs/metrics.md.", self._gauge(name))

    def _gauge(self, name: str) -> Callable[[], Samples]:
        return lambda: [(d.gauges[name], labels) for d, labels in self._drafters() if name in d.gauges]

    def _of(self, value: Callable[[VerifierInfo], float]) -> Callable[[], Samples]:
        return lambda: [(value(info), {VERIFIER_LABEL: address}) for address, info in self._known()]

    def _per_drafter(self, value: Callable[[DrafterInfo], float]) -> Callable[[], Samples]:
        return lambda: [(value(drafter), labels) for drafter, labels in self._drafters()]

    def _known(self) -> list[tuple[str, VerifierInfo]]:
        return [(address, info) for address, info in self._infos.items() if info is not None]

    def _drafters(self) -> list[tuple[DrafterInfo, dict[str, str]]]:
        return [
            (drafter, {VERIFIER_LABEL: address, DRAFTER_LABEL: drafter.name})
            for address, info in self._known()
            for drafter in info.drafters
        ]

    def _per_position(self) -> Samples:
        return [
            (count, {**labels, "position": str(position)})
            for drafter, labels in self._drafters()
            for position, count in enumerate(drafter.accepted_per_position)
        ]

    def _drafter_info(self) -> Samples:
        return [
            (1, {**labels, "algorithm": d.algorithm, "transport": d.transport, "state": d.state})
            for d, labels in self._drafters()
        ]

    def _cache_config(self) -> Samples:
        return [
            (1, {VERIFIER_LABEL: address, "block_size": str(info.block_size), "num_gpu_blocks": str(info.num_blocks)})
            for address, info in self._known()
        ]

    def _by(self, label: str, values: Callable[[VerifierInfo], Mapping[str, float]]) -> Callable[[], Samples]:
        return lambda: [
            (value, {VERIFIER_LABEL: address, label: key})
            for address, info in self._known()
            for key, value in values(info).items()
        ]


def _kv_usage(info: VerifierInfo) -> float:
    return 1.0 - info.num_free_blocks / info.num_blocks if info.num_blocks else 0.0
