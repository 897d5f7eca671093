"""Build and check each service's settings from the user's values, before anything starts.

Functions raise ConfigError and CheckpointError that name the flag.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from drafter_svc.algorithms import ALGORITHMS, algorithm_names, find_algorithm
from drafter_svc.config import DrafterSettings, with_options
from drafter_svc.drafter_spec import DrafterSpec, name_in, parse_spec, spec_text
from foretoken import hub
from foretoken.address import Address
from foretoken.bench.settings import BenchSettings
from foretoken.commands import kv_event_endpoints, speculators
from foretoken.commands.given import Given
from foretoken.config import Flag, Setting, Settings, at_fault, build, flag_of, parse_pairs, settings_of
from foretoken.drafter_names import check_together
from foretoken.errors import CheckpointError, ConfigError
from foretoken.links import check_listener, read_credentials
from foretoken.tune.settings import TuneSettings
from gateway.config import GatewaySettings, read_chat_template
from verifier_svc.config import DrafterEndpoint, VerifierSettings, refuse_gpu_flags

LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"], Field(description="Log to stderr from this level up.")
]
DryRun = Annotated[bool, Field(description="Print the plan of memory and draft trees, and start nothing.")]


class LogOptions(Settings):
    """Additional options of every command that starts a service."""

    log_level: LogLevel = "info"


class GatewayOptions(LogOptions):
    """Additional options of ``foretoken gateway``."""

    revision: Annotated[str | None, Flag(unset="main")] = Field(
        default=None, description="Branch, tag or commit on the hub."
    )


@with_options
class VerifierOptions(GatewayOptions):
    """Additional options of ``foretoken verifier``, and of algorithms in its process."""

    dry_run: DryRun = False


class ServeOptions(GatewayOptions):
    """Additional options of ``foretoken serve``."""

    log_level: LogLevel = "warning"
    speculative_algorithm: Annotated[str | None, Flag(choices=(*algorithm_names(), "NONE"), unset="NGRAM")] = Field(
        default=None, description="Drafter to start; NONE: plain decode."
    )
    drafters: Annotated[
        tuple[str, ...],
        Flag(
            "--drafter",
            metavar="name=NAME,algorithm=ALGORITHM[,model=MODEL][,token_map=FILE][,threads=N][,coupled_noise=false]"
            "[,placement=process|in-process]",
            unset="none",
        ),
    ] = Field(
        default=(),
        description="A drafter to start, instead of --speculative-algorithm; may be given several times.",
    )
    drafter_placement: Literal["auto", "process", "in-process"] = Field(
        default="auto",
        description="Where drafters without a placement run: in a separate process, or in the verifier's, without "
        "transfers and without isolation; auto: n-grams in the verifier's, all others in a separate one.",
    )
    mps: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="NVIDIA's multi-process service for verifier and drafters on one GPU; auto: if useful and "
        "available. off isolates their faults but costs time at each step.",
    )
    dry_run: DryRun = False
    executor: Literal["local", "ray"] = Field(
        default="local",
        description="Where verifiers run. local: one beside the gateway; ray: in a Ray cluster (foretoken[ray]), each "
        "with its drafters in a placement group.",
    )
    num_verifiers: int = Field(default=1, ge=1, le=1024, description="Verifiers of --executor ray.")
    ray_address: Annotated[str | None, Flag(metavar="auto or HOST:PORT", unset="a cluster of this machine only")] = (
        Field(default=None, description="Ray cluster to join; auto: the one that this machine belongs to.")
    )
    # Of a verifier in a Ray cluster: no gateway is started.
    verifier_address: Annotated[Address | None, Flag(hidden=True)] = Field(
        default=None, description="Start only a verifier that listens there, and its drafters."
    )


class DoctorOptions(ServeOptions):
    """Additional options of ``foretoken doctor``, which takes those of ``serve`` too."""

    model: Annotated[Path | None, Flag("MODEL")] = Field(
        default=None, description="Folder or hub id of the checkpoint; without one only the machine is checked."
    )
    as_json: Annotated[bool, Flag("--json")] = Field(default=False, description="Print a JSON object.")


class TuneOptions(TuneSettings):
    """Options of ``foretoken tune``, which takes those of ``serve`` too."""

    model: Annotated[str | None, Flag("MODEL")] = Field(
        default=None, description="Folder or hub id of the checkpoint to serve."
    )


# The settings classes of each command; of two fields with one name the later counts.
COMMANDS: dict[str, tuple[type[Settings], ...]] = {
    "serve": (GatewaySettings, DrafterSettings, VerifierSettings, ServeOptions),
    "gateway": (GatewaySettings, GatewayOptions),
    "verifier": (VerifierSettings, VerifierOptions),
    "drafter": (DrafterSettings, LogOptions),
    "bench": (BenchSettings,),
}
# Settings that ``serve`` decides itself, or that need services started one by one.
_NOT_OF_SERVE = {
    *("verifiers", "speculative_metrics", "max_concurrent_requests"),
    *("worker_socket", "liveness_socket", "probe_key"),
    *("address", "draft_timeout_ms", "name", "algorithm", "target", "disable_coupled_noise"),
}
# Settings of ``serve`` that have no effect on one machine.
_OF_RAY = {
    *("num_verifiers", "ray_address", "insecure_links", "drain_timeout_s"),
    *("discovery_interval_s", "routing_load_bound"),
}
# Options of ``serve`` that say where and whether services start.
_OF_START = _OF_RAY | {"executor", "dry_run", "verifier_address"}
# Commands that take the flags of ``serve`` and their own.
_OVER_SERVE: dict[str, type[Settings]] = {"doctor": DoctorOptions, "tune": TuneOptions}
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
        """Whether any drafter has a model."""
        return any(spec.row.runs_model for spec, _ in self.drafters)

    def is_inside(self, spec: DrafterSpec) -> bool:
        """Return whether a drafter runs in the verifier's process."""
        return _is_inside(spec, self.options)


