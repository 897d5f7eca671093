"""The command line's flags, each declared once with its help text.

A flag that was not given is None: the defaults are those of the services' settings, which `show_default` repeats.
It imports no settings, so that ``foretoken --help`` stays fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
DEFAULT_GRPC_PORT = 50051
DEFAULT_URL = f"http://{DEFAULT_HOST}:{DEFAULT_PORT}"
# Flags of vLLM whose likeness here is none of those that look like them.
VLLM_NAMES = {
    "--max-model-len": "--context-length",
    "--gpu-memory-utilization": "--mem-fraction-static",
    "--max-num-seqs": "--max-running-requests",
    "--max-num-batched-tokens": "--chunked-prefill-size",
    "--no-enable-prefix-caching": "--disable-radix-cache",
    "--enforce-eager": "--disable-cuda-graph",
}


def _algorithm(*names: str, **more: Any) -> Any:
    """An option that takes one of ``names`` in any case, and says them in capitals where it is none: typer's own
    choices that take any case are told in lower case."""

    def check(value: str | None) -> str | None:
        if value is not None and value.upper() not in names:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(map(repr, names))}.")
        return value and value.upper()

    return typer.Option(metavar=f"<{'|'.join(names)}>", callback=check, **more)


Model = Annotated[str, typer.Argument(metavar="MODEL", help="Folder of the checkpoint, or its id on the hub.")]
Revision = Annotated[
    str | None,
    typer.Option(help="Branch, tag or commit on the hub.", show_default="main"),
]
ServedModelName = Annotated[
    str | None,
    typer.Option(help="Name in requests and answers.", show_default="the folder's name, or the hub id"),
]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"],
    typer.Option(help="Log lines from this level up go to stderr."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the memory plan and start nothing.")]

# The rim of the server.
Host = Annotated[str | None, typer.Option(help="Address to listen on.", show_default=DEFAULT_HOST)]
Port = Annotated[int | None, typer.Option(help="Port of the OpenAI-compatible REST API.", show_default="8000")]
GrpcPort = Annotated[int | None, typer.Option(help="Port of the public gRPC API.", show_default="50051")]
ChatTemplate = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Jinja file that replaces the tokenizer's chat template.",
        show_default="the tokenizer's",
    ),
]
RequestTimeout = Annotated[
    float | None,
    typer.Option("--request-timeout", help="Seconds that a request may take.", show_default="600"),
]
ResumeAttempts = Annotated[
    int | None,
    typer.Option(
        help="Times that a stream may lose its verifier and go on at another or its successor.", show_default="3"
    ),
]
VerifierWait = Annotated[
    float | None,
    typer.Option(
        "--verifier-wait", help="Seconds that a new request waits while no verifier is up; then 503.", show_default="30"
    ),
]
SpeculativeMetrics = Annotated[
    Literal["none", "summary", "detailed"] | None,
    typer.Option(help="Figures of speculation in responses.", show_default="summary"),
]
MaxConcurrentRequests = Annotated[
    int | None,
    typer.Option(help="Requests of one gateway process that run or wait; one more gets 429.", show_default="512"),
]
ClientTimeout = Annotated[
    float | None,
    typer.Option(
        "--client-timeout",
        help="Seconds that a client may read nothing of what waits for it; then it is cut.",
        show_default="90",
    ),
]
DrainTimeout = Annotated[
    float | None,
    typer.Option("--drain-timeout", help="Seconds that running streams may go on after SIGTERM.", show_default="20"),
]
GatewayWorkers = Annotated[
    int | None,
    typer.Option(help="Gateway processes that share the ports.", show_default="1"),
]
AdminApiKeyFile = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        envvar="FORETOKEN_ADMIN_API_KEY_FILE",
        help="Key of the operator's endpoints, /v1/corpora and /v1/drafters.",
        show_default="none: no such endpoints",
    ),
]
WorkerSocket = Annotated[str | None, typer.Option(hidden=True)]
LivenessSocket = Annotated[str | None, typer.Option(hidden=True)]
VllmMetricNames = Annotated[
    bool,
    typer.Option("--vllm-metric-names", help="Metrics that vLLM has too appear under its names as well."),
]
OtlpTracesEndpoint = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        envvar="OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
        help="Send spans to this OpenTelemetry collector: http://host:4317 (OTLP over gRPC).",
        show_default="no spans",
    ),
]

# The model and its engine.
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16"] | None,
    typer.Option(help="Type of the weights; auto is float32 on a CPU, bfloat16 on a GPU.", show_default="auto"),
]
Device = Annotated[
    Literal["auto", "cpu", "cuda"] | None,
    typer.Option(help="Where models run; auto: on an NVIDIA GPU if there is one.", show_default="auto"),
]
Numerics = Annotated[
    Literal["auto", "strict", "fast"] | None,
    typer.Option(
        help="strict: the text never depends on what else runs, drafts included; fast: on a GPU near-ties may turn. "
        "auto is strict on a CPU, fast on a GPU.",
        show_default="auto",
    ),
]
AttentionBackend = Annotated[
    Literal["auto", "triton", "flashinfer"] | None,
    typer.Option(
        "--attention-backend",
        help="The target's attention on a GPU; flashinfer plans every step on the host. auto: FlashInfer for prompts "
        "where it is installed and --chunked-prefill-size is 2048 or more, else Triton.",
        show_default="auto",
    ),
]
DisableOverlapSchedule = Annotated[
    bool,
    typer.Option(
        "--disable-overlap-schedule",
        help="On a GPU, launch no step before the host has read the one before.",
    ),
]
DisableCudaGraph = Annotated[
    bool,
    typer.Option("--disable-cuda-graph", help="On a GPU, launch every kernel by itself."),
]
MemFractionStatic = Annotated[
    float | None,
    typer.Option(
        help="Share of the GPU's free memory that weights, cache and buffers may take; drafters need some of the rest.",
        show_default="0.8",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(help="Threads of the forward pass; 0: one per core but one.", show_default="0"),
]
ContextLength = Annotated[
    int | None,
    typer.Option(help="Tokens of context; 0: what the checkpoint says.", show_default="0"),
]
BlockSize = Annotated[
    int | None,
    typer.Option(help="Tokens of one KV block.", show_default="16"),
]
MaxTotalTokens = Annotated[
    int | None,
    typer.Option(help="KV cache in tokens; 0: planned from memory.", show_default="0"),
]
MaxRunningRequests = Annotated[
    int | None,
    typer.Option(help="Sequences that run at once.", show_default="64"),
]
MaxQueuedRequests = Annotated[
    int | None,
    typer.Option(help="Requests that may wait; one more gets 429.", show_default="256"),
]
ChunkedPrefillSize = Annotated[
    int | None,
    typer.Option(help="Prompt tokens of one step.", show_default="512"),
]
DisableRadixCache = Annotated[
    bool,
    typer.Option("--disable-radix-cache", help="Compute every prompt in full: no prefix cache."),
]

# Speculation.
SpeculativeAlgorithm = Annotated[
    str | None,
    _algorithm(
        *("EAGLE", "EAGLE2", "EAGLE3", "MTP", "NEXTN", "STANDALONE", "NGRAM", "NONE"),
        help="Drafter to start; NONE: plain decode.",
        show_default="NGRAM",
    ),
]
DrafterSpecs = Annotated[
    list[str] | None,
    typer.Option(
        "--drafter",
        metavar="name=NAME,algorithm=ALGORITHM[,model=MODEL][,token_map=FILE][,threads=N][,coupled_noise=false]"
        "[,placement=process|in-process]",
        help="A drafter to start, instead of --speculative-algorithm; may be given several times.",
        show_default="none",
    ),
]
SpeculativeNumSteps = Annotated[
    int | None,
    typer.Option(help="Levels of a draft model's trees, exactly; 0: as many as pay.", show_default="0"),
]
SpeculativeEagleTopk = Annotated[
    int | None,
    typer.Option(help="Children of one node in a draft model's trees at most.", show_default="4"),
]
SpeculativeNumDraftTokens = Annotated[
    int | None,
    typer.Option(help="Nodes of one draft tree at most, the root counted.", show_default="8"),
]
SpeculativeMaxBatchSize = Annotated[
    int | None,
    typer.Option(help="With more running rows than this, plain decode; 0: never.", show_default="0"),
]
SimulateAcceptLength = Annotated[
    float | None,
    typer.Option(
        "--simulate-accept-length",
        metavar="TOKENS",
        help="For benchmarks only: a step with a draft gives so many tokens on average, which mean nothing.",
        show_default="what the model accepts",
    ),
]
DraftTimeoutMs = Annotated[
    int | None,
    typer.Option(help="Milliseconds that a step waits for a draft.", show_default="200"),
]
DrafterPlacement = Annotated[
    Literal["process", "in-process"],
    typer.Option(
        help="A process of its own, or inside the verifier: no hand-over and no isolation. Of drafters that do not say "
        "it themselves."
    ),
]
Mps = Annotated[
    Literal["auto", "on", "off"],
    typer.Option(
        "--mps",
        help="NVIDIA's multi-process service for verifier and drafters on one GPU; auto: where it is of use and can be "
        "had. off isolates their faults, and costs time at each step.",
    ),
]
DrafterEndpoints = Annotated[
    list[str] | None,
    typer.Option(
        "--drafter",
        metavar="name=NAME,address=ADDRESS[,transport=auto|shared-memory|grpc]",
        help="A drafter to attach to, or name=NAME,algorithm=ALGORITHM[,model=MODEL]: one to hold in this process; "
        "may be given several times.",
        show_default="none",
    ),
]
Address = Annotated[
    str,
    typer.Option(metavar="ADDRESS", help="Where to listen: unix:/path or host:port."),
]
VerifierAddresses = Annotated[
    list[str],
    typer.Option(
        "--verifier",
        metavar="ADDRESS",
        help="Where a verifier listens: unix:/path or host:port; may be given several times.",
    ),
]
DrafterName = Annotated[str, typer.Option(help="Name of this drafter in requests and metrics.")]

# Drafters with a model.
DrafterAlgorithm = Annotated[
    str,
    _algorithm("NGRAM", "EAGLE", "EAGLE2", "EAGLE3", "MTP", "NEXTN", "STANDALONE", help="How it drafts."),
]
SpeculativeDraftModelPath = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="Folder of the draft head or model, or its id on the hub; an MTP head is in the target's checkpoint.",
        show_default="none",
    ),
]
Target = Annotated[
    Path | None,
    typer.Option(help="The target's folder on this host.", metavar="FOLDER", show_default="the verifier's"),
]
SpeculativeTokenMap = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Token ids that an EAGLE or MTP head may draft (FR-Spec): safetensors or a JSON list.",
        show_default="all",
    ),
]
DrafterThreads = Annotated[
    int | None,
    typer.Option(help="Threads of the draft model; 0: one.", show_default="0"),
]
DisableCoupledNoise = Annotated[
    bool,
    typer.Option("--disable-coupled-noise", help="At a temperature, draft by likelihood, not by the sampler's noise."),
]

# The n-gram drafter.
NgramMinMatchWindowSize = Annotated[
    int | None,
    typer.Option(
        "--speculative-ngram-min-match-window-size",
        help="Shortest suffix that must match.",
        show_default="1",
    ),
]
NgramMaxMatchWindowSize = Annotated[
    int | None,
    typer.Option(
        "--speculative-ngram-max-match-window-size",
        help="Longest suffix that is looked up.",
        show_default="12",
    ),
]
NgramMinBfsBreadth = Annotated[
    int | None,
    typer.Option(
        "--speculative-ngram-min-bfs-breadth",
        help="Children a node, at the deepest level.",
        show_default="1",
    ),
]
NgramMaxBfsBreadth = Annotated[
    int | None,
    typer.Option(
        "--speculative-ngram-max-bfs-breadth",
        help="Children a node, at the root. 1 in both: a single branch.",
        show_default="10",
    ),
]
NgramCapacity = Annotated[
    int | None,
    typer.Option("--speculative-ngram-capacity", help="Nodes of the trie.", show_default="10000000"),
]
NgramExternalCorpusMaxTokens = Annotated[
    int | None,
    typer.Option(
        "--speculative-ngram-external-corpus-max-tokens",
        help="Tokens of all corpora that may be added, 8 bytes each.",
        show_default="10000000",
    ),
]
NgramOrder = Annotated[
    Literal["frequency", "recency"] | None,
    typer.Option(
        "--speculative-ngram-order",
        help="Which candidates come first: the most often or the last seen.",
        show_default="recency",
    ),
]

# Commands that talk to a running server.
Url = Annotated[str, typer.Option(envvar="FORETOKEN_URL", show_envvar=True, help="Where the gateway answers.")]
OperatorKeyFile = Annotated[
    Path,
    typer.Option("--admin-api-key-file", envvar="FORETOKEN_ADMIN_API_KEY_FILE", help="The operator's key."),
]
