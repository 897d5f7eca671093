"""Build and check each service's settings from the user's values, before anything starts.

Functions raise ConfigError and CheckpointError that name the flag.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafter_svc.config import DrafterSettings
from drafter_svc.drafter_spec import DrafterSpec
from foretoken import hub
from foretoken.commands import kv_event_endpoints, speculators, stack_drafters
from foretoken.commands.given import Given
from foretoken.commands.options import COMMANDS, OF_RAY, GatewayOptions, ServeOptions
from foretoken.config import flag_of
from foretoken.errors import CheckpointError, ConfigError
from foretoken.links import check_listener, read_credentials
from gateway.config import GatewaySettings, read_chat_template
from verifier_svc.config import DrafterEndpoint, VerifierSettings, refuse_gpu_flags

# Settings that concern the command and not its verifiers.
_OF_COMMAND = {"executor", "num_verifiers", "ray_address"}


@dataclass(frozen=True, kw_only=True)
class VerifierStack:
    """Settings of a verifier and its drafters."""

    options: ServeOptions
    verifier: VerifierSettings
    drafters: list[tuple[DrafterSpec, DrafterSettings]]
    # What to say at the start about settings that mean something else here.
    notices: tuple[str, ...] = ()

    @property
    def has_model(self) -> bool:
        """Return whether any drafter has a model."""
        return any(spec.row.runs_model for spec, _ in self.drafters)

    def is_inside(self, spec: DrafterSpec) -> bool:
        """Return whether a drafter runs in the verifier's process."""
        return stack_drafters.is_inside(spec, self.options)


@dataclass(frozen=True, kw_only=True)
class StackSettings(VerifierStack):
    """Settings of all services that ``foretoken serve`` starts on one machine."""

    gateway: GatewaySettings


def stack_settings(given: Given, folder: Path) -> StackSettings:
    """Return the checked settings of a stack with sockets in ``folder``.

    Hub ids are downloaded last.
    """
    address = f"unix:{folder}/verifier.sock"
    gateway = gateway_of_stack(given, verifiers=[address])
    _check_ports(given, gateway, are_free=not given.settings(ServeOptions).dry_run)
    part = verifier_stack(given, folder, address)
    gateway = gateway.model_copy(update={"model": part.verifier.model})
    return StackSettings(**vars(part), gateway=gateway)


def gateway_of_stack(given: Given, **more: Any) -> GatewaySettings:
    """Return the settings of the gateway that ``serve`` starts.

    It drains before the verifiers end.
    """
    from foretoken import stack
    from foretoken.tracing import check_endpoint

    settings = gateway_settings(given, drain_timeout_s=stack.GATEWAY_DRAIN_S, **more)
    check_endpoint(settings.otlp_traces_endpoint)
    return settings


def gateway_of_cluster(given: Given, file: Path) -> GatewaySettings:
    """Return the checked settings of the gateway in front of a cluster.

    ``file`` will name the verifiers.

    The verifiers' own settings are checked as far as this machine can. Hub ids are downloaded last.
    """
    gateway = gateway_of_stack(given, verifiers=[f"file:{file}"])
    _check_ports(given, gateway)
    verifier, options = verifier_settings(given, address="unix:/none", drafters=[]), given.settings(ServeOptions)
    events = verifier.kv_events, verifier.kv_events_replay, verifier.kv_events_topic
    kv_event_endpoints.check(*events, options.num_verifiers)
    stack_drafters.check_drafter_flags(given, options)
    given, _ = speculators.expand(given)
    stack_drafters.drafter_specs(given, options, [])
    return gateway.model_copy(update={"model": find_checkpoint(given)})


def _check_ports(given: Given, gateway: GatewaySettings, *, are_free: bool = True) -> None:
    """Raise ConfigError for ports that cannot be had.

    A MODEL that does not exist is reported first.
    """
    from foretoken import stack

    try:
        stack.check_ports(gateway.host, gateway.port, gateway.grpc_port, are_free=are_free)
    except ConfigError:
        # Often a server runs already. Another port would not help with a mistyped MODEL.
        hub.check_known(given.values["model"], given.settings(GatewayOptions).revision)
        raise


def words_of_verifier(given: Given) -> list[str]:
    """Return the ``serve`` command line that starts a cluster's verifier, without an address."""
    own = {name: value for name, value in given.values.items() if name not in _OF_COMMAND}
    return Given(own).words((DrafterSettings, VerifierSettings, ServeOptions))


