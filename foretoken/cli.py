"""The command line, and the one place where services are wired together and the environment is read.

Every service is imported by its own command only: help is fast, and a gateway never loads torch. A command's
parameters bear the names of the settings' fields, which is how ``context.params`` becomes settings.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from foretoken import flags
from foretoken.commands import client_commands, corpus_commands, drafter_commands, offline, service_settings
from foretoken.commands.client_commands import program, say

if TYPE_CHECKING:
    from drafter_svc.config import DrafterSettings
    from foretoken.drafter import Drafter
    from foretoken.supervisor import Service
    from gateway.config import GatewaySettings
    from verifier_svc.config import VerifierSettings

NGRAM_DRAFTER = "ngram"
# Tens of microseconds: longer than a phase of a step lasts, shorter than it takes to be scheduled again.
OPENMP_SPIN_COUNT = "20000"
# Of the two libraries that PyTorch has on a GPU, read as it is loaded: all matmuls of the Llama-3.1-8B shape take 4.37
# instead of 4.63 ms at 96 rows on an H200, and as long as before at 512.
MATMULS_BY_CUBLASLT = "1"


class _Commands(TyperGroup):
    """All commands, those of sub-commands too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for name in (arg.partition("=")[0] for arg in args):
            if name in flags.VLLM_NAMES:
                from foretoken.errors import ConfigError

                raise ConfigError(f"{name} is vLLM's name; here it is {flags.VLLM_NAMES[name]}")
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            # Choices are checked through pydantic, which says of every error of a validator that it is one.
            error.message = error.message.removeprefix("Value error, ")
            raise


