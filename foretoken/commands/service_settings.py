"""Each service's settings, from the flags of the command that starts it; and what is known to be wrong before that.

A command's parameters bear the names of the settings' fields, which is how ``context.params`` becomes settings. Raises
ConfigError and CheckpointError that name the flag.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from drafter_svc.config import DrafterSettings
    from foretoken.drafter_spec import DrafterSpec
    from gateway.config import GatewaySettings
    from verifier_svc.config import VerifierSettings

_NGRAM_PREFIX = "ngram_"


def gateway_settings(
    context: typer.Context, checkpoint: dict[str, Any], verifiers: list[str], **more: float
) -> GatewaySettings:
    from foretoken.config import build
    from gateway.config import GatewaySettings, read_chat_template

    given = given_flags(context, GatewaySettings) | checkpoint | {"verifiers": verifiers} | more
    settings = build(GatewaySettings, given)
    # Both are read again by the gateway: that one cannot be is known before a model is loaded.
    settings.admin_key()
    if settings.chat_template is not None:
        read_chat_template(settings.chat_template)
    return settings


def verifier_settings(
    context: typer.Context, checkpoint: dict[str, Any], address: str, endpoints: list[str]
) -> VerifierSettings:
    from foretoken.config import build, parse_pairs
    from verifier_svc.config import VerifierSettings

    drafters = [parse_pairs(text, "--drafter") for text in endpoints]
    given = given_flags(context, VerifierSettings)
    return build(VerifierSettings, given | checkpoint | {"address": address, "drafters": drafters})


def drafter_specs(context: typer.Context) -> list[DrafterSpec]:
    """The drafters of a stack: those of --drafter, or the one of --speculative-algorithm. Raises ConfigError.

    The demo model has its own drafters if no flag names one.
    """
    from foretoken import hub
    from foretoken.config import build
    from foretoken.drafter_spec import DrafterSpec, algorithm_of, check_together, parse_spec, spec_text
    from foretoken.errors import ConfigError

    given, algorithm = context.params["drafters"], context.params["speculative_algorithm"]
    path, token_map = (context.params[f"speculative_{name}"] for name in ("draft_model_path", "token_map"))
    if given:
        specs = [parse_spec(text) for text in given]
        keys = {"algorithm": algorithm, "draft-model-path": path, "token-map": token_map}
        if doubled := [f"--speculative-{key}" for key, value in keys.items() if value]:
            raise ConfigError(
                f"{', '.join(doubled)} beside --drafter, whose keys say the same: {', '.join(DrafterSpec.model_fields)}"
            )
    elif algorithm == "NONE":
        specs = []
    elif hub.is_demo(context.params["model"]) and not (algorithm or path or token_map):
        specs = _demo_drafters(hub.demo_folder())
    else:
        name = algorithm_of(algorithm or "NGRAM")
        fields = {"name": name.lower(), "algorithm": name, "model": path, "token_map": token_map}
        specs = [build(DrafterSpec, fields)]
    check_together([spec.name for spec in specs])
    for spec in specs:
        if is_inside(context, spec):
            # As it is handed to the verifier.
            spec_text(spec)
    if all(spec.algorithm != "NGRAM" for spec in specs):
        refuse_ngram_flags(context, "a drafter of --speculative-algorithm NGRAM")
    return specs


def _demo_drafters(folder: Path) -> list[DrafterSpec]:
    """The trained head in a process of its own, and n-grams inside the verifier."""
    from foretoken.drafter_spec import DrafterSpec

    token_map = folder / "token_map.safetensors"
    return [
        DrafterSpec(name="eagle3", algorithm="EAGLE3", model=str(folder / "eagle3"), token_map=token_map),
        DrafterSpec(name="ngram", algorithm="NGRAM", placement="in-process"),
    ]


def is_inside(context: typer.Context, spec: DrafterSpec) -> bool:
    """Whether a stack's drafter runs in the verifier's process."""
    return bool((spec.placement or context.params["drafter_placement"]) == "in-process")


def model_drafters(context: typer.Context) -> list[str]:
    """Names of the drafters that run a model, on the verifier's GPU if it is on one."""
    return [spec.name for spec in drafter_specs(context) if spec.algorithm != "NGRAM"]


