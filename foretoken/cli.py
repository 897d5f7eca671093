"""Run the command line. Only this module and foretoken.ray wire services.

Each command imports only its own service, so help is fast and a gateway never loads torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from foretoken.commands import (
    bench_command,
    client_commands,
    corpus_commands,
    drafter_commands,
    key_command,
    offline,
    top_command,
    tune_command,
)
from foretoken.commands.client_commands import program, say
from foretoken.commands.given import Given
from foretoken.commands.serve_command import ServeCommand
from foretoken.commands.settings_command import SettingsCommand

if TYPE_CHECKING:
    from foretoken.commands.options import ServeOptions
    from foretoken.commands.service_settings import StackSettings, VerifierStack
    from foretoken.drafter import Drafter
    from foretoken.service import Service
    from gateway.config import GatewaySettings
    from verifier_svc.config import VerifierSettings

# Tens of microseconds: longer than a phase of a step, shorter than a wait to be scheduled again.
OPENMP_SPIN_COUNT = "20000"
# PyTorch reads it when loaded. With cuBLASLt all matmuls of the Llama-3.1-8B shape take 4.37
# instead of 4.63 ms at 96 rows on an H200, and as long as with cuBLAS at 512.
MATMULS_BY_CUBLASLT = "1"


class _Commands(click.Group):
    """Lists commands in the order of their definition."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def main(
    command: click.Command | None = None, name: str = "foretoken", defaults: Mapping[str, Any] | None = None
) -> None:
    """Run the program. Exit with 2 after a user's mistake, with 1 after another ForetokenError.

    Either is one line on stderr.

    Args:
        command: what the process's command line is for; None: all commands.
        name: the program's name in help texts.
        defaults: the values of flags that are not given.
    """
    # gRPC reads it when loaded, and settings load it. The processes fork only to start programs,
    # and gRPC's fork handlers would complain about each start on stderr.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    try:
        (command or app)(prog_name=name, default_map=defaults)
    except Exception as error:
        from foretoken.errors import ConfigError, ForetokenError

        if not isinstance(error, ForetokenError):
            raise
        advice = f"; {error.advice}" if error.advice else ""
        say(" ".join(f"{error}{advice}".split()))
        sys.exit(2 if isinstance(error, ConfigError) else 1)


@click.group(cls=_Commands, invoke_without_command=True)
@click.option("--version", is_flag=True, help="Print the version and exit.")
@click.pass_context
def app(context: click.Context, version: bool) -> None:
    """Serve large language models faster by speculative decoding."""
    if version:
        from foretoken import __version__

        print(__version__)
        context.exit()
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command(cls=ServeCommand)
def serve(given: Given) -> None:
    """Start gateway, verifier and drafters, and keep them running.

    SGLang's command lines work as typed. After Ctrl-C or SIGTERM running streams have 14 seconds to
    finish; a second Ctrl-C stops at once.
    """
    from foretoken.commands.options import ServeOptions
    from foretoken.commands.service_settings import stack_settings, verifier_stack
    from foretoken.runtime_folder import runtime_folder

    _say_all(given.notices)
    options = given.settings(ServeOptions)
    if options.dry_run:
        from gateway.tokenizer import Tokenizer

        plan = stack_settings(given, Path("/none"))
        _check_sampling_defaults(plan.gateway)
        # Check the tokenizer's files and the chat template as a gateway would. It takes a second.
        Tokenizer(plan.gateway.model, plan.gateway.chat_template)
        _say_all(plan.notices)
        drafters = [
            f"{spec.name} ({spec.algorithm}, {'in-process' if plan.is_inside(spec) else 'process'})"
            for spec, _ in plan.drafters
        ]
        _print_plan(plan.verifier, drafters, has_model=plan.has_model)
        return
    with runtime_folder() as folder:
        if options.verifier_address is not None:
            part = verifier_stack(given, folder, options.verifier_address)
            _say_all(part.notices)
            sys.exit(_supervise_verifier(part, folder))
        if options.executor == "ray":
            sys.exit(_supervise_ray(given, options, folder))
        settings = stack_settings(given, folder)
        _check_sampling_defaults(settings.gateway)
        _say_all(settings.notices)
        sys.exit(_supervise(settings, folder))


