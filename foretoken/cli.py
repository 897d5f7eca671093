"""Run the command line. Only this module wires services together and reads the environment.

Each command imports only its own service, so help is fast and a gateway never loads torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from foretoken.commands import client_commands, corpus_commands, drafter_commands, key_command, offline
from foretoken.commands.client_commands import program, say
from foretoken.commands.given import Given
from foretoken.commands.serve_command import ServeCommand
from foretoken.commands.settings_command import SettingsCommand

if TYPE_CHECKING:
    from drafter_svc.config import DrafterSettings
    from foretoken.commands.service_settings import StackSettings
    from foretoken.drafter import Drafter
    from foretoken.supervisor import Service
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
        say(" ".join(str(error).split()))
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
    from foretoken.commands.service_settings import ServeOptions, stack_settings
    from foretoken.runtime_folder import runtime_folder

    _say_all(given.notices)
    if given.settings(ServeOptions).dry_run:
        from gateway.tokenizer import Tokenizer

        plan = stack_settings(given, Path("/none"))
        # Check the tokenizer's files and the chat template as a gateway would. It takes a second.
        Tokenizer(plan.gateway.model, plan.gateway.chat_template)
        _say_all(plan.notices)
        _print_plan(plan.verifier, _kinds(settings for _, settings in plan.drafters))
        return
    with runtime_folder() as folder:
        settings = stack_settings(given, folder)
        _say_all(settings.notices)
        sys.exit(_supervise(settings, folder))


@app.command(cls=SettingsCommand)
def gateway(given: Given) -> None:
    """Start one gateway: text in, text out, over REST and gRPC. MODEL holds its tokenizer."""
    from foretoken.commands.service_settings import GatewayOptions, find_checkpoint, gateway_settings
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
    from foretoken.commands import service_settings
    from foretoken.drafter_names import check_together

    options = given.settings(service_settings.VerifierOptions)
    endpoints, held = service_settings.drafters_of_verifier(given)
    settings = service_settings.verifier_settings(given, drafters=endpoints)
    check_together([*(spec.name for spec in held), *(endpoint.name for endpoint in settings.drafters)])
    settings = settings.model_copy(update={"model": service_settings.find_checkpoint(given)})
    if options.dry_run:
        # A start checks the same when it loads.
        _say_all(service_settings.check_target(settings.model))
    inside = {spec.name: service_settings.drafter_settings(given, spec, "unix:/none") for spec in held}
    service_settings.check_drafters(given, inside.values(), settings.model)
    if options.dry_run:
        attached = [f"{endpoint.name} at {endpoint.address}" for endpoint in settings.drafters]
        _print_plan(settings, _kinds(inside.values()) + attached)
        return
    in_process: dict[str, Drafter] = {}
    if inside:
        from drafter_svc.server import make_drafter

        in_process = {name: make_drafter(drafter_settings) for name, drafter_settings in inside.items()}
    from foretoken.telemetry import configure_logging
    from verifier_svc import server

    configure_logging("verifier", options.log_level)
    server.run(settings, in_process)


@app.command(cls=SettingsCommand)
def drafter(given: Given) -> None:
    """Start one drafter: it proposes tokens to one verifier."""
    # As in a verifier, with which a draft model's threads share the cores.
    os.environ.setdefault("GOMP_SPINCOUNT", OPENMP_SPIN_COUNT)
    os.environ.setdefault("TORCH_BLAS_PREFER_CUBLASLT", MATMULS_BY_CUBLASLT)
    from drafter_svc.config import DrafterSettings
    from foretoken import hub
    from foretoken.commands.service_settings import LogOptions
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


for command in (
    *offline.COMMANDS,
    *client_commands.COMMANDS,
    key_command.key,
    corpus_commands.app,
    drafter_commands.app,
):
    app.add_command(command)


def _supervise(settings: StackSettings, folder: Path) -> int:
    """Run the stack until a signal; return the exit status."""
    import asyncio

    from foretoken import stack
    from foretoken.mps import DRIVER, gpu_clients
    from foretoken.probes import GatewayProbe
    from foretoken.supervisor import Supervisor

    services = _services(settings, folder)
    (gateway_probe,) = (service.probe for service in services if isinstance(service.probe, GatewayProbe))
    has_gpu = settings.verifier.device != "cpu" and DRIVER.exists()

    def announce_ready() -> None:
        for name, reason in gateway_probe.unattached.items():
            why = reason or "it is still being attached"
            say(f"drafter {name} is not attached: {why}; no drafts from it until it is")
        gateway = settings.gateway
        text = stack.ready_text(
            gateway.served_model_name,
            gateway.host,
            gateway.port,
            gateway.grpc_port,
            program(),
            certfile=gateway.ssl_certfile,
            needs_key=gateway.needs_key,
        )
        print(text, flush=True)

    # Drafters run their models on the verifier's GPU.
    model_drafters = (stack.drafter_name(spec.name) for spec, _ in settings.drafters if spec.row.runs_model)
    on_gpu = {stack.VERIFIER_NAME, *model_drafters}
    is_useful = sum(service.name in on_gpu for service in services) > 1
    with gpu_clients(settings.options.mps, folder, has_gpu=has_gpu, is_useful=is_useful, announce=say) as clients:
        services = [clients.run(service) if service.name in on_gpu else service for service in services]
        supervisor = Supervisor(
            services,
            on_ready=announce_ready,
            announce=say,
            stop_notice=stack.STOP_NOTICE,
            slow_notice=stack.SLOW_NOTICE,
        )
        return asyncio.run(supervisor.run())


def _services(settings: StackSettings, folder: Path) -> list[Service]:
    """Return a stack's services in the order of their start. ``folder`` holds their sockets."""
    import secrets

    from pydantic import SecretStr

    from drafter_svc.drafter_spec import spec_text
    from foretoken import stack
    from foretoken.commands.service_settings import LogOptions, VerifierOptions
    from foretoken.config import to_environment, to_flags
    from foretoken.probes import GatewayProbe

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
    verifier_command = stack.command("verifier", settings.verifier, (*held, *level))
    liveness_socket = folder / "gateway.sock"
    gateway = settings.gateway.model_copy(update={"liveness_socket": liveness_socket})
    # Without it, the gateway would not tell the supervisor which drafters are missing.
    probe_key = secrets.token_urlsafe() if gateway.needs_key or gateway.ssl_ca_certs is not None else ""
    if probe_key:
        gateway = gateway.model_copy(update={"probe_key": SecretStr(probe_key)})
    gateway_command = stack.command("gateway", gateway, level)
    gateway_probe = GatewayProbe(
        gateway.host, gateway.port, liveness_socket, is_encrypted=gateway.ssl_certfile is not None, key=probe_key
    )
    services.append(stack.verifier(verifier_command, settings.verifier.address))
    services.append(
        stack.gateway(gateway_command, gateway_probe, to_environment(gateway), reloads=gateway.is_reloadable)
    )
    return services


def _say_all(lines: Iterable[str]) -> None:
    for line in lines:
        say(line)


def _kinds(drafters: Iterable[DrafterSettings]) -> list[str]:
    return [f"{drafter.name} ({drafter.algorithm})" for drafter in drafters]


def _print_plan(settings: VerifierSettings, drafters: list[str]) -> None:
    from verifier_svc import server

    print(server.plan(settings))
    print(f"  drafters   {', '.join(drafters) or 'none'}")
