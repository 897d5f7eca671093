"""Set up target and drafter from a repository of vLLM's ``speculators``.

It holds a head and names its target.

The head's ``config.json`` says so under ``speculators_config``: the algorithm, the ``verifier``
(the target) and how many tokens other servers propose with it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from drafter_svc.algorithms import find_algorithm
from foretoken import hub
from foretoken.commands.given import Given
from foretoken.errors import CheckpointError, ConfigError
from foretoken.json_file import read_object


class _Proposal(BaseModel):
    proposal_type: str
    speculative_tokens: int | None = None
    accept_tolerance: float = 0.0
    verifier_accept_k: int = 1


class _Verifier(BaseModel):
    name_or_path: str | None = None
    architectures: list[str] = Field(default_factory=list)


class _SpeculatorsConfig(BaseModel):
    """The fields that matter here, under their own names; all others are ignored."""

    algorithm: str
    verifier: _Verifier = Field(default_factory=_Verifier)
    proposal_methods: list[_Proposal] = Field(default_factory=list)
    default_proposal_method: str | None = None

    @property
    def proposal(self) -> _Proposal | None:
        """The default method, or else the first."""
        methods, default = self.proposal_methods, self.default_proposal_method
        named = [method for method in methods if method.proposal_type == default]
        return next(iter(named or methods), None)


def expand(given: Given) -> tuple[Given, list[str]]:
    """Return the values with the target as MODEL and the head as drafter.

    The second result: notices for the user.

    Other values come back unchanged. A drafter that the user has named wins over the head.
    Fetches ``config.json`` of head and target, and with a revision the whole head.

    Raises:
        ConfigError: the config names no target, or one that cannot be found, or its algorithm is
            not supported.
    """
    values = dict(given.values)
    typed, revision = values["model"], values.get("revision")
    raw = _read(hub.config_file(typed, revision))
    if "speculators_config" not in raw:
        return given, []
    config, algorithm = _parse(typed, raw)
    target, target_config = _target(typed, config, algorithm)
    notices = [f"{typed} is a draft head of algorithm {algorithm}; the target is {target}, which its config.json names"]
    notices += _unlike(typed, config.verifier, target, target_config)
    chosen = values.get("speculative_algorithm")
    if not values.get("drafters") and (chosen is None or _is_algorithm(chosen, algorithm)):
        # --revision is the head's, not the target's, so the head is named by its folder.
        head = typed if revision is None else str(hub.resolve(typed, revision).resolve())
        values.setdefault("speculative_draft_model_path", head)
        values["speculative_algorithm"] = algorithm
        notices += _proposed(config.proposal)
    values.pop("revision", None)
    return replace(given, values=values | {"model": target}), notices


def refuse_head(typed: str, folder: Path) -> None:
    """Raise ConfigError if a target's folder holds a head of ``speculators``."""
    raw = _read(folder / "config.json")
    if "speculators_config" in raw:
        config, algorithm = _parse(typed, raw)
        target = config.verifier.name_or_path or "its target"
        raise ConfigError(
            f"{typed} is a draft head of algorithm {algorithm} for {target}: foretoken serve starts both; "
            "name the target here"
        )


def _read(file: Path | None) -> dict[str, Any]:
    """Return a config's fields.

    Return {} for a missing or broken file; loading reports it.
    """
    try:
        return (file and read_object(file)) or {}
    except CheckpointError:
        return {}


def _parse(typed: str, raw: dict[str, Any]) -> tuple[_SpeculatorsConfig, str]:
    """Return the config of a head and the name of its algorithm here."""
    try:
        config = _SpeculatorsConfig.model_validate(raw["speculators_config"])
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{typed}: config.json: speculators_config.{place}: {first['msg']}") from None
    try:
        row = find_algorithm(config.algorithm)
    except ValueError as error:
        raise ConfigError(
            f"{typed}: config.json: speculators_config.algorithm {config.algorithm!r} is not supported: {error}"
        ) from None
    return config, row.name


def _target(typed: str, config: _SpeculatorsConfig, algorithm: str) -> tuple[str, dict[str, Any]]:
    """Return the target that a head names, which exists, and its config."""
    way = f"name it: foretoken serve TARGET --speculative-algorithm {algorithm} --speculative-draft-model-path {typed}"
    target = config.verifier.name_or_path
    if not target:
        raise ConfigError(f"{typed}: config.json names no target (speculators_config.verifier.name_or_path); {way}")
    try:
        file = hub.config_file(target)
    except ConfigError as error:
        raise ConfigError(f"{typed}: config.json names the target {target}: {error.message}; {way}") from error
    raw = _read(file)
    if not raw:
        raise ConfigError(f"{typed}: config.json names the target {target}, where no config.json is found; {way}")
    if "speculators_config" in raw:
        raise ConfigError(f"{typed}: config.json names the target {target}, which is a draft head itself; {way}")
    return target, raw


def _unlike(typed: str, verifier: _Verifier, target: str, target_config: dict[str, Any]) -> list[str]:
    """Return what to say if a target has another architecture than its head was trained for."""
    found = target_config.get("architectures") or []
    if not verifier.architectures or not found or set(found) & set(verifier.architectures):
        return []
    return [f"{target} is a {', '.join(found)}; {typed} was trained for a {', '.join(verifier.architectures)}"]


def _proposed(proposal: _Proposal | None) -> list[str]:
    """Return what to say about the head's proposal method.

    Elsewhere the method shapes trees. Here it never changes the text.
    """
    if proposal is None:
        return []
    notices = []
    if proposal.speculative_tokens:
        number = proposal.speculative_tokens
        notices.append(
            f"its config.json proposes {number} tokens a step; here the shape follows from what pays "
            f"(--speculative-num-steps {number} fixes it)"
        )
    if proposal.accept_tolerance or proposal.verifier_accept_k > 1:
        notices.append(
            "its accept_tolerance and verifier_accept_k are not obeyed: only the target's own tokens are accepted"
        )
    return notices


def _is_algorithm(typed: str, name: str) -> bool:
    # NONE is no algorithm: plain decode.
    return typed.upper() != "NONE" and find_algorithm(typed).name == name