@app.command(cls=SettingsCommand)
def gateway(given: Given) -> None:
    """Start one gateway: text in, text out, over REST and gRPC. MODEL holds its tokenizer."""
    from foretoken.commands.options import GatewayOptions
    from foretoken.commands.service_settings import find_checkpoint, gateway_settings
    from foretoken.telemetry import configure_logging

    settings = gateway_settings(given).model_copy(update={"model": find_checkpoint(given)})
    log_level = given.settings(GatewayOptions).log_level
    configure_logging("gateway", log_level)
    if settings.num_workers > 1 and settings.worker_socket is None:
        from gateway import workers

        sys.exit(workers.run(settings, ("--log-level", log_level)))
    from gateway import server

    server.run(settings)


@app.command(cls=SettingsCommand)
def verifier(given: Given) -> None:
    """Start one verifier: it owns the target model and commits tokens.

    It attaches to a --drafter with an address, and runs a --drafter with an algorithm in its own
    process. The --speculative-ngram flags apply only to the latter.
    """
    # The OpenMP library reads it when loaded. By default a thread spins for milliseconds at each
    # barrier, even while the thread that it waits for has lost its core.
    os.environ.setdefault("GOMP_SPINCOUNT", OPENMP_SPIN_COUNT)
    os.environ.setdefault("TORCH_BLAS_PREFER_CUBLASLT", MATMULS_BY_CUBLASLT)
    from foretoken.commands import service_settings, stack_drafters
    from foretoken.commands.options import VerifierOptions
    from foretoken.drafter_names import check_together

    options = given.settings(VerifierOptions)
    endpoints, held = stack_drafters.drafters_of_verifier(given)
    settings = service_settings.verifier_settings(given, drafters=endpoints)
    check_together([*(spec.name for spec in held), *(endpoint.name for endpoint in settings.drafters)])
    settings = settings.model_copy(update={"model": service_settings.find_checkpoint(given)})
    if options.dry_run:
        # A start checks the same when it loads.
        _say_all(service_settings.check_target(settings.model))
    inside = {spec.name: stack_drafters.drafter_settings(given, spec, "unix:/none") for spec in held}
    for drafter in inside.values():
        notes = stack_drafters.check_drafter(given, drafter, settings.model)
        if options.dry_run:
            _say_all(notes)
    if options.dry_run:
        attached = [f"{endpoint.name} at {endpoint.address}" for endpoint in settings.drafters]
        inside_names = [f"{spec.name} ({spec.algorithm}, in-process)" for spec in held]
        # Nobody knows before it is attached which algorithm a drafter elsewhere runs.
        has_model = bool(attached) or any(spec.row.runs_model for spec in held)
        _print_plan(settings, inside_names + attached, has_model=has_model)
        return
    from foretoken.telemetry import configure_logging

    configure_logging("verifier", options.log_level)
    in_process: dict[str, Drafter] = {}
    if inside:
        from drafter_svc.server import make_drafter

        in_process = {name: make_drafter(drafter_settings) for name, drafter_settings in inside.items()}
    from verifier_svc import server

    server.run(settings, in_process)


@app.command(cls=SettingsCommand)
def drafter(given: Given) -> None:
    """Start one drafter: it proposes tokens to one verifier."""
    # As in a verifier, with which a draft model's threads share the cores.
    os.environ.setdefault("GOMP_SPINCOUNT", OPENMP_SPIN_COUNT)
    os.environ.setdefault("TORCH_BLAS_PREFER_CUBLASLT", MATMULS_BY_CUBLASLT)
    from drafter_svc.config import DrafterSettings
    from foretoken import hub
    from foretoken.commands.options import LogOptions
    from foretoken.config import at_fault

    found: dict[str, Any] = {}
    if "speculative_draft_model_path" in given.values:
        with at_fault("--speculative-draft-model-path"):
            folder = hub.resolve(given.values["speculative_draft_model_path"])
        found["speculative_draft_model_path"] = folder.resolve()
    settings = given.settings(DrafterSettings, **found)
    from drafter_svc import server
    from foretoken.telemetry import configure_logging

    configure_logging("drafter", given.settings(LogOptions).log_level)
    server.run(settings)