def drafter_settings(context: typer.Context, spec: DrafterSpec, address: str) -> DrafterSettings:
    """Of one drafter that a server starts or holds. A model's hub id is downloaded."""
    from drafter_svc.config import DrafterSettings
    from foretoken import hub
    from foretoken.config import at_fault, build

    given: dict[str, Any] = spec.model_dump(include={"name", "algorithm", "threads"}) | {"address": address}
    if spec.model is not None:
        with at_fault(_drafter_option(context, "model")):
            given["speculative_draft_model_path"] = hub.resolve(spec.model).resolve()
    if spec.token_map is not None:
        given["speculative_token_map"] = spec.token_map.resolve()
    if not spec.coupled_noise:
        given["disable_coupled_noise"] = True
    if spec.algorithm == "NGRAM":
        given["ngram"] = given_ngram_flags(context)
    else:
        given["device"] = context.params["device"] or "auto"
        given["disable_cuda_graph"] = context.params["disable_cuda_graph"]
    return build(DrafterSettings, given)


def check_drafters(context: typer.Context, drafters: list[DrafterSettings], target: Path) -> None:
    """What a drafter would find in its files when it is attached, as far as it is known without reading a weight."""
    from foretoken.config import at_fault

    for settings in drafters:
        if settings.algorithm == "NGRAM":
            continue
        # Numpy and the formats of checkpoints.
        from drafter_svc.checkpoint.model_folder import check_folder, check_map

        path, token_map = settings.speculative_draft_model_path, settings.speculative_token_map
        with at_fault(_drafter_option(context, "algorithm" if path is None else "model")):
            check_folder(settings.algorithm, path, target)
        if token_map is not None:
            with at_fault(_drafter_option(context, "token_map")):
                check_map(token_map, target, path or target)


def _drafter_option(context: typer.Context, key: str) -> str:
    """What a drafter's key is called where it was set."""
    flags_of_keys = {"algorithm": "algorithm", "model": "draft-model-path", "token_map": "token-map"}
    return f"--drafter {key}" if context.params["drafters"] else f"--speculative-{flags_of_keys[key]}"


def given_flags(context: typer.Context, settings: Any) -> dict[str, Any]:
    """The flags that were given and are fields of ``settings`` by name."""
    given = {name: value for name, value in context.params.items() if value is not None}
    return {name: value for name, value in given.items() if name in settings.model_fields}


def given_ngram_flags(context: typer.Context) -> dict[str, Any]:
    """The flags of the n-gram drafter that were given, by the names of its settings."""
    return {
        name.removeprefix(_NGRAM_PREFIX): value
        for name, value in context.params.items()
        if name.startswith(_NGRAM_PREFIX) and value is not None
    }


def refuse_ngram_flags(context: typer.Context, needed: str) -> None:
    """A flag without effect is a mistake that the user should know of."""
    from foretoken.config import flag_of
    from foretoken.errors import ConfigError

    for name in given_ngram_flags(context):
        raise ConfigError(f"{flag_of(name, 'ngram')} has an effect only with {needed}")


def find_checkpoint(context: typer.Context) -> dict[str, Any]:
    """Folder and served name of MODEL, downloaded if it is a hub id."""
    from foretoken import hub

    model = context.params["model"]
    folder = hub.resolve(model, context.params["revision"]).resolve()
    return {"model": folder, "served_model_name": context.params["served_model_name"] or hub.default_name(model)}


def check_checkpoint(folder: Path) -> None:
    """What every service would say one after the other, before any is started."""
    from foretoken.errors import CheckpointError

    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} holds no checkpoint: there is no {name}")
