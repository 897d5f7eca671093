"""Which drafters the flags of a stack or a verifier name, with their settings and checks.

Functions raise ConfigError and CheckpointError that name the flag.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from drafter_svc.algorithms import ALGORITHMS, find_algorithm
from drafter_svc.config import DrafterSettings
from drafter_svc.drafter_spec import DrafterSpec, name_in, parse_spec, spec_text
from foretoken import hub
from foretoken.commands.given import Given
from foretoken.commands.options import ServeOptions
from foretoken.config import at_fault, build, flag_of, parse_pairs
from foretoken.drafter_names import check_together
from foretoken.errors import ConfigError

# The algorithm of the head that the demo model brings along.
DEMO_ALGORITHM = "EAGLE3"


def drafters_of_verifier(given: Given) -> tuple[list[dict[str, str]], list[DrafterSpec]]:
    """Return the drafters that a verifier attaches to, as pairs, and those in its process.

    Raises ConfigError that names the flag at fault.
    """
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


def check_drafter(given: Given, settings: DrafterSettings, target: Path) -> tuple[str, ...]:
    """Check a drafter's files as attaching would, without reading weights.

    Return what to say about them.
    """
    path, token_map = settings.speculative_draft_model_path, settings.speculative_token_map
    with at_fault(_drafter_option(given, "algorithm" if path is None else "model")):
        notes = ALGORITHMS[settings.algorithm].check_files(path, target)
    if token_map is not None:
        # Imported late: it loads numpy and the formats of checkpoints.
        from drafter_svc.checkpoint.model_folder import check_map

        with at_fault(_drafter_option(given, "token_map")):
            check_map(token_map, target, path or target)
    return notes


def check_drafter_flags(given: Given, options: ServeOptions) -> None:
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

    The demo model brings its own drafters if no flag names one, and its own head for
    --speculative-algorithm EAGLE3.

    Raises ConfigError for flags that exclude each other, or for a drafter that does not fit.
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
    elif hub.is_demo(given.values["model"]) and not (path or token_map) and _is_demos(options.speculative_algorithm):
        specs = _demo_drafters(hub.demo_folder())
        if options.speculative_algorithm:
            specs = [spec for spec in specs if spec.algorithm == DEMO_ALGORITHM]
    else:
        name, path = _meant(options.speculative_algorithm or "NGRAM", path, given.values["model"], notices)
        fields = {"name": name.lower(), "algorithm": name, "model": path, "token_map": token_map}
        specs = [build(DrafterSpec, fields)]
    check_together([spec.name for spec in specs])
    for spec in specs:
        if is_inside(spec, options):
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


def naming(given: Given, spec: DrafterSpec) -> AbstractContextManager[None]:
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


def _is_demos(algorithm: str | None) -> bool:
    """Return whether the demo model has all that ``algorithm``, or the choice of one, needs."""
    return not algorithm or find_algorithm(algorithm).name == DEMO_ALGORITHM


def _demo_drafters(folder: Path) -> list[DrafterSpec]:
    """Return the demo's drafters: a trained head, and n-grams."""
    token_map = folder / "token_map.safetensors"
    return [
        DrafterSpec(name="eagle3", algorithm=DEMO_ALGORITHM, model=str(folder / "eagle3"), token_map=token_map),
        DrafterSpec(name="ngram", algorithm="NGRAM"),
    ]


def is_inside(spec: DrafterSpec, options: ServeOptions) -> bool:
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