@dataclass(frozen=True, kw_only=True)
class StackSettings(VerifierStack):
    """Settings of all services that ``foretoken serve`` starts on one machine."""

    gateway: GatewaySettings


def settings_of_command(command: str) -> Iterable[Setting]:
    """Return all settings that a command takes."""
    own = _OVER_SERVE.get(command)
    kinds: tuple[type[Settings], ...] = COMMANDS[command] if own is None else (*COMMANDS["serve"], own)
    found = {setting.path: setting for kind in kinds for setting in settings_of(kind)}
    left_out = _NOT_OF_SERVE | _OF_START if own is not None else _NOT_OF_SERVE if command == "serve" else set()
    return [setting for path, setting in found.items() if path[0] not in left_out]


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
    _check_drafter_flags(given, options)
    given, _ = speculators.expand(given)
    drafter_specs(given, options, [])
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
    """
    options = given.settings(ServeOptions)
    verifier = verifier_settings(given, address=address, drafters=[])
    _check_executor(given, options)
    notices: list[str] = []
    verifier = on_device(options, verifier, notices)
    _check_drafter_flags(given, options)
    given, said = speculators.expand(given)
    options, notices = given.settings(ServeOptions), notices + said
    drafters: list[tuple[DrafterSpec, DrafterSettings]] = []
    for spec in drafter_specs(given, options, notices):
        with _naming(given, spec):
            drafters.append((spec, drafter_settings(given, spec, f"unix:{folder}/drafters/{spec.name}.sock")))
    model = find_checkpoint(given)
    endpoints = tuple(
        DrafterEndpoint(name=spec.name, address=settings.address)
        for spec, settings in drafters
        if not _is_inside(spec, options)
    )
    for name in ("config.json", "tokenizer.json"):
        if not (model / name).is_file():
            raise CheckpointError(f"{model} holds no checkpoint: there is no {name}")
    notices += check_target(model)
    for spec, settings in drafters:
        with _naming(given, spec):
            check_drafter(given, settings, model)
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


def drafters_of_verifier(given: Given) -> tuple[list[dict[str, str]], list[DrafterSpec]]:
    """Return the drafters that a verifier attaches to, as pairs, and those in its process."""
    texts = given.values.get("drafters", ())
    held = [parse_spec(text) for text in texts if "address=" not in text]
    if any(spec.placement is not None for spec in held):
        raise ConfigError("--drafter: placement is for foretoken serve; here drafters run in the verifier's process")
    _check_options_given(given, held, "--drafter name=NAME,algorithm=")
    return [parse_pairs(text, "--drafter") for text in texts if "address=" in text], held


def drafter_settings(given: Given, spec: DrafterSpec, address: str) -> DrafterSettings:
    """Return the settings of a drafter that a server starts or runs. A hub id is downloaded."""
    values: dict[str, Any] = spec.model_dump(include={"name", "algorithm", "threads"}) | {"address": address}
    if spec.model is not None:
        with at_fault(_drafter_option(given, "model")):
            values["speculative_draft_model_path"] = hub.resolve(spec.model).resolve()
    if spec.token_map is not None:
        with at_fault(_drafter_option(given, "token_map")):
            # Not resolved: the hub's cache links to files without extensions, which say the format.
            values["speculative_token_map"] = hub.resolve_file(str(spec.token_map)).absolute()
    if not spec.coupled_noise:
        values["disable_coupled_noise"] = True
    # The other flags that drafters share with the verifier are the verifier's only.
    shared = {"device", "disable_cuda_graph", spec.row.field} & spec.row.keys | {"otlp_traces_endpoint"}
    return build(DrafterSettings, values | {name: given.values[name] for name in shared if name in given.values})


def check_drafter(given: Given, settings: DrafterSettings, target: Path) -> None:
    """Check a drafter's files as attaching would, without reading weights."""
    path, token_map = settings.speculative_draft_model_path, settings.speculative_token_map
    with at_fault(_drafter_option(given, "algorithm" if path is None else "model")):
        ALGORITHMS[settings.algorithm].check_files(path, target)
    if token_map is not None:
        # Imported late: it loads numpy and the formats of checkpoints.
        from drafter_svc.checkpoint.model_folder import check_map

        with at_fault(_drafter_option(given, "token_map")):
            check_map(token_map, target, path or target)


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
        for name in sorted(_OF_RAY & given.values.keys()):
            kind = next(kind for kind in COMMANDS["serve"] if name in kind.model_fields)
            raise ConfigError(f"{flag_of(kind, name)} has an effect with --executor ray only")


