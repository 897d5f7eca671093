"""``--drafter name=NAME,algorithm=ALGORITHM[,model=MODEL]``: a drafter that a command starts or holds itself."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from foretoken.config import Settings, build, parse_pairs
from foretoken.errors import ConfigError
from foretoken.limits import DRAFTER_CHOICES, MAX_DRAFTERS, NAME_RULE, is_name

FLAG = "--drafter"
# In any case, as a flag takes them.
ALGORITHM_NAMES = ("NGRAM", "EAGLE", "EAGLE2", "EAGLE3", "MTP", "NEXTN", "STANDALONE")
_ALIASES = {"EAGLE2": "EAGLE", "NEXTN": "MTP"}
_WITH_A_MODEL = ("EAGLE", "EAGLE3", "STANDALONE")
_HEADS = ("EAGLE", "EAGLE3", "MTP")
# Keys that say which drafter it is and where it runs; the others are for some algorithms only.
_OF_ALL = ("name", "algorithm", "placement")


def _check_name(name: str) -> str:
    if not is_name(name):
        raise ValueError(f"expected {NAME_RULE}")
    if name in DRAFTER_CHOICES:
        raise ValueError(f"{name} means a choice of drafters")
    return name


def algorithm_of(name: Any) -> Any:
    """An algorithm by its own name or an alias, in any case: EAGLE2 has EAGLE's weights, NEXTN is MTP."""
    return _ALIASES.get(name.upper(), name.upper()) if isinstance(name, str) else name


DrafterName = Annotated[str, AfterValidator(_check_name)]
Algorithm = Annotated[Literal["NGRAM", "EAGLE", "EAGLE3", "MTP", "STANDALONE"], BeforeValidator(algorithm_of)]
DrafterThreads = Annotated[int, Field(ge=0, le=1024, description="Threads of the draft model; 0: one.")]


class DrafterSpec(Settings):
    """One drafter by its kind."""

    name: DrafterName
    algorithm: Algorithm
    # Folder of a head or draft model, or its id on the hub.
    model: str | None = Field(default=None, min_length=1)
    # Target ids that a head may draft.
    token_map: Path | None = None
    threads: DrafterThreads = 0
    # At a temperature, whether it drafts by the sampler's noise.
    coupled_noise: bool = True
    # Where ``foretoken serve`` runs it; None: as --drafter-placement says.
    placement: Literal["process", "in-process"] | None = None


def misfit(algorithm: str, given: Collection[str]) -> tuple[str, str] | None:
    """A key of DrafterSpec that is missing for the algorithm or means nothing to it, and which of both; None: all fit.

    ``given``: keys off their defaults, those of every algorithm left out.
    """
    if algorithm in _WITH_A_MODEL and "model" not in given:
        return "model", f"must be given for a drafter of algorithm {algorithm}"
    if algorithm == "MTP" and "model" in given:
        return "model", "is not for a drafter of algorithm MTP, whose layers are in the target's checkpoint"
    if "token_map" in given and algorithm not in _HEADS:
        return "token_map", f"is for drafters of algorithm {', '.join(_HEADS)}, not for {algorithm}"
    if algorithm == "NGRAM" and given:
        return min(given), "has no effect on a drafter of algorithm NGRAM"
    return None


def parse_spec(text: str) -> DrafterSpec:
    """Raises ConfigError that names the flag and the key at fault."""
    pairs = parse_pairs(text, FLAG)
    if "address" in pairs:
        # As foretoken verifier has it.
        takers = "foretoken drafters attach, or by foretoken verifier"
        raise ConfigError(f"{FLAG} address: a drafter that runs elsewhere is taken by {takers}")
    spec = build(DrafterSpec, pairs, FLAG)
    if found := misfit(spec.algorithm, spec.model_dump(exclude_defaults=True).keys() - set(_OF_ALL)):
        key, problem = found
        raise ConfigError(f"{FLAG} {key}: {problem}")
    return spec


def check_together(names: Sequence[str]) -> None:
    """Raises ConfigError for names of drafters that one verifier cannot have at once."""
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{FLAG} name: {twice[0]} is given twice")
    if len(names) > MAX_DRAFTERS:
        raise ConfigError(f"{FLAG}: at most {MAX_DRAFTERS} drafters, got {len(names)}")


def spec_text(spec: DrafterSpec) -> str:
    """The flag's value that gives ``spec`` again. Raises ConfigError for a value with a comma, which none can have."""
    given = spec.model_dump(exclude_defaults=True)
    for key, value in given.items():
        if "," in str(value):
            raise ConfigError(f"a drafter inside the verifier cannot have a comma in its {key}: {value}")
    return ",".join(f"{key}={value}" for key, value in given.items())
