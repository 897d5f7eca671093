"""Distributions of requests' times and lengths."""

from __future__ import annotations

from foretoken.telemetry import MetricRegistry
from gateway.output import Output

# The buckets of gen_ai.server.request.duration in OpenTelemetry's conventions.
_LATENCY_BUCKETS_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
# An idle server starts a request within a few milliseconds.
_QUEUE_BUCKETS_S = (0.001, 0.003, *_LATENCY_BUCKETS_S)
_FIRST_TOKEN_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
# The goal is a token every few milliseconds, so the lower end is fine-grained.
_TOKEN_BUCKETS_S = (
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0,
)  # fmt: skip
_LENGTH_BUCKETS = tuple(digit * 10.0**power for power in range(6) for digit in (1, 2, 5))


class RequestHistograms:
    """The histograms of one gateway process. Times are in seconds."""

    def __init__(self, registry: MetricRegistry) -> None:
        histogram = registry.histogram
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
            "request_queue_time_seconds", "Time in the verifier's queue.", _QUEUE_BUCKETS_S, vllm=True
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

    def first_token_arrived(self, seconds: float) -> None:
        """Record the first token of one output, ``seconds`` after its request."""
        self._first_token.record(seconds)

    def tokens_arrived(self, seconds: float, num_tokens: int) -> None:
        """Record new tokens of one output, ``seconds`` after its last ones."""
        self._inter_token.record(seconds / num_tokens)

    def request_ended(self, seconds: float) -> None:
        """Record how long a request took."""
        self._latency.record(seconds)

    def output_ended(self, output: Output) -> None:
        """Record one output; its times at the verifier only if it finished."""
        if (gap_s := output.times.mean_gap_s) is not None:
            self._per_output_token.record(gap_s)
        if (finished := output.finished) is not None:
            self._queue.record(finished.queue_ms / 1e3)
            self._prefill.record(finished.prefill_ms / 1e3)
            self._decode.record(finished.decode_ms / 1e3)
            self._inference.record((finished.prefill_ms + finished.decode_ms) / 1e3)
            self._prompt_length.record(len(output.prompt.ids))
            self._output_length.record(len(output.token_ids))
