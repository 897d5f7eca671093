"""What each command takes: its services' settings, and options of its own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from drafter_svc.algorithms import algorithm_names
from drafter_svc.config import DrafterSettings, with_options
from foretoken.address import Address
from foretoken.bench.settings import BenchSettings
from foretoken.config import Flag, Setting, Settings, settings_of
from foretoken.tune.settings import TuneSettings
from gateway.config import GatewaySettings
from verifier_svc.config import VerifierSettings

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
    """Additional options of ``foretoken doctor``, which takes the options of ``serve`` too."""

    model: Annotated[Path | None, Flag("MODEL")] = Field(
        default=None, description="Folder or hub id of the checkpoint; without one only the machine is checked."
    )
    as_json: Annotated[bool, Flag("--json")] = Field(default=False, description="Print a JSON object.")


class TuneOptions(TuneSettings):
    """Options of ``foretoken tune``, which takes the options of ``serve`` too."""

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
OF_RAY = {
    *("num_verifiers", "ray_address", "insecure_links", "drain_timeout_s"),
    *("discovery_interval_s", "routing_load_bound"),
}
# Options of ``serve`` that say where and whether services start.
_OF_START = OF_RAY | {"executor", "dry_run", "verifier_address"}
# Commands that take the flags of ``serve`` and their own.
_OVER_SERVE: dict[str, type[Settings]] = {"doctor": DoctorOptions, "tune": TuneOptions}


def settings_of_command(command: str) -> Iterable[Setting]:
    """Return all settings that a command takes."""
    own = _OVER_SERVE.get(command)
    kinds: tuple[type[Settings], ...] = COMMANDS[command] if own is None else (*COMMANDS["serve"], own)
    found = {setting.path: setting for kind in kinds for setting in settings_of(kind)}
    left_out = _NOT_OF_SERVE | _OF_START if own is not None else _NOT_OF_SERVE if command == "serve" else set()
    return [setting for path, setting in found.items() if path[0] not in left_out]
