"""SGLang's flags: which are foretoken's own, and what happens to each of the others.

``foretoken serve`` takes SGLang's command lines as typed. Many of its flags have the same name and
meaning here; those are settings. ``SGLANG_FLAGS`` lists the others, and docs/sglang.md shows it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

ONE_GPU = "one model runs on one GPU here"
NO_QUANTIZATION = "quantized weights and caches are not supported yet"
NO_LORA = "LoRA adapters are not supported"
ATTENTION = "attention runs by Triton, or by FlashInfer for prompts: see --attention-backend in docs/settings.md"
GRAPHS = "foretoken chooses which batches run as CUDA graphs; --disable-cuda-graph switches them off"
COMPILED = "kernels are compiled before the server is ready, with or without this flag"
LOAD = "safetensors are loaded, and nothing else"


@dataclass(frozen=True)
class SglangFlag:
    """One flag of SGLang that is no setting of the same name.

    Exactly one of ``to``, ``instead`` and ``refused`` says what happens to it.

    Attributes:
        names: SGLang's names; the first is shown.
        num_values: values after the flag; "many": one or more.
        to: words of our own command line; a ``{}`` stands for the value.
        instead: what foretoken does instead; said once at the start.
        refused: why it is refused.
        silent: values for which nothing is said or refused: they ask for what happens anyway.
        renamed: our value for some of SGLang's, for a flag with ``to``.
        choices: SGLang's values, if it has no others.
    """

    names: tuple[str, ...]
    num_values: Literal[0, 1, "many"] = 1
    to: tuple[str, ...] = ()
    instead: str = ""
    refused: str = ""
    silent: Collection[str] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    choices: Collection[str] = ()


def _ngram(name: str) -> SglangFlag:
    """Return the row of a flag that was called LOOKAHEAD's before it was NGRAM's."""
    return SglangFlag((f"--speculative-lookahead-{name}",), to=(f"--speculative-ngram-{name}", "{}"))


_MATCH_TYPES = {"BFS": "recency", "PROB": "frequency"}

SGLANG_FLAGS = (
    # The model.
    SglangFlag(("--model-path", "--model"), to=("{}",)),
    SglangFlag(("--trust-remote-code",), 0, instead="code from a checkpoint is never run, with or without this flag"),
    SglangFlag(("--tokenizer-path",), refused="the tokenizer is the checkpoint's own"),
    SglangFlag(("--tokenizer-mode",), instead="there is one tokenizer, the fast one", silent=("auto",)),
    SglangFlag(("--skip-tokenizer-init",), 0, refused="the gateway turns tokens into text, and needs its tokenizer"),
    SglangFlag(("--load-format",), refused=LOAD, silent=("auto", "safetensors")),
    SglangFlag(("--speculative-draft-load-format",), refused=LOAD, silent=("auto", "safetensors")),
    SglangFlag(("--download-dir",), refused="the hub's cache is where HF_HUB_CACHE says"),
    SglangFlag(
        ("--json-model-override-args",), refused="the checkpoint's config.json is not overridden", silent=("{}",)
    ),
    SglangFlag(("--model-impl",), instead="foretoken has its own models", silent=("auto", "sglang")),
    SglangFlag(("--is-embedding",), 0, refused="embeddings are not supported"),
    SglangFlag(
        ("--speculative-draft-model-revision",),
        refused="a draft model's main branch is used; for another revision name its folder",
        silent=("main",),
    ),
    # Quantization.
    SglangFlag(("--quantization",), refused=NO_QUANTIZATION),
    SglangFlag(("--quantization-param-path",), refused=NO_QUANTIZATION),
    SglangFlag(("--speculative-draft-model-quantization",), refused=NO_QUANTIZATION, silent=("unquant",)),
    SglangFlag(("--kv-cache-dtype",), refused=f"{NO_QUANTIZATION}; the cache has --dtype", silent=("auto",)),
    SglangFlag(("--speculative-draft-kv-cache-dtype",), refused=NO_QUANTIZATION, silent=("auto",)),
    SglangFlag(("--torchao-config",), refused=NO_QUANTIZATION, silent=("",)),
    SglangFlag(("--modelopt-quant",), refused=NO_QUANTIZATION),
    # Adapters.
    SglangFlag(("--enable-lora",), 0, refused=NO_LORA),
    SglangFlag(("--lora-paths",), "many", refused=NO_LORA),
    # Several GPUs.
    *(
        SglangFlag(names, refused=ONE_GPU, silent=("1",))
        for names in (
            ("--tp-size", "--tensor-parallel-size", "--tp"),
            ("--dp-size", "--data-parallel-size", "--dp"),
            ("--pp-size", "--pipeline-parallel-size", "--pp"),
            ("--ep-size", "--expert-parallel-size", "--ep"),
            ("--nnodes",),
        )
    ),
    SglangFlag(("--node-rank",), refused=ONE_GPU, silent=("0",)),
    SglangFlag(("--base-gpu-id",), refused="CUDA_VISIBLE_DEVICES chooses the GPU", silent=("0",)),
    SglangFlag(("--dist-init-addr", "--nccl-init-addr"), instead=ONE_GPU),
    SglangFlag(("--nccl-port",), instead=ONE_GPU),
    SglangFlag(("--disable-custom-all-reduce",), 0, instead=ONE_GPU),
    SglangFlag(("--enable-p2p-check",), 0, instead=ONE_GPU),
    # Speculative decoding.
    SglangFlag(("--speculative-draft-model", "--speculative-draft"), to=("--speculative-draft-model-path", "{}")),
    SglangFlag(
        ("--speculative-one-branch",),
        0,
        to=("--speculative-ngram-min-bfs-breadth", "1", "--speculative-ngram-max-bfs-breadth", "1"),
    ),
    _ngram("min-match-window-size"),
    _ngram("max-match-window-size"),
    _ngram("min-bfs-breadth"),
    _ngram("max-bfs-breadth"),
    _ngram("capacity"),
    SglangFlag(
        ("--speculative-ngram-match-type", "--speculative-lookahead-match-type"),
        to=("--speculative-ngram-order", "{}"),
        renamed=_MATCH_TYPES,
    ),
    SglangFlag(
        (
            "--speculative-ngram-max-trie-depth",
            "--speculative-ngram-branch-length",
            "--speculative-lookahead-branch-length",
        ),
        instead="the longest suffix is --speculative-ngram-max-match-window-size, the largest draft "
        "--speculative-num-draft-tokens",
    ),
    SglangFlag(
        ("--speculative-ngram-external-corpus-path",),
        refused="a corpus is added to a running server: foretoken corpus add",
    ),
    SglangFlag(
        ("--speculative-ngram-external-sam-budget",),
        instead="corpora and history share one draft; its best tokens are kept",
        silent=("0",),
    ),
    SglangFlag(
        ("--speculative-attention-mode",),
        instead="one kernel attends for prompts and for draft trees, in both modes",
        choices=("prefill", "decode"),
    ),
    SglangFlag(("--enable-multi-layer-eagle",), 0, instead="all layers of a head are used, with or without this flag"),
    SglangFlag(
        ("--speculative-accept-threshold-single", "--speculative-accept-threshold-acc"),
        refused="it changes what is written: here the text with drafts is the text without",
        silent=("1", "1.0"),
    ),
    SglangFlag(
        ("--speculative-use-rejection-sampling", "--speculative-use-block-verification"),
        0,
        instead="the verifier samples along the draft tree, which keeps every distribution exact",
    ),
    SglangFlag(
        ("--speculative-adaptive",),
        0,
        instead="without --speculative-num-steps each step's depth is chosen by what pays",
    ),
    SglangFlag(
        ("--speculative-adaptive-config",),
        instead="without --speculative-num-steps each step's depth is chosen by what pays",
    ),
    SglangFlag(("--speculative-draft-window-size",), instead="a drafter attends to the whole context"),
    SglangFlag(("--speculative-draft-sink-size",), instead="a drafter attends to the whole context"),
    SglangFlag(("--speculative-draft-attention-backend",), instead=ATTENTION),
    # Kernels and graphs.
    SglangFlag(("--prefill-attention-backend",), instead=ATTENTION),
    SglangFlag(("--decode-attention-backend",), instead=ATTENTION),
    SglangFlag(("--sampling-backend",), instead="there is one sampler, whose draws do not depend on drafts"),
    SglangFlag(("--grammar-backend",), instead="grammars are llguidance's", silent=("llguidance",)),
    SglangFlag(("--enable-torch-compile",), 0, instead=COMPILED),
    SglangFlag(("--torch-compile-max-bs",), instead=COMPILED),
    SglangFlag(("--cuda-graph-max-bs", "--cuda-graph-max-bs-decode"), instead=GRAPHS),
    SglangFlag(("--cuda-graph-bs", "--cuda-graph-bs-decode"), "many", instead=GRAPHS),
    SglangFlag(("--disable-cuda-graph-padding",), 0, instead=GRAPHS),
    SglangFlag(("--enable-profile-cuda-graph",), 0, instead=GRAPHS),
    SglangFlag(("--disable-flashinfer-autotune",), 0, instead=COMPILED),
    SglangFlag(("--triton-attention-num-kv-splits",), instead="the kernel splits the cache by its length"),
    SglangFlag(("--triton-attention-reduce-in-fp32",), 0, instead="sums are float32, with or without this flag"),
    SglangFlag(("--enable-deterministic-inference",), 0, to=("--numerics", "strict")),
    # Scheduling and memory.
    SglangFlag(("--page-size",), to=("--block-size", "{}")),
    SglangFlag(("--max-prefill-tokens",), instead="--chunked-prefill-size limits the prompt tokens of a step"),
    SglangFlag(("--schedule-policy",), instead="requests start in the order in which they arrive", silent=("fcfs",)),
    SglangFlag(("--schedule-conservativeness",), instead="a request starts when the cache has room for its next step"),
    SglangFlag(("--enable-mixed-chunk",), 0, instead="prompts and decodes share steps, with or without this flag"),
    SglangFlag(("--num-continuous-decode-steps",), instead="requests are scheduled at every step", silent=("1",)),
    SglangFlag(("--cpu-offload-gb",), refused="weights are not offloaded", silent=("0",)),
    SglangFlag(("--enable-memory-saver",), 0, refused="weights and cache stay in memory"),
    SglangFlag(("--enable-hierarchical-cache", "--enable-hicache"), 0, refused="the prefix cache has one level"),
    # The server.
    SglangFlag(("--random-seed",), instead="each request has its own seed: its field, or one that the gateway draws"),
    SglangFlag(("--watchdog-timeout",), instead="a service that ends or stalls is restarted"),
    SglangFlag(("--skip-server-warmup",), 0, instead="the server is ready when its kernels are"),
    SglangFlag(("--stream-interval",), instead="each step's tokens are sent at once", silent=("1",)),
    SglangFlag(
        ("--stream-output", "--incremental-streaming-output"),
        0,
        refused="/generate streams the whole text so far in each event",
    ),
    SglangFlag(("--enable-metrics",), 0, instead="/metrics is always there"),
    SglangFlag(("--enable-cache-report",), 0, instead="answers always report cached tokens"),
    SglangFlag(("--show-time-cost",), 0, instead="docs/telemetry.md shows what is measured"),
    SglangFlag(("--decode-log-interval",), instead="/metrics shows what runs"),
    SglangFlag(("--log-requests",), 0, instead="requests are traced: --otlp-traces-endpoint"),
    SglangFlag(("--log-requests-level",), instead="requests are traced: --otlp-traces-endpoint"),
    SglangFlag(("--log-level-http",), instead="--log-level is for all services"),
    SglangFlag(("--tokenizer-worker-num",), to=("--gateway-workers", "{}")),
    SglangFlag(("--completion-template",), refused="completions have no template"),
)

# Flags of SGLang that are settings with the same meaning here.
SAME_FLAGS = (
    *("--host", "--port", "--api-key", "--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certs"),
    *("--served-model-name", "--chat-template", "--log-level", "--tool-call-parser"),
    *("--reasoning-parser", "--revision", "--context-length", "--dtype", "--device"),
    *("--mem-fraction-static", "--max-running-requests", "--max-queued-requests", "--max-total-tokens"),
    *("--chunked-prefill-size", "--disable-radix-cache", "--disable-overlap-schedule", "--disable-cuda-graph"),
    *("--attention-backend", "--speculative-algorithm", "--speculative-draft-model-path", "--speculative-num-steps"),
    *("--speculative-eagle-topk", "--speculative-num-draft-tokens", "--speculative-token-map"),
    *("--speculative-ngram-min-bfs-breadth", "--speculative-ngram-max-bfs-breadth", "--speculative-ngram-capacity"),
    "--speculative-ngram-external-corpus-max-tokens",
)
# SGLang's values of flags that are settings here, by our value.
RENAMED_VALUES: dict[str, Mapping[str, str]] = {
    "--dtype": {"half": "float16", "float": "float32"},
    # The same algorithm under its first name.
    "--speculative-algorithm": {"LOOKAHEAD": "NGRAM"},
    # Prompts in one piece. Memory for a chunk is set aside at the start: 5 GiB for so many tokens
    # of an 8B model.
    "--chunked-prefill-size": {"-1": "8192"},
}
# What is said about a renamed value of a flag that does not mean quite the same.
SAID_OF_RENAMED = {"--chunked-prefill-size": "longer prompts take several steps"}
# Values of settings that name what only SGLang has, and what foretoken does instead.
INSTEAD_OF_VALUES: dict[str, tuple[tuple[str, ...], str]] = {
    "--attention-backend": (
        ("fa3", "fa4", "flashmla", "cutlass_mla", "torch_native", "flex_attention", "trtllm_mha", "trtllm_mla"),
        ATTENTION,
    ),
}