app = typer.Typer(cls=_Commands, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.add_typer(corpus_commands.app, name="corpus")
app.add_typer(drafter_commands.app, name="drafters")


def main() -> None:
    """Entry point: a user's mistake is one line on stderr and status 2, any other failure of ours status 1."""
    try:
        app(prog_name="foretoken")
    except Exception as error:
        from foretoken.errors import ConfigError, ForetokenError

        if not isinstance(error, ForetokenError):
            raise
        say(" ".join(str(error).split()))
        sys.exit(2 if isinstance(error, ConfigError) else 1)


@app.callback(invoke_without_command=True)
def foretoken(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Serves large language models faster by speculative decoding."""
    if version:
        from foretoken import __version__

        print(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


@app.command()
def serve(
    context: typer.Context,
    model: flags.Model,
    revision: flags.Revision = None,
    served_model_name: flags.ServedModelName = None,
    host: flags.Host = None,
    port: flags.Port = None,
    grpc_port: flags.GrpcPort = None,
    chat_template: flags.ChatTemplate = None,
    client_timeout_s: flags.ClientTimeout = None,
    request_timeout_s: flags.RequestTimeout = None,
    resume_attempts: flags.ResumeAttempts = None,
    verifier_wait_s: flags.VerifierWait = None,
    gateway_workers: flags.GatewayWorkers = None,
    admin_api_key_file: flags.AdminApiKeyFile = None,
    vllm_metric_names: flags.VllmMetricNames = False,
    otlp_traces_endpoint: flags.OtlpTracesEndpoint = None,
    device: flags.Device = None,
    dtype: flags.Dtype = None,
    numerics: flags.Numerics = None,
    attention_backend: flags.AttentionBackend = None,
    threads: flags.Threads = None,
    mem_fraction_static: flags.MemFractionStatic = None,
    disable_cuda_graph: flags.DisableCudaGraph = False,
    disable_overlap_schedule: flags.DisableOverlapSchedule = False,
    context_length: flags.ContextLength = None,
    block_size: flags.BlockSize = None,
    max_total_tokens: flags.MaxTotalTokens = None,
    max_running_requests: flags.MaxRunningRequests = None,
    max_queued_requests: flags.MaxQueuedRequests = None,
    chunked_prefill_size: flags.ChunkedPrefillSize = None,
    disable_radix_cache: flags.DisableRadixCache = False,
    speculative_algorithm: flags.SpeculativeAlgorithm = None,
    speculative_draft_model_path: flags.SpeculativeDraftModelPath = None,
    speculative_token_map: flags.SpeculativeTokenMap = None,
    drafters: flags.DrafterSpecs = None,
    speculative_num_steps: flags.SpeculativeNumSteps = None,
    speculative_eagle_topk: flags.SpeculativeEagleTopk = None,
    speculative_num_draft_tokens: flags.SpeculativeNumDraftTokens = None,
    speculative_max_batch_size: flags.SpeculativeMaxBatchSize = None,
    simulate_accept_length: flags.SimulateAcceptLength = None,
    ngram_min_match_window_size: flags.NgramMinMatchWindowSize = None,
    ngram_max_match_window_size: flags.NgramMaxMatchWindowSize = None,
    ngram_min_bfs_breadth: flags.NgramMinBfsBreadth = None,
    ngram_max_bfs_breadth: flags.NgramMaxBfsBreadth = None,
    ngram_capacity: flags.NgramCapacity = None,
    ngram_order: flags.NgramOrder = None,
    ngram_external_corpus_max_tokens: flags.NgramExternalCorpusMaxTokens = None,
    drafter_placement: flags.DrafterPlacement = "process",
    mps: flags.Mps = "auto",
    dry_run: flags.DryRun = False,
    log_level: flags.LogLevel = "warning",
) -> None:
    """Start gateway, verifier and drafters on one host, and keep them running.

    Ctrl-C or SIGTERM lets running streams go on for 14 seconds at most; a second Ctrl-C stops at once.
    """
    # Read by gRPC as it is loaded: the supervisor forks to start programs only, never to go on with gRPC, and its fork
    # handlers would complain of each start on stderr.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    from foretoken.runtime_folder import runtime_folder
    from foretoken.tracing import check_endpoint

    check_endpoint(otlp_traces_endpoint)
    if dry_run:
        _check_ports(host, port, grpc_port, are_free=False)
        _check_device(context)
        drafter_settings = [
            service_settings.drafter_settings(context, spec, "unix:/none")
            for spec in service_settings.drafter_specs(context)
        ]
        checkpoint = service_settings.find_checkpoint(context)
        settings = service_settings.verifier_settings(context, checkpoint, "unix:/none", [])
        gateway_settings = service_settings.gateway_settings(context, checkpoint, ["unix:/none"])
        service_settings.check_checkpoint(settings.model)
        service_settings.check_drafters(context, drafter_settings, settings.model)
        _check_tokenizer(gateway_settings)
        _print_plan(settings, drafter_settings)
        return
    _check_ports(host, port, grpc_port, are_free=True)
    _check_device(context)
    with runtime_folder() as folder:
        raise typer.Exit(_supervise(context, folder))


@app.command()
def gateway(
    context: typer.Context,
    model: flags.Model,
    verifiers: flags.VerifierAddresses,
    revision: flags.Revision = None,
    served_model_name: flags.ServedModelName = None,
    host: flags.Host = None,
    port: flags.Port = None,
    grpc_port: flags.GrpcPort = None,
    chat_template: flags.ChatTemplate = None,
    client_timeout_s: flags.ClientTimeout = None,
    request_timeout_s: flags.RequestTimeout = None,
    resume_attempts: flags.ResumeAttempts = None,
    verifier_wait_s: flags.VerifierWait = None,
    speculative_metrics: flags.SpeculativeMetrics = None,
    max_concurrent_requests: flags.MaxConcurrentRequests = None,
    drain_timeout_s: flags.DrainTimeout = None,
    gateway_workers: flags.GatewayWorkers = None,
    admin_api_key_file: flags.AdminApiKeyFile = None,
    worker_socket: flags.WorkerSocket = None,
    liveness_socket: flags.LivenessSocket = None,
    vllm_metric_names: flags.VllmMetricNames = False,
    otlp_traces_endpoint: flags.OtlpTracesEndpoint = None,
    log_level: flags.LogLevel = "info",
) -> None:
    """Start one gateway: text in, text out, over REST and gRPC. MODEL holds its tokenizer."""
    settings = service_settings.gateway_settings(context, service_settings.find_checkpoint(context), verifiers)
    from foretoken.telemetry import configure_logging

    configure_logging("gateway", log_level)
    if settings.gateway_workers > 1 and settings.worker_socket is None:
        from gateway import workers

        raise typer.Exit(workers.run(settings, ("--log-level", log_level)))
    from gateway import server

    server.run(settings)


@app.command()
def verifier(
    context: typer.Context,
    model: flags.Model,
    address: flags.Address,
    revision: flags.Revision = None,
    served_model_name: flags.ServedModelName = None,
    device: flags.Device = None,
    dtype: flags.Dtype = None,
    numerics: flags.Numerics = None,
    attention_backend: flags.AttentionBackend = None,
    threads: flags.Threads = None,
    mem_fraction_static: flags.MemFractionStatic = None,
    disable_cuda_graph: flags.DisableCudaGraph = False,
    disable_overlap_schedule: flags.DisableOverlapSchedule = False,
    context_length: flags.ContextLength = None,
    block_size: flags.BlockSize = None,
    max_total_tokens: flags.MaxTotalTokens = None,
    max_running_requests: flags.MaxRunningRequests = None,
    max_queued_requests: flags.MaxQueuedRequests = None,
    chunked_prefill_size: flags.ChunkedPrefillSize = None,
    disable_radix_cache: flags.DisableRadixCache = False,
    speculative_num_steps: flags.SpeculativeNumSteps = None,
    speculative_eagle_topk: flags.SpeculativeEagleTopk = None,
    speculative_num_draft_tokens: flags.SpeculativeNumDraftTokens = None,
    speculative_max_batch_size: flags.SpeculativeMaxBatchSize = None,
    simulate_accept_length: flags.SimulateAcceptLength = None,
    drafters: flags.DrafterEndpoints = None,
    draft_timeout_ms: flags.DraftTimeoutMs = None,
    drain_timeout_s: flags.DrainTimeout = None,
    otlp_traces_endpoint: flags.OtlpTracesEndpoint = None,
    ngram_min_match_window_size: flags.NgramMinMatchWindowSize = None,
    ngram_max_match_window_size: flags.NgramMaxMatchWindowSize = None,
    ngram_min_bfs_breadth: flags.NgramMinBfsBreadth = None,
    ngram_max_bfs_breadth: flags.NgramMaxBfsBreadth = None,
    ngram_capacity: flags.NgramCapacity = None,
    ngram_order: flags.NgramOrder = None,
    ngram_external_corpus_max_tokens: flags.NgramExternalCorpusMaxTokens = None,
    dry_run: flags.DryRun = False,
    log_level: flags.LogLevel = "info",
) -> None:
    """Start one verifier: it owns the target model, and commits tokens.

    A --drafter with an address is attached to, one with an algorithm is held in this process: the
    --speculative-ngram flags are for such ones.
    """
    # Read by the OpenMP library as it is loaded: by default a thread spins through milliseconds at each barrier, also
    # while the one it waits for has lost its core.
    os.environ.setdefault("GOMP_SPINCOUNT", OPENMP_SPIN_COUNT)
    os.environ.setdefault("TORCH_BLAS_PREFER_CUBLASLT", MATMULS_BY_CUBLASLT)
    from foretoken.drafter_spec import check_together, parse_spec
    from foretoken.errors import ConfigError

    held = [parse_spec(text) for text in drafters or [] if "address=" not in text]
    endpoints = [text for text in drafters or [] if "address=" in text]
    if any(spec.placement is not None for spec in held):
        raise ConfigError("--drafter: placement is for foretoken serve; what is given here runs in this process")
    settings = service_settings.verifier_settings(
        context, service_settings.find_checkpoint(context), address, endpoints
    )
    check_together([*(spec.name for spec in held), *(endpoint.name for endpoint in settings.drafters)])
    if all(spec.algorithm != "NGRAM" for spec in held):
        service_settings.refuse_ngram_flags(context, "--drafter name=NAME,algorithm=NGRAM")
    inside = {spec.name: service_settings.drafter_settings(context, spec, "unix:/none") for spec in held}
    service_settings.check_drafters(context, list(inside.values()), settings.model)
    if dry_run:
        _print_plan(settings, inside.values())
        return
    in_process: dict[str, Drafter] = {}
    if inside:
        from drafter_svc.server import make_drafter

        in_process = {name: make_drafter(drafter_settings) for name, drafter_settings in inside.items()}
    from foretoken.telemetry import configure_logging
    from verifier_svc import server

    configure_logging("verifier", log_level)
    server.run(settings, in_process)


@app.command()
def drafter(
    context: typer.Context,
    address: flags.Address,
    name: flags.DrafterName = NGRAM_DRAFTER,
    algorithm: flags.DrafterAlgorithm = "NGRAM",
    speculative_draft_model_path: flags.SpeculativeDraftModelPath = None,
    target: flags.Target = None,
    speculative_token_map: flags.SpeculativeTokenMap = None,
    device: flags.Device = None,
    threads: flags.DrafterThreads = None,
    dtype: flags.Dtype = None,
    disable_cuda_graph: flags.DisableCudaGraph = False,
    disable_coupled_noise: flags.DisableCoupledNoise = False,
    ngram_min_match_window_size: flags.NgramMinMatchWindowSize = None,
    ngram_max_match_window_size: flags.NgramMaxMatchWindowSize = None,
    ngram_min_bfs_breadth: flags.NgramMinBfsBreadth = None,
    ngram_max_bfs_breadth: flags.NgramMaxBfsBreadth = None,
    ngram_capacity: flags.NgramCapacity = None,
    ngram_order: flags.NgramOrder = None,
    ngram_external_corpus_max_tokens: flags.NgramExternalCorpusMaxTokens = None,
    log_level: flags.LogLevel = "info",
) -> None:
    """Start one drafter: it proposes tokens to the verifier that attaches to it, one at a time."""
    # As for a verifier: a draft model's threads share the cores with it.
    os.environ.setdefault("GOMP_SPINCOUNT", OPENMP_SPIN_COUNT)
    os.environ.setdefault("TORCH_BLAS_PREFER_CUBLASLT", MATMULS_BY_CUBLASLT)
    from drafter_svc.config import DrafterSettings
    from foretoken import hub
    from foretoken.config import at_fault, build
    from foretoken.drafter_spec import algorithm_of

    given = service_settings.given_flags(context, DrafterSettings) | {
        "algorithm": algorithm_of(algorithm),
        "ngram": service_settings.given_ngram_flags(context),
    }
    if speculative_draft_model_path is not None:
        with at_fault("--speculative-draft-model-path"):
            given["speculative_draft_model_path"] = hub.resolve(speculative_draft_model_path).resolve()
    settings = build(DrafterSettings, given)
    from drafter_svc import server
    from foretoken.telemetry import configure_logging

    configure_logging("drafter", log_level)
    server.run(settings)


offline.add_commands(app)
client_commands.add_commands(app)


def _supervise(context: typer.Context, folder: Path) -> int:
    """Run the stack until a signal; returns the exit status."""
    import asyncio

    from foretoken import stack
    from foretoken.mps import DRIVER, gpu_clients
    from foretoken.supervisor import Supervisor

    services, gateway_settings = _services(context, folder)
    has_gpu = context.params["device"] != "cpu" and DRIVER.exists()

    def announce_ready() -> None:
        settings = gateway_settings
        name, host, port = settings.served_model_name, settings.host, settings.port
        print(stack.ready_text(name, host, port, settings.grpc_port, program()), flush=True)

    on_gpu = {stack.VERIFIER_NAME, *(stack.drafter_name(name) for name in service_settings.model_drafters(context))}
    is_useful = sum(service.name in on_gpu for service in services) > 1
    with gpu_clients(context.params["mps"], folder, has_gpu=has_gpu, is_useful=is_useful, announce=say) as clients:
        services = [clients.run(service) if service.name in on_gpu else service for service in services]
        supervisor = Supervisor(
            services,
            on_ready=announce_ready,
            announce=say,
            stop_notice=stack.STOP_NOTICE,
            slow_notice=stack.SLOW_NOTICE,
        )
        return asyncio.run(supervisor.run())


def _services(context: typer.Context, folder: Path) -> tuple[list[Service], GatewaySettings]:
    """The services of a stack in the order of their start, settings checked. ``folder`` holds their sockets."""
    from foretoken import stack
    from foretoken.config import to_flags
    from foretoken.drafter_spec import spec_text

    checkpoint = service_settings.find_checkpoint(context)
    verifier_address = f"unix:{folder}/verifier.sock"
    level = ("--log-level", context.params["log_level"])
    services, endpoints, held, drafter_settings = [], [], [], []
    # A folder of their own: one may be called verifier.
    (folder / "drafters").mkdir()
    for spec in service_settings.drafter_specs(context):
        address = f"unix:{folder}/drafters/{spec.name}.sock"
        settings = service_settings.drafter_settings(context, spec, address)
        drafter_settings.append(settings)
        if service_settings.is_inside(context, spec):
            inside = spec.model_copy(update={"placement": None})
            held += ["--drafter", spec_text(inside), *to_flags(settings.ngram, "ngram")]
        else:
            endpoints.append(f"name={spec.name},address={address}")
            services.append(stack.drafter(spec.name, stack.command("drafter", settings, level), address))
    verifier_settings = service_settings.verifier_settings(context, checkpoint, verifier_address, endpoints)
    gateway_settings = service_settings.gateway_settings(
        context, checkpoint, [verifier_address], drain_timeout_s=stack.GATEWAY_DRAIN_S
    )
    liveness_socket = folder / "gateway.sock"
    gateway_command = stack.command(
        "gateway", gateway_settings.model_copy(update={"liveness_socket": liveness_socket}), level
    )
    services.append(stack.verifier(stack.command("verifier", verifier_settings, (*held, *level)), verifier_address))
    services.append(stack.gateway(gateway_command, gateway_settings.host, gateway_settings.port, liveness_socket))
    service_settings.check_checkpoint(checkpoint["model"])
    service_settings.check_drafters(context, drafter_settings, checkpoint["model"])
    return services, gateway_settings


def _check_ports(host: str | None, port: int | None, grpc_port: int | None, *, are_free: bool) -> None:
    from foretoken import stack

    stack.check_ports(
        host or flags.DEFAULT_HOST,
        flags.DEFAULT_PORT if port is None else port,
        flags.DEFAULT_GRPC_PORT if grpc_port is None else grpc_port,
        are_free=are_free,
    )


def _check_device(context: typer.Context) -> None:
    """What needs no library to be known, before anything is started."""
    from foretoken.errors import ConfigError
    from foretoken.mps import DRIVER
    from verifier_svc.config import refuse_gpu_flags

    device, has_driver = context.params["device"], DRIVER.exists()
    if device == "cuda" and not has_driver:
        raise ConfigError("--device cuda: there is no NVIDIA GPU here, or no driver for it")
    if context.params["mps"] == "on" and (device == "cpu" or not has_driver):
        raise ConfigError("--mps on: models do not run on an NVIDIA GPU here")
    if device == "cpu" or not has_driver:
        refuse_gpu_flags(context.params)


def _check_tokenizer(settings: GatewaySettings) -> None:
    """What a gateway would find in the tokenizer's files and in the chat template. It takes a second."""
    from gateway.tokenizer import Tokenizer

    Tokenizer(settings.model, settings.chat_template)


def _print_plan(settings: VerifierSettings, drafters: Iterable[DrafterSettings]) -> None:
    """``drafters``: that the command would start or hold, beside those that the settings say how to reach."""
    from verifier_svc import server

    known = [f"{drafter.name} ({drafter.algorithm})" for drafter in drafters]
    known += [f"{endpoint.name} at {endpoint.address}" for endpoint in settings.drafters]
    print(server.plan(settings))
    print(f"  drafters   {', '.join(known) or 'none'}")
