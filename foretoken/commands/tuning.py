"""What ``foretoken tune`` starts, and the config file that it writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafter_svc.algorithms import ALGORITHMS
from drafter_svc.config import DrafterSettings
from drafter_svc.drafter_spec import DrafterSpec, spec_text
from foretoken.commands.config_file import YAML_SUFFIXES, Value
from foretoken.commands.given import Given
from foretoken.commands.options import ServeOptions, TuneOptions, settings_of_command
from foretoken.commands.service_settings import verifier_stack
from foretoken.errors import ConfigError
from foretoken.tune.candidates import AUTO, PLAIN, ShapeFlags, TunedDrafter, bounds_of
from foretoken.tune.choice import LimitedCandidate
from foretoken.tune.run import check_files
from gateway.config import GatewaySettings
from verifier_svc.config import DEFAULT_NODES, VerifierSettings

_SHAPE = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
# Flags of ``serve`` that tuning finds.
_FOUND = {*_SHAPE, "speculative_max_batch_size"}
# Flags of ``serve`` that name drafters.
_OF_DRAFTERS = {"drafters", "speculative_algorithm", "speculative_draft_model_path", "speculative_token_map"}
# The gateway's flags that say what requests mean; the others are of its network and its callers.
_OF_REQUESTS = {"chat_template", "generation_config"}
# Flags of the others that are of the network and of callers.
_OF_NETWORK = {"kv_events", "kv_events_replay", "kv_events_topic", "insecure_links", "served_model_names"} | {
    name for name in VerifierSettings.model_fields if name.startswith("link_")
}


@dataclass(frozen=True, slots=True)
class Trial:
    """The server to start.

    Attributes:
        words: its command line, without ports.
        specs: its drafters.
        bounds: of its trees; 0 nodes: as many as it chooses by itself.
    """

    words: list[str]
    specs: list[DrafterSpec]
    bounds: ShapeFlags

    @property
    def drafters(self) -> list[TunedDrafter]:
        return [TunedDrafter(spec.name, spec.row.runs_model) for spec in self.specs]


def trial_of(given: Given, options: TuneOptions) -> tuple[Trial, tuple[str, ...]]:
    """Return the server to start for MODEL, and what to say about its settings.

    Raises ConfigError and CheckpointError as a start would. A hub id is downloaded.
    """
    least = ShapeFlags(1, int(VerifierSettings.model_fields["speculative_eagle_topk"].default), DEFAULT_NODES)
    kinds = (DrafterSettings, VerifierSettings, ServeOptions)
    wanted = {name for kind in kinds for name in kind.model_fields} - _OF_NETWORK - _FOUND | _OF_REQUESTS
    values: dict[str, Any] = {name: value for name, value in given.values.items() if name in wanted}
    stack = verifier_stack(Given(values), Path("/none"), "unix:/none")
    bounds = bounds_of(options.draft_shapes if stack.has_model else (), least)
    if bounds.num_draft_tokens == DEFAULT_NODES:
        # ``auto`` is measured as a server without the flag would choose.
        bounds = bounds._replace(num_draft_tokens=0)
    values |= dict(zip(_SHAPE[1:], bounds[1:], strict=True))
    ignored = [_flag(name) for name in sorted(_FOUND & given.values.keys())]
    notices = (f"{', '.join(ignored)}: tuning finds it, so what is given has no effect",) if ignored else ()
    words = Given(values).words((GatewaySettings, *kinds))
    return Trial(words, [spec for spec, _ in stack.drafters], bounds), (*stack.notices, *notices)


def drafters_of(algorithms: Mapping[str, str]) -> list[TunedDrafter]:
    """Return a running server's drafters from their algorithms by name.

    An unknown algorithm may have a model.
    """
    return [
        TunedDrafter(name, algorithm not in ALGORITHMS or ALGORITHMS[algorithm].runs_model)
        for name, algorithm in algorithms.items()
    ]


def config_of(given: Given, choice: LimitedCandidate, trial: Trial | None) -> dict[str, Value | bool]:
    """Return the settings with which ``foretoken serve`` runs what was chosen.

    They are named by the keys of a config file.

    They include what the user gave, except secrets. ``trial`` None: the server was started by
    somebody else, so its model and drafters are not known.
    """
    candidate = choice.candidate
    found: dict[str, Value | bool] = {}
    if trial is not None:
        specs = [spec for spec in trial.specs if candidate == AUTO or spec.name in candidate.drafters]
        found = _given_values(given, {spec.row.field for spec in specs}, keeps_drafters=candidate == AUTO)
        if candidate.drafters:
            found["drafter"] = [spec_text(spec) for spec in specs]
    if candidate == PLAIN:
        return found | {"speculative-algorithm": "NONE"}
    if candidate.shape is not None:
        found |= _shape_values(_SHAPE, candidate.shape)
    elif trial is not None:
        # The bounds within which it was measured.
        found |= _shape_values(_SHAPE[1:], trial.bounds[1:])
    if choice.max_batch_size:
        found["speculative-max-batch-size"] = str(choice.max_batch_size)
    return found


def _given_values(given: Given, algorithms: set[str], *, keeps_drafters: bool) -> dict[str, Value | bool]:
    """Return the user's ``serve`` flags, without secrets and without what tuning finds.

    ``algorithms``: the fields of those whose options are kept. ``keeps_drafters``: whether flags
    that name drafters are kept.
    """
    left_out = _FOUND if keeps_drafters else _FOUND | _OF_DRAFTERS
    values: dict[str, Value | bool] = {}
    for setting in settings_of_command("serve"):
        name, *option = setting.path
        value = given.values.get(name)
        if option:
            value = (value or {}).get(option[0]) if name in algorithms else None
        if value is not None and not setting.shown.secret and name not in left_out:
            values[setting.key] = _as_value(value)
    return values


def _shape_values(names: Sequence[str], numbers: Sequence[int]) -> dict[str, Value | bool]:
    return {_flag(name).removeprefix("--"): str(number or "auto") for name, number in zip(names, numbers, strict=True)}


def check_options(given: Given, options: TuneOptions) -> None:
    """Raise ConfigError for options that do not go together, and for files that cannot be written.

    Flags of ``serve`` have an effect on a server that is started only; what the
    environment says is for other servers.
    """
    if (options.model is None) == (options.url is None):
        raise ConfigError("give either MODEL, to start a server for it, or --url of a running server")
    if options.write_config.suffix not in YAML_SUFFIXES:
        raise ConfigError(f"--write-config: expected a name that ends in .yaml, got {options.write_config}")
    check_files(options)
    in_environment = {setting.path[0] for setting in settings_of_command("serve") if setting.shown.env}
    others = given.values.keys() - TuneOptions.model_fields.keys() - in_environment
    if options.url is not None and others:
        raise ConfigError(f"{', '.join(map(_flag, sorted(others)))}: no effect with --url, whose server runs already")


def _as_value(value: Any) -> Value | bool:
    if isinstance(value, bool):
        return value
    return [str(item) for item in value] if isinstance(value, (tuple, list)) else str(value)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
