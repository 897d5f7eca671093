"""Count requests, and render the gateway's and the verifiers' metrics for a scrape.

Names are vLLM's with the prefix ``foretoken_``; docs/metrics.md lists labels and formulas.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from foretoken.telemetry import PREFIX, Family, MetricRegistry, render, with_vllm_names
from gateway.access.key_metrics import KeyMetrics
from gateway.generation import Generation
from gateway.messages import VerifierInfo
from gateway.request_histograms import RequestHistograms
from gateway.verifier_metrics import VerifierMetrics

# Shown under vLLM's names without a flag: what `vllm bench serve` reads, and what llm-d's endpoint
# picker reads of a pod.
_READ_BY_VLLM_BENCH = PREFIX + "spec_decode_"
_READ_BY_ENDPOINT_PICKERS = frozenset(
    PREFIX + name
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "cache_config_info")
)


class GatewayMetrics:
    """Counts requests and renders everything for a scrape."""

    def __init__(
        self,
        model_name: str,
        num_requests: Callable[[], int],
        num_waiting: Callable[[], int],
        num_routed: Callable[[], Mapping[str, int]],
        *,
        vllm_names: bool = False,
    ) -> None:
        """
        Args:
            num_requests: requests in the gateway.
            num_waiting: sequences without a verifier.
            num_routed: decisions about a verifier by their reason.
            vllm_names: show all of vLLM's metrics under vLLM's names, too; without it only those
                that `vllm bench serve` and endpoint pickers read.
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
        self._histograms = RequestHistograms(registry)
        registry.observed_gauge("gateway_num_requests", "Requests in the gateway now.", lambda: [(num_requests(), {})])
        registry.observed_gauge(
            "gateway_num_sequences_waiting", "Sequences that wait for a verifier.", lambda: [(num_waiting(), {})]
        )
        registry.observed_counter(
            "gateway_routing_decisions",
            "Requests and resumed sequences, by what chose their verifier.",
            lambda: [(count, {"reason": str(reason)}) for reason, count in num_routed().items()],
        )
        self._resumes = registry.counter("sequences_resumed", "Outputs resumed after their verifier was lost.")

    def request_rejected(self, reason: str, key: str = "") -> None:
        """Count a refused request; ``reason`` is the name of its gRPC status, in lower case.

        ``key``: name of the client's key; empty for none.
        """
        self._rejections.add(1, {"reason": reason})
        self._keys.request_rejected(key, reason)

    def first_token_arrived(self, seconds: float) -> None:
        """Record the first token of one output, ``seconds`` after its request."""
        self._histograms.first_token_arrived(seconds)

    def tokens_arrived(self, seconds: float, num_tokens: int) -> None:
        """Record new tokens of one output, ``seconds`` after its last ones."""
        self._histograms.tokens_arrived(seconds, num_tokens)

    def request_ended(self, generation: Generation, seconds: float, failure: str | None, key: str = "") -> None:
        """Count a request that ran; ``failure`` is None if it finished.

        ``key``: name of the client's key; empty for none.
        """
        self._keys.request_ended(key, failure or "ok", generation.prompt_tokens, generation.completion_tokens)
        self._histograms.request_ended(seconds)
        self._resumes.add(generation.num_resumes)
        self._prompt_tokens.add(generation.prompt_tokens)
        self._generation_tokens.add(generation.completion_tokens)
        if failure is not None:
            self._failures.add(1, {"reason": failure})
        for output in generation.outputs:
            if output.finished is not None and output.finish_reason is not None:
                self._success.add(1, {"finished_reason": output.finish_reason.value})
            self._histograms.output_ended(output)

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
            names = {
                name for name in names if name.startswith(_READ_BY_VLLM_BENCH) or name in _READ_BY_ENDPOINT_PICKERS
            }
        return render(with_vllm_names(families, names))

    def close(self) -> None:
        self._registry.close()
        self._verifier.close()
