"""Count what each client's key uses."""

from __future__ import annotations

from foretoken.telemetry import MetricRegistry


class KeyMetrics:
    """The counters of keys, by the key's name. Requests without a key count nowhere."""

    def __init__(self, registry: MetricRegistry) -> None:
        self._requests = registry.counter("key_requests", "Requests of a client's key that ran, by outcome.")
        self._rejections = registry.counter(
            "key_rejections", "Requests of a client's key that were refused before they ran, by reason."
        )
        self._prompt_tokens = registry.counter("key_prompt_tokens", "Prompt tokens of a client's key.")
        self._generation_tokens = registry.counter("key_generation_tokens", "Output tokens of a client's key.")

    def request_rejected(self, key: str, reason: str) -> None:
        """Count a refused request."""
        if key:
            self._rejections.add(1, {"key": key, "reason": reason})

    def request_ended(self, key: str, outcome: str, prompt_tokens: int, completion_tokens: int) -> None:
        """Count a request that ran."""
        if key:
            self._requests.add(1, {"key": key, "outcome": outcome})
            self._prompt_tokens.add(prompt_tokens, {"key": key})
            self._generation_tokens.add(completion_tokens, {"key": key})