@app.command(cls=ServeCommand)
def doctor(given: Given) -> None:
    """Check this machine, and MODEL and its drafters if given.

    Say what to do; exit with 1 on a fault.

    It takes the flags of serve, and starts and downloads nothing.
    """
    import json

    from foretoken.commands.diagnosis import diagnose
    from foretoken.commands.options import DoctorOptions
    from foretoken.doctor import finding

    findings = diagnose(given)
    if given.settings(DoctorOptions).as_json:
        print(json.dumps(finding.as_json(findings), indent=2))
    else:
        print(*finding.lines(findings), sep="\n")
    sys.exit(1 if finding.count(findings, "fault") else 0)


for command in (
    *offline.COMMANDS,
    *client_commands.COMMANDS,
    bench_command.bench,
    tune_command.tune,
    top_command.top,
    key_command.key,
    corpus_commands.app,
    drafter_commands.app,
):
    app.add_command(command)


def _supervise(settings: StackSettings, folder: Path) -> int:
    """Run the stack until a signal; return the exit status."""
    gateway, announce_ready = _gateway(settings.gateway, settings.options.log_level, folder)
    return _supervise_on_gpu(settings, [*_verifier_services(settings, folder), gateway], folder, announce_ready)


def _supervise_verifier(settings: VerifierStack, folder: Path) -> int:
    """Run a verifier and its drafters until a signal; return the exit status."""
    return _supervise_on_gpu(settings, _verifier_services(settings, folder), folder, lambda: None)


def _supervise_ray(given: Given, options: ServeOptions, folder: Path) -> int:
    """Run a gateway here and verifiers in a Ray cluster until a signal; return the exit status."""
    import importlib.util
    import secrets

    from foretoken import stack
    from foretoken.commands import service_settings
    from foretoken.errors import ConfigError
    from foretoken.links import NO_CREDENTIALS, read_credentials

    if importlib.util.find_spec("ray") is None:
        raise ConfigError("--executor ray needs Ray: pip install 'foretoken[ray]'")
    file, token_file = folder / "verifiers", folder / "link-token"
    gateway = service_settings.gateway_of_cluster(given, file)
    flags = ["--name", gateway.served_model_name, "--num-verifiers", str(options.num_verifiers)]
    flags += ["--log-level", options.log_level]
    if options.ray_address is not None:
        flags += ["--ray-address", options.ray_address]
    if read_credentials(gateway) == NO_CREDENTIALS and not given.values.get("insecure_links"):
        token_file.touch(mode=0o600)
        token_file.write_text(secrets.token_urlsafe())
        gateway = gateway.model_copy(update={"link_token_file": token_file})
        flags += ["--link-token-file", str(token_file)]
    _check_sampling_defaults(gateway)
    service, announce_ready = _gateway(gateway, options.log_level, folder)
    words = service_settings.words_of_verifier(given)
    return _run([stack.ray_verifiers(flags, words, file, folder / "verifiers.sock"), service], announce_ready)


def _supervise_on_gpu(
    settings: VerifierStack, services: list[Service], folder: Path, announce_ready: Callable[[], None]
) -> int:
    """Run services, those with a model as clients of one GPU, until a signal.

    Return the exit status.
    """
    from foretoken import stack
    from foretoken.mps import DRIVER, gpu_clients

    has_gpu = settings.verifier.device != "cpu" and DRIVER.exists()
    # Drafters run their models on the verifier's GPU.
    model_drafters = (stack.drafter_name(spec.name) for spec, _ in settings.drafters if spec.row.runs_model)
    on_gpu = {stack.VERIFIER_NAME, *model_drafters}
    is_useful = sum(service.name in on_gpu for service in services) > 1
    with gpu_clients(settings.options.mps, folder, has_gpu=has_gpu, is_useful=is_useful, announce=say) as clients:
        services = [clients.run(service) if service.name in on_gpu else service for service in services]
        return _run(services, announce_ready)