def _served_names(given: Given) -> dict[str, Any]:
    return {"served_model_names": given.values.get("served_model_names") or (hub.default_name(given.values["model"]),)}


def _check_drafter_flags(given: Given, options: ServeOptions) -> None:
    """Raise ConfigError for drafter flags that are wrong for any MODEL, before asking a hub."""
    _parse_drafters(options.drafters)
    for row in ALGORITHMS.values():
        if row.options and row.field in given.values:
            values: dict[str, Any] = {
                "address": "unix:/none",
                "algorithm": row.name,
                row.field: given.values[row.field],
            }
            if row.needs_model:
                values["speculative_draft_model_path"] = "none"
            build(DrafterSettings, values)


def drafter_specs(given: Given, options: ServeOptions, notices: list[str]) -> list[DrafterSpec]:
    """Return a stack's drafters, from --drafter or --speculative-algorithm.

    Add what to say to ``notices``.

    The demo model brings its own drafters if no flag names one.
    """
    path, token_map = (given.values.get(f"speculative_{name}") for name in ("draft_model_path", "token_map"))
    if options.drafters:
        specs = _parse_drafters(options.drafters)
        keys = {"algorithm": options.speculative_algorithm, "draft-model-path": path, "token-map": token_map}
        if doubled := [f"--speculative-{key}" for key, value in keys.items() if value]:
            raise ConfigError(
                f"{', '.join(doubled)} and --drafter exclude each other; "
                f"keys of --drafter: {', '.join(DrafterSpec.model_fields)}"
            )
    elif options.speculative_algorithm == "NONE":
        specs = []
    elif hub.is_demo(given.values["model"]) and not (options.speculative_algorithm or path or token_map):
        specs = _demo_drafters(hub.demo_folder())
    else:
        name, path = _meant(options.speculative_algorithm or "NGRAM", path, given.values["model"], notices)
        fields = {"name": name.lower(), "algorithm": name, "model": path, "token_map": token_map}
        specs = [build(DrafterSpec, fields)]
    check_together([spec.name for spec in specs])
    for spec in specs:
        if _is_inside(spec, options):
            # Check that the verifier's command line can express it.
            spec_text(spec)
    _check_options_given(given, specs, "a drafter of --speculative-algorithm ")
    return specs


