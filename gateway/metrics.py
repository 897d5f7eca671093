"""Count requests, and render the gateway's and the verifiers' metrics for a scrape.

Names are vLLM's with the prefix ``foretoken_``; docs/telemetry.md lists labels and formulas.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from foretoken.telemetry import PREFIX, Family, MetricRegistry, render, with_vllm_names
from gateway.access.key_metrics import KeyMetrics
from gateway.generation import Generation, Output
from gateway.messages import VerifierInfo
from gateway.verifier_metrics import VerifierMetrics

_READ_BY_VLLM_BENCH = PREFIX + "spec_decode_"
# The buckets of gen_ai.server.request.duration in OpenTelemetry's conventions.
_LATENCY_BUCKETS_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKEN_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
# The goal is a token every few milliseconds, so the lower end is fine-grained.
_TOKEN_BUCKETS_S = (
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0,
)  # fmt: skip
_LENGTH_BUCKETS = tuple(digit * 10.0**power for power in range(6) for digit in (1, 2, 5))


class GatewayMetrics:
    """Counts requests and renders everything for a scrape."""

    def __init__(
        self,
        model_name: str,
        num_requests: Callable[[], int],
        num_waiting: Callable[[], int],
        *,
        vllm_names: bool = False,
    ) -> None:
        """``num_requests``: requests in the gateway; ``num_waiting``: sequences without a verifier.

        ``vllm_names``: show all of vLLM's metrics under vLLM's names, too; without it only those that
        `vllm bench serve` reads.
        """
        self._vllm_names = vllm_names
        self._verifier = VerifierMetrics(model_name)
        # Fetches the sum over all gateway processes, if there are several.
        self.gather: Callable[[], Awaitable[list[Family]]] | None = None
        self._registry = registry = MetricRegistry("gateway", {"model_name": model_name})
        self._rejections = registry.counter("admission_rejections", "Requests refused before they ran, by reason.")
        self._success = registry.counter("request_success", "Outputs that finished, by the reason of each.", vllm=True)
        self._failures = registry.counter("request_failure", "Requests that failed or were cancelled, by reason.")
        self._prompt_tokens = registry.counter(
            "prompt_tokens", "Prompt tokens of finished and failed requests.", vllm=True
        )
        self._generation_tokens = registry.counter(
            "generation_tokens", "Output tokens, trimmed at stop strings.", vllm=True
        )
        self._keys = KeyMetrics(registry)
        self._declare_histograms()
        registry.observed_gauge("gateway_num_requests", "Requests in the gateway now.", lambda: [(num_requests(), {})])
        registry.observed_gauge(
            "gateway_num_sequences_waiting", "Sequences that wait for a verifier.", lambda: [(num_waiting(), {})]
        )
        self._resumes = registry.counter("sequences_resumed", "Outputs resumed after their verifier was lost.")

    def request_rejected(self, reason: str, key: str = "") -> None:
        """Count a refused request; ``reason`` is the name of its gRPC status, in lower case.

        ``key``: name of the client's key; empty for none.
        """
        self._rejections.add(1, {"reason": reason})
        self._keys.request_rejected(key, reason)

    def tokens_arrived(self, seconds: float, num_tokens: int) -> None:
        """Record new tokens of one output, ``seconds`` after its last ones."""
        self._inter_token.record(seconds / num_tokens)

    def request_ended(self, generation: Generation, seconds: float, failure: str | None, key: str = "") -> None:
        """Count a request that ran; ``failure`` is None if it finished.

        ``key``: name of the client's key; empty for none.
        """
        self._keys.request_ended(key, failure or "ok", generation.prompt_tokens, generation.completion_tokens)
        self._latency.record(seconds)
        self._resumes.add(generation.num_resumes)
        self._prompt_tokens.add(generation.prompt_tokens)
        self._generation_tokens.add(generation.completion_tokens)
        if failure is not None:
            self._failures.add(1, {"reason": failure})
        for output in generation.outputs:
            self._output_ended(output, generation.started_at)

    def own_families(self) -> list[Family]:
        """Return the counts of this process."""
        return self._registry.families()

    async def render(self, infos: Mapping[str, VerifierInfo | None]) -> bytes:
        """Return all metrics in Prometheus' text format.

        ``infos``: each verifier's figures by address; None for a verifier that does not answer.
        Raises UnavailableError if the other processes' counts are not available.
        """
        families = self.own_families() if self.gather is None else await self.gather()
        families += self._verifier.families(infos)
        names = self._registry.in_vllm | self._verifier.in_vllm
        if not self._vllm_names:
            names = {name for name in names if name.startswith(_READ_BY_VLLM_BENCH)}
        return render(with_vllm_names(families, names))

    def close(self) -> None:
        self._registry.close()
        self._verifier.close()

    def _declare_histograms(self) -> None:
        histogram = self._registry.histogram
        self._first_token = histogram(
            "time_to_first_token_seconds", "Request received to first token.", _FIRST_TOKEN_BUCKETS_S, vllm=True
        )
        self._inter_token = histogram(
            "inter_token_latency_seconds",
            "One observation per step and output: its time divided by its tokens.",
            _TOKEN_BUCKETS_S,
            vllm=True,
        )
        self._per_output_token = histogram(
            "request_time_per_output_token_seconds",
            "One observation per output: first to last token, divided by tokens - 1.",
            _TOKEN_BUCKETS_S,
            vllm=True,
        )
        self._latency = histogram(
            "e2e_request_latency_seconds", "Request received to its end.", _LATENCY_BUCKETS_S, vllm=True
        )
        self._queue = histogram(
            "request_queue_time_seconds", "Time in the verifier's queue.", _LATENCY_BUCKETS_S, vllm=True
        )
        self._prefill = histogram(
            "request_prefill_time_seconds", "First step to first token, at the verifier.", _LATENCY_BUCKETS_S, vllm=True
        )
        self._decode = histogram(
            "request_decode_time_seconds", "First token to the end, at the verifier.", _LATENCY_BUCKETS_S, vllm=True
        )
        self._inference = histogram(
            "request_inference_time_seconds", "First step to the end, at the verifier.", _LATENCY_BUCKETS_S, vllm=True
        )
        self._prompt_length = histogram(
            "request_prompt_tokens", "Prompt tokens of an output that finished.", _LENGTH_BUCKETS, vllm=True
        )
        self._output_length = histogram(
            "request_generation_tokens", "Tokens of an output that finished.", _LENGTH_BUCKETS, vllm=True
        )

    def _output_ended(self, output: Output, started_at: float) -> None:
        if output.times.first_at:
            self._first_token.record(output.times.first_at - started_at)
        if (gap_s := output.times.mean_gap_s) is not None:
            self._per_output_token.record(gap_s)
        if output.finished is not None and output.finish_reason is not None:
            finished = output.finished
            self._success.add(1, {"finished_reason": output.finish_reason.value})
            self._queue.record(finished.queue_ms / 1e3)
            self._prefill.record(finished.prefill_ms / 1e3)
            self._decode.record(finished.decode_ms / 1e3)
            self._inference.record((finished.prefill_ms + finished.decode_ms) / 1e3)
            self._prompt_length.record(len(output.prompt.ids))
            self._output_length.record(len(output.token_ids))
