"""A drafter's settings: one frozen object, checked when it is built."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, Field, create_model, model_validator

from drafter_svc.algorithms import ALGORITHMS, algorithm_names, all_keys, find_algorithm
from foretoken.common_settings import ComputeSettings, ListenerSettings, TracingSettings
from foretoken.config import Flag, flag_of
from foretoken.drafter_names import DrafterName

Kind = TypeVar("Kind", bound=BaseModel)

# An alias becomes the algorithm's own name.
AlgorithmName = Annotated[str, AfterValidator(lambda name: find_algorithm(name).name)]
DrafterThreads = Annotated[int, Field(ge=0, le=1024, description="Threads of the draft model; 0: one.")]
# Fields whose keys in ALGORITHMS and --drafter have other names.
_FIELDS = {
    "model": "speculative_draft_model_path",
    "token_map": "speculative_token_map",
    "coupled_noise": "disable_coupled_noise",
}


def with_options(kind: type[Kind]) -> type[Kind]:
    """Decorate a settings class: add a field with the options of each algorithm that has some."""
    fields: dict[str, Any] = {
        row.field: (Annotated[options, Flag(f"--speculative-{row.field}-")], options())
        for row in ALGORITHMS.values()
        if (options := row.options_class())
    }
    return create_model(kind.__name__, __base__=kind, __module__=kind.__module__, __doc__=kind.__doc__, **fields)


@with_options
class DrafterSettings(ComputeSettings, ListenerSettings, TracingSettings):
    """Settings of one drafter process."""

    name: Annotated[DrafterName, Flag(leads=True)] = Field(
        default="ngram", description="Name of this drafter in requests and metrics."
    )
    algorithm: Annotated[AlgorithmName, Flag(choices=algorithm_names())] = Field(
        default="NGRAM", description="How it drafts."
    )
    # MTP has none: its head is in the target's checkpoint.
    speculative_draft_model_path: Annotated[Path | None, Flag(metavar="MODEL", unset="none")] = Field(
        default=None,
        description="Folder of the draft head or model, or its id on the hub; an MTP head is in the target's "
        "checkpoint.",
    )
    # For a drafter that cannot see the folder that the verifier names.
    target: Annotated[Path | None, Flag(metavar="FOLDER", unset="the verifier's")] = Field(
        default=None, description="The target's folder on this host."
    )
    # FR-Spec, arXiv 2502.14856.
    speculative_token_map: Annotated[Path | None, Flag(metavar="FILE", unset="all")] = Field(
        default=None,
        description="Token ids that an EAGLE or MTP head may draft (FR-Spec): safetensors, a JSON list, or a "
        "file of torch.save, also ORG/NAME/FILE on the hub.",
    )
    threads: DrafterThreads = 0
    disable_coupled_noise: bool = Field(
        default=False, description="At a temperature, draft by likelihood, not by the sampler's noise."
    )

    @property
    def options(self) -> dict[str, Any]:
        """The options of all algorithms that have some, by the names of their fields."""
        return {row.field: getattr(self, row.field) for row in ALGORITHMS.values() if row.options}

    @model_validator(mode="after")
    def _fits_algorithm(self) -> DrafterSettings:
        off_default = self.model_dump(exclude_defaults=True).keys()
        given = [key for key in all_keys() if _FIELDS.get(key, key) in off_default]
        if found := ALGORITHMS[self.algorithm].misfit(given):
            key, problem = found
            raise ValueError(f"{flag_of(type(self), _FIELDS.get(key, key))}: {problem}")
        return self