def _parse_drafters(texts: Sequence[str]) -> list[DrafterSpec]:
    """Parse --drafter flags. A mistake names its drafter by name, else by position."""
    specs = []
    for position, text in enumerate(texts, 1):
        with at_fault(f"drafter {name_in(text) or f'{position} of {len(texts)}'}"):
            specs.append(parse_spec(text))
    return specs


def _naming(given: Given, spec: DrafterSpec) -> AbstractContextManager[None]:
    """Return a context that prefixes ConfigErrors with the drafter's name if --drafter gave it."""
    return at_fault(f"drafter {spec.name}") if given.values.get("drafters") else nullcontext()


def _meant(typed: str, path: str | None, target: str, notices: list[str]) -> tuple[str, str | None]:
    """Return the algorithm that was meant and its model.

    To SGLang, EAGLE and NEXTN are one: whether there are MTP layers in the target's checkpoint, or
    a head in a folder of its own, follows from the draft model.
    """
    name = find_algorithm(typed).name
    if typed.upper() not in ("EAGLE", "NEXTN"):
        return name, path
    if path is None or path == target or hub.is_same_folder(path, target):
        if name != "MTP":
            notices.append(f"--speculative-algorithm {typed}: the target's MTP layers draft, as with MTP")
        return "MTP", None
    if name != "EAGLE":
        notices.append(f"--speculative-algorithm {typed}: the head in {path} drafts, as with EAGLE")
    return "EAGLE", path


def _demo_drafters(folder: Path) -> list[DrafterSpec]:
    """Return the demo's drafters: a trained head, and n-grams."""
    token_map = folder / "token_map.safetensors"
    return [
        DrafterSpec(name="eagle3", algorithm="EAGLE3", model=str(folder / "eagle3"), token_map=token_map),
        DrafterSpec(name="ngram", algorithm="NGRAM"),
    ]


def _is_inside(spec: DrafterSpec, options: ServeOptions) -> bool:
    placement = spec.placement or options.drafter_placement
    return (spec.row.placement if placement == "auto" else placement) == "in-process"


def _drafter_option(given: Given, key: str) -> str:
    """Return the flag or key that set a drafter's ``key``."""
    flags_of_keys = {"algorithm": "algorithm", "model": "draft-model-path", "token_map": "token-map"}
    return f"--drafter {key}" if given.values.get("drafters") else f"--speculative-{flags_of_keys[key]}"


def _check_options_given(given: Given, specs: Iterable[DrafterSpec], needed: str) -> None:
    """Raise ConfigError for options of an algorithm that no drafter has, which are a mistake.

    ``needed``: what would give them an effect, without the algorithm's name.
    """
    used = {spec.algorithm for spec in specs}
    for row in ALGORITHMS.values():
        for option in given.values.get(row.field, {}) if row.name not in used else ():
            flag = flag_of(DrafterSettings, row.field, option)
            raise ConfigError(f"{flag} has an effect only with {needed}{row.name}")


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
