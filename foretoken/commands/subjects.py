"""Say under which heading help texts list a flag."""

from __future__ import annotations

# In the order of help texts. Flags without a row, such as a new algorithm's own, stand under
# SPECULATION if their name says so, else under OTHER.
SPECULATION = "Speculation"
OTHER = "Other options"
SUBJECTS: dict[str, tuple[str, ...]] = {
    "Model": (
        *("--served-model-name", "--revision", "--device", "--dtype", "--numerics", "--context-length"),
        *("--chat-template", "--generation-config", "--tool-call-parser", "--reasoning-parser"),
    ),
    "Network": ("--address", "--host", "--port", "--grpc-port", "--gateway-workers", "--disable-playground"),
    "Verifiers": (
        *("--verifier", "--discovery-interval", "--routing-load-bound"),
        *("--executor", "--num-verifiers", "--ray-address"),
    ),
    "Access": (
        *("--api-key", "--api-key-file", "--admin-api-key-file", "--insecure"),
        *("--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certs", "--allowed-hosts", "--allowed-origins"),
    ),
    "Requests": (
        *("--strict-fields", "--request-timeout", "--client-timeout", "--resume-attempts", "--verifier-wait"),
        *("--max-queued-requests", "--max-concurrent-requests", "--max-body-bytes-in-flight", "--drain-timeout"),
    ),
    SPECULATION: (
        *(
            "--name",
            "--speculative-algorithm",
            "--algorithm",
            "--speculative-draft-model-path",
            "--speculative-token-map",
        ),
        *("--target", "--drafter", "--drafter-placement", "--mps", "--draft-timeout-ms", "--disable-coupled-noise"),
        *("--speculative-num-draft-tokens", "--speculative-num-steps", "--speculative-eagle-topk"),
        *("--speculative-max-batch-size", "--speculative-controller-log", "--simulate-accept-length"),
    ),
    "Batches and memory": (
        *("--max-running-requests", "--chunked-prefill-size", "--mem-fraction-static", "--max-total-tokens"),
        *("--block-size", "--disable-radix-cache", "--max-step-ms"),
    ),
    "Kernels": ("--threads", "--attention-backend", "--disable-cuda-graph", "--disable-overlap-schedule"),
    "Links between services": (
        *("--link-token-file", "--link-certfile", "--link-keyfile", "--link-ca", "--insecure-links"),
    ),
    "Servers to load": (
        *("--url", "--model", "--endpoint", "--read-timeout"),
        *("--compare-url", "--compare-api-key", "--compare-model", "--compare-extra-request-body"),
    ),
    "Load": (
        *(
            "--max-concurrency",
            "--request-rate",
            "--num-prompts",
            "--duration",
            "--num-rounds",
            "--warmup-requests",
            "--clients",
        ),
    ),
    "Prompts and request fields": (
        *("--dataset-name", "--dataset-path", "--input-len", "--output-len", "--range-ratio"),
        *("--prefix-len", "--num-prefixes", "--tokenizer", "--seed"),
        *("--temperature", "--disable-ignore-eos", "--salt-requests", "--extra-request-body"),
    ),
    "What is tried, and for how long": (
        *("--shapes", "--try-drafters", "--weights", "--budget", "--requests-per-round"),
    ),
    "Results": ("--write-config", "--goodput", "--output-file", "--picture", "--allow-failures"),
    "Logs and metrics": (
        *("--log-level", "--otlp-traces-endpoint", "--vllm-metric-names", "--speculative-metrics"),
        *("--kv-events", "--kv-events-replay", "--kv-events-topic"),
    ),
    OTHER: ("--config", "--dry-run", "--json", "--help"),
}
_PLACES = {flag: (subject, place) for subject, flags in SUBJECTS.items() for place, flag in enumerate(flags)}


def place_of(flag: str) -> tuple[str, int]:
    """Return a flag's heading, and its place below it; flags without a row come last."""
    if (place := _PLACES.get(flag)) is not None:
        return place
    subject = SPECULATION if flag.startswith("--speculative-") else OTHER
    return subject, len(SUBJECTS[subject])
