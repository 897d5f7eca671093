"""``--drafter name=NAME,algorithm=ALGORITHM[,model=MODEL]``: a drafter that a command starts or holds itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from foretoken.config import build, parse_pairs
from foretoken.limits import DRAFTER_CHOICES

FLAG = "--drafter"


def _check_free(name: str) -> str:
    if name in DRAFTER_CHOICES:
        raise ValueError(f"{name} means a choice of drafters")
    return name


DrafterName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}$"), AfterValidator(_check_free)]


class DrafterSpec(BaseModel):
    """One drafter by its kind."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: DrafterName
    algorithm: Literal["NGRAM", "EAGLE", "EAGLE3", "MTP", "STANDALONE"]
    # Folder of a head or draft model, or its id on the hub.
    model: str | None = None
    # Target ids that a head may draft.
    token_map: Path | None = None
    # Threads of its forward pass; 0: one.
    threads: int = Field(default=0, ge=0, le=1024)
    # At a temperature, whether it drafts by the sampler's noise.
    coupled_noise: bool = True
    # Where ``foretoken serve`` runs it; None: as --drafter-placement says.
    placement: Literal["process", "in-process"] | None = None

    @field_validator("algorithm", mode="before")
    @classmethod
    def _alias(cls, value: Any) -> Any:
        return algorithm_of(value) if isinstance(value, str) else value


def algorithm_of(name: str) -> str:
    """An algorithm by its own name or an alias, in any case: EAGLE2 has EAGLE's weights, NEXTN is MTP."""
    return {"EAGLE2": "EAGLE", "NEXTN": "MTP"}.get(name.upper(), name.upper())


def parse_spec(text: str) -> DrafterSpec:
    """Raises ConfigError that names the flag and the key at fault."""
    return build(DrafterSpec, parse_pairs(text, FLAG), FLAG)


def spec_text(spec: DrafterSpec) -> str:
    """The flag's value that gives ``spec`` again."""
    given = spec.model_dump(exclude_defaults=True)
    return ",".join(f"{key}={value}" for key, value in given.items())