def _run(services: list[Service], announce_ready: Callable[[], None]) -> int:
    """Run services until a signal; return the exit status."""
    import asyncio

    from foretoken import stack
    from foretoken.supervisor import Supervisor

    supervisor = Supervisor(
        services,
        on_ready=announce_ready,
        announce=say,
        stop_notice=stack.STOP_NOTICE,
        stop_again_notice=stack.STOP_AGAIN_NOTICE,
        slow_notice=stack.SLOW_NOTICE,
    )
    return asyncio.run(supervisor.run())


def _verifier_services(settings: VerifierStack, folder: Path) -> list[Service]:
    """Return a verifier with its drafters, in the order of their start.

    ``folder`` holds the drafters' sockets.
    """
    from drafter_svc.drafter_spec import spec_text
    from foretoken import stack
    from foretoken.commands.options import LogOptions, VerifierOptions
    from foretoken.config import to_flags
    from foretoken.links import is_unix, read_credentials

    level = to_flags(LogOptions(log_level=settings.options.log_level))
    services, held = [], []
    # A separate folder: a drafter may be called verifier.
    (folder / "drafters").mkdir()
    for spec, drafter_settings in settings.drafters:
        if settings.is_inside(spec):
            held += ["--drafter", spec_text(spec.model_copy(update={"placement": None}))]
            held += to_flags(VerifierOptions.model_validate(drafter_settings.options))
        else:
            command = stack.command("drafter", drafter_settings, level)
            services.append(stack.drafter(spec.name, command, drafter_settings.address))
    verifier = settings.verifier
    command = stack.command("verifier", verifier, (*held, *level))
    # On one machine the gateway has drained before; in a cluster
    # others' gateways have streams here.
    drain_s = 0.0 if is_unix(verifier.address) else verifier.drain_timeout_s
    services.append(stack.verifier(command, verifier.address, read_credentials(verifier), drain_s))
    return services


def _gateway(settings: GatewaySettings, log_level: str, folder: Path) -> tuple[Service, Callable[[], None]]:
    """Return the gateway of this terminal, and a function that says that it is ready."""
    import secrets

    from pydantic import SecretStr

    from foretoken import stack
    from foretoken.config import to_environment
    from foretoken.probes import GatewayProbe

    liveness_socket = folder / "gateway.sock"
    settings = settings.model_copy(update={"liveness_socket": liveness_socket})
    # Without it, the gateway would not report to the supervisor which drafters are missing.
    probe_key = secrets.token_urlsafe() if settings.needs_key or settings.ssl_ca_certs is not None else ""
    if probe_key:
        settings = settings.model_copy(update={"probe_key": SecretStr(probe_key)})
    command = stack.command("gateway", settings, ("--log-level", log_level))
    probe = GatewayProbe(
        settings.host, settings.port, liveness_socket, is_encrypted=settings.ssl_certfile is not None, key=probe_key
    )

    def announce_ready() -> None:
        for name, reason in probe.unattached.items():
            why = reason or "it is still being attached"
            say(f"drafter {name} is not attached: {why}; no drafts from it until it is")
        text = stack.ready_text(
            settings.served_model_name,
            settings.host,
            settings.port,
            settings.grpc_port,
            program(),
            certfile=settings.ssl_certfile,
            needs_key=settings.needs_key,
        )
        print(text, flush=True)
        if settings.api_keys and os.environ.get(stack.KEY_VARIABLE):
            say(f"clients need the key in {stack.KEY_VARIABLE}, which is set here; unset it to serve without that key")

    service = stack.gateway(command, probe, to_environment(settings), reloads=settings.is_reloadable)
    return service, announce_ready


def _check_sampling_defaults(settings: GatewaySettings) -> None:
    """Raise CheckpointError if a gateway could not read the checkpoint's sampling defaults."""
    from gateway.sampling_defaults import SamplingDefaults

    SamplingDefaults.of_settings(settings)


def _say_all(lines: Iterable[str]) -> None:
    for line in lines:
        say(line)


def _print_plan(settings: VerifierSettings, drafters: list[str], *, has_model: bool) -> None:
    from verifier_svc import assembly

    print(assembly.plan(settings, drafts=bool(drafters), has_model=has_model))
    print(f"  drafters   {', '.join(drafters) or 'none'}")