def verifier_stack(given: Given, folder: Path, address: str) -> VerifierStack:
    """Return the checked settings of a verifier at ``address``, and of its drafters.

    The drafters have sockets in ``folder``.

    Hub ids are downloaded last.

    Raises ConfigError for settings that do not fit, CheckpointError if the model is incomplete.
    """
    options = given.settings(ServeOptions)
    verifier = verifier_settings(given, address=address, drafters=[])
    _check_executor(given, options)
    notices: list[str] = []
    verifier = on_device(options, verifier, notices)
    stack_drafters.check_drafter_flags(given, options)
    given, said = speculators.expand(given)
    options, notices = given.settings(ServeOptions), notices + said
    drafters: list[tuple[DrafterSpec, DrafterSettings]] = []
    for spec in stack_drafters.drafter_specs(given, options, notices):
        with stack_drafters.naming(given, spec):
            own_address = f"unix:{folder}/drafters/{spec.name}.sock"
            drafters.append((spec, stack_drafters.drafter_settings(given, spec, own_address)))
    model = find_checkpoint(given)
    endpoints = tuple(
        DrafterEndpoint(name=spec.name, address=settings.address)
        for spec, settings in drafters
        if not stack_drafters.is_inside(spec, options)
    )
    for name in ("config.json", "tokenizer.json"):
        if not (model / name).is_file():
            meant = f"; {model / 'target'} has one" if (model / "target" / name).is_file() else ""
            raise CheckpointError(f"{model} holds no checkpoint: there is no {name}{meant}")
    notices += check_target(model)
    for spec, settings in drafters:
        with stack_drafters.naming(given, spec):
            notices += stack_drafters.check_drafter(given, settings, model)
    verifier = verifier.model_copy(update={"model": model, "drafters": endpoints})
    return VerifierStack(options=options, verifier=verifier, drafters=drafters, notices=tuple(notices))


def gateway_settings(given: Given, **more: Any) -> GatewaySettings:
    """Return a gateway's settings with MODEL as given; ``find_checkpoint`` finds its folder."""
    settings = given.settings(GatewaySettings, **(_served_names(given) | more))
    # The gateway reads them again; an unreadable file must fail before a model is loaded.
    settings.check_access()
    read_credentials(settings)
    if settings.chat_template is not None:
        read_chat_template(settings.chat_template)
    return settings


def verifier_settings(given: Given, **more: Any) -> VerifierSettings:
    """Return a verifier's settings with MODEL as given; ``find_checkpoint`` finds its folder."""
    settings = given.settings(VerifierSettings, **(_served_names(given) | more))
    # As above; a server checks both again before it listens.
    check_listener(settings.address, read_credentials(settings), is_insecure=settings.insecure_links)
    settings.check_kv_events()
    return settings


def check_target(path: Path) -> tuple[str, ...]:
    """Check the target's files as loading would, without reading weights.

    Return what to say about them.
    """
    # Imported late: it loads numpy.
    from foretoken.models import target_check

    return target_check.check_target(path)


def find_checkpoint(given: Given) -> Path:
    """Return the folder of MODEL, which is a target; download a hub id."""
    folder = hub.resolve(given.values["model"], given.settings(GatewayOptions).revision).resolve()
    speculators.refuse_head(given.values["model"], folder)
    return folder


def _check_executor(given: Given, options: ServeOptions) -> None:
    """Raise ConfigError for options that have no effect with the executor."""
    if options.executor == "local":
        for name in sorted(OF_RAY & given.values.keys()):
            kind = next(kind for kind in COMMANDS["serve"] if name in kind.model_fields)
            raise ConfigError(f"{flag_of(kind, name)} has an effect with --executor ray only")


def _served_names(given: Given) -> dict[str, Any]:
    return {"served_model_names": given.values.get("served_model_names") or (hub.default_name(given.values["model"]),)}


def on_device(options: ServeOptions, settings: VerifierSettings, notices: list[str]) -> VerifierSettings:
    """Return the settings for this machine. Needs no library.

    Raises ConfigError for what it cannot run.
    """
    from foretoken.mps import DRIVER

    has_driver = DRIVER.exists()
    if settings.device == "cuda" and not has_driver:
        raise ConfigError("--device cuda: there is no NVIDIA GPU here, or no driver for it")
    on_cpu = settings.device == "cpu" or not has_driver
    if options.mps == "on" and on_cpu:
        raise ConfigError("--mps on: models do not run on an NVIDIA GPU here")
    if not on_cpu:
        return settings
    share = VerifierSettings.model_fields["mem_fraction_static"]
    if settings.mem_fraction_static != share.default:
        # SGLang's command lines have it, and without a GPU it can only mean less.
        notices.append("--mem-fraction-static: models run on the CPU here; --max-total-tokens limits the cache")
        settings = settings.model_copy(update={"mem_fraction_static": share.default})
    refuse_gpu_flags(settings)
    return settings
