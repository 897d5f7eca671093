"""The gateway's metrics: what it counts itself, and the verifier's figures as of the last scrape.

Names are vLLM's under the prefix ``foretoken_``, so that its dashboards need one replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from foretoken.telemetry import Labels, MetricRegistry
from gateway.generation import Generation, Output
from gateway.messages import DrafterInfo, VerifierInfo

_LATENCY_BUCKETS_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKEN_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
# A token a few milliseconds is the goal: the lower end is fine-grained.
_TOKEN_BUCKETS_S = (
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0,
)  # fmt: skip

Samples = Iterable[tuple[float, Labels]]


class GatewayMetrics:
    """Counts requests as they pass and renders everything for a scrape."""

    def __init__(self, model_name: str, num_requests: Callable[[], int]) -> None:
        """``num_requests``: requests that are in the gateway now."""
        self._registry = MetricRegistry("gateway", {"model_name": model_name})
        # By address.
        self._infos: Mapping[str, VerifierInfo | None] = {}
        registry = self._registry
        self._rejections = registry.counter("admission_rejections", "Requests refused before they ran, by reason.")
        self._success = registry.counter("request_success", "Requests that finished, by the reason of each output.")
        self._failures = registry.counter("request_failure", "Requests that failed or were cancelled, by reason.")
        self._prompt_tokens = registry.counter("prompt_tokens", "Prompt tokens of finished and failed requests.")
        self._generation_tokens = registry.counter("generation_tokens", "Output tokens, trimmed at stop strings.")
        self._first_token = registry.histogram(
            "time_to_first_token_seconds", "Request received to first token.", _FIRST_TOKEN_BUCKETS_S
        )
        self._inter_token = registry.histogram(
            "inter_token_latency_seconds",
            "One observation a step and output: its time divided by its tokens.",
            _TOKEN_BUCKETS_S,
        )
        self._per_output_token = registry.histogram(
            "request_time_per_output_token_seconds",
            "One observation an output: first to last token, divided by tokens - 1.",
            _TOKEN_BUCKETS_S,
        )
        self._latency = registry.histogram(
            "e2e_request_latency_seconds", "Request received to its end.", _LATENCY_BUCKETS_S
        )
        self._queue = registry.histogram("request_queue_time_seconds", "Waiting at the verifier.", _LATENCY_BUCKETS_S)
        self._prefill = registry.histogram(
            "request_prefill_time_seconds", "First step to first token at the verifier.", _LATENCY_BUCKETS_S
        )
        registry.observed_gauge("gateway_num_requests", "Requests in this gateway now.", lambda: [(num_requests(), {})])
        registry.observed_gauge(
            "verifier_up",
            "Whether the verifier answered this scrape.",
            lambda: [(float(info is not None), {"verifier": address}) for address, info in self._infos.items()],
        )
        self._observe_verifier()

    def request_rejected(self, reason: str) -> None:
        """``reason``: the name of the gRPC status, in lower case."""
        self._rejections.add(1, {"reason": reason})

    def tokens_arrived(self, seconds: float, num_tokens: int) -> None:
        """New tokens of one output, ``seconds`` after the ones before."""
        self._inter_token.record(seconds / num_tokens)

    def request_ended(self, generation: Generation, seconds: float, failure: str | None) -> None:
        """``failure`` is None for a request that finished."""
        self._latency.record(seconds)
        self._prompt_tokens.add(generation.prompt_tokens)
        self._generation_tokens.add(generation.completion_tokens)
        if failure is not None:
            self._failures.add(1, {"reason": failure})
        for output in generation.outputs:
            self._output_ended(output, generation.started_at)

    def render(self, infos: Mapping[str, VerifierInfo | None]) -> bytes:
        """All metrics; ``infos``: each verifier's figures by its address, None for one that does not answer."""
        self._infos = infos
        return self._registry.render()

    def close(self) -> None:
        self._registry.close()

    def _output_ended(self, output: Output, started_at: float) -> None:
        if output.first_token_at:
            self._first_token.record(output.first_token_at - started_at)
        if len(output.token_ids) > 1:
            duration = output.last_token_at - output.first_token_at
            self._per_output_token.record(duration / (len(output.token_ids) - 1))
        if output.finished is not None and output.finish_reason is not None:
            self._success.add(1, {"finished_reason": output.finish_reason.value})
            self._queue.record(output.finished.queue_ms / 1e3)
            self._prefill.record(output.finished.prefill_ms / 1e3)

    def _observe_verifier(self) -> None:
        gauge, counter = self._registry.observed_gauge, self._registry.observed_counter
        gauge("num_requests_running", "Sequences in the running batch.", self._of(lambda i: i.num_running))
        gauge("num_requests_waiting", "Sequences that wait.", self._of(lambda i: i.num_waiting))
        gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", self._of(_kv_usage))
        gauge("kv_cache_free_blocks", "KV blocks that are free.", self._of(lambda i: i.num_free_blocks))
        counter("num_preemptions", "Sequences preempted.", self._of(lambda i: i.num_preemptions))
        counter("prefix_cache_queries", "Prompt tokens looked up.", self._of(lambda i: i.num_prefix_cache_queries))
        counter("prefix_cache_hits", "Prompt tokens found.", self._of(lambda i: i.num_prefix_cache_hits))
        counter("engine_steps", "Engine steps.", self._of(lambda i: i.num_steps))
        counter("plain_batch_steps", "Steps above the batch limit of speculation.", self._of(_plain_batch_steps))
        counter("fallback_steps", "Root-only rows that wanted drafts.", self._of(lambda i: i.num_fallback_steps))
        counter("step_time_us", "Microseconds in steps, by phase.", self._step_times)
        counter("spec_decode_num_drafts", "Drafts verified.", self._per_drafter(lambda d: d.num_drafts))
        counter("spec_decode_num_draft_tokens", "Tokens drafted.", self._per_drafter(lambda d: d.num_draft_tokens))
        counter("spec_decode_num_accepted_tokens", "Accepted ones.", self._per_drafter(lambda d: d.num_accepted_tokens))
        counter("spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by depth.", self._per_position)
        counter(
            "spec_decode_num_rejected_drafts",
            "Drafts that were late, stale or malformed.",
            self._per_drafter(lambda d: d.num_rejected_drafts),
        )
        counter("drafter_attaches", "Attachments of the drafter.", self._per_drafter(lambda d: d.num_attaches))
        gauge("drafter_info", "1 for each configured drafter, with its transport and state.", self._drafter_info)

    def _of(self, value: Callable[[VerifierInfo], float]) -> Callable[[], Samples]:
        return lambda: [(value(info), {"verifier": address}) for address, info in self._known()]

    def _per_drafter(self, value: Callable[[DrafterInfo], float]) -> Callable[[], Samples]:
        return lambda: [(value(drafter), labels) for drafter, labels in self._drafters()]

    def _known(self) -> list[tuple[str, VerifierInfo]]:
        return [(address, info) for address, info in self._infos.items() if info is not None]

    def _drafters(self) -> list[tuple[DrafterInfo, dict[str, str]]]:
        return [
            (drafter, {"verifier": address, "drafter": drafter.name})
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

    def _step_times(self) -> Samples:
        return [
            (microseconds, {"verifier": address, "phase": phase})
            for address, info in self._known()
            for phase, microseconds in info.step_time_us.items()
        ]


def _kv_usage(info: VerifierInfo) -> float:
    return 1.0 - info.num_free_blocks / info.num_blocks if info.num_blocks else 0.0


def _plain_batch_steps(info: VerifierInfo) -> float:
    return info.num_plain_batch_steps
