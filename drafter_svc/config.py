"""A drafter's settings: one frozen object, checked when it is built."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from foretoken.common_settings import ComputeSettings, ListenAddress
from foretoken.config import Flag, Settings, flag_of
from foretoken.drafter_spec import ALGORITHM_NAMES, Algorithm, DrafterName, DrafterThreads, misfit


class NgramSettings(Settings):
    """Settings of the n-gram drafter; names and defaults as SGLang users know them."""

    min_match_window_size: int = Field(default=1, ge=1, le=64, description="Shortest suffix that must match.")
    max_match_window_size: int = Field(default=12, ge=1, le=64, description="Longest suffix that is looked up.")
    min_bfs_breadth: int = Field(default=1, ge=1, le=64, description="Children a node, at the deepest level.")
    max_bfs_breadth: int = Field(
        default=10, ge=1, le=64, description="Children a node, at the root. 1 in both: a single branch."
    )
    capacity: int = Field(default=10_000_000, ge=1024, le=200_000_000, description="Nodes of the trie.")
    order: Literal["frequency", "recency"] = Field(
        default="recency", description="Which candidates come first: the most often or the last seen."
    )
    external_corpus_max_tokens: int = Field(
        default=10_000_000,
        ge=1,
        le=200_000_000,
        description="Tokens of all corpora that may be added, 8 bytes each.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> NgramSettings:
        if self.min_match_window_size > self.max_match_window_size:
            raise ValueError("min_match_window_size must not exceed max_match_window_size")
        if self.min_bfs_breadth > self.max_bfs_breadth:
            raise ValueError("min_bfs_breadth must not exceed max_bfs_breadth")
        return self


NgramFlags = Annotated[NgramSettings, Flag("--speculative-ngram-")]
# Settings that only drafters of some algorithms take, by their keys in a DrafterSpec if they are there.
_OF_SOME = {
    "model": "speculative_draft_model_path",
    "token_map": "speculative_token_map",
    "target": "target",
    "device": "device",
    "threads": "threads",
    "dtype": "dtype",
    "coupled_noise": "disable_coupled_noise",
    "disable_cuda_graph": "disable_cuda_graph",
}


class DrafterSettings(ComputeSettings):
    """Settings of one drafter process."""

    name: Annotated[DrafterName, Flag(leads=True)] = Field(
        default="ngram", description="Name of this drafter in requests and metrics."
    )
    address: ListenAddress
    algorithm: Annotated[Algorithm, Flag(choices=ALGORITHM_NAMES)] = Field(
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
        description="Token ids that an EAGLE or MTP head may draft (FR-Spec): safetensors or a JSON list.",
    )
    threads: DrafterThreads = 0
    disable_coupled_noise: bool = Field(
        default=False, description="At a temperature, draft by likelihood, not by the sampler's noise."
    )
    ngram: NgramFlags = NgramSettings()

    @model_validator(mode="after")
    def _fits_algorithm(self) -> DrafterSettings:
        fields = type(self).model_fields
        given = [key for key, name in _OF_SOME.items() if getattr(self, name) != fields[name].default]
        if found := misfit(self.algorithm, given):
            key, problem = found
            raise ValueError(f"{flag_of(type(self), _OF_SOME[key])}: {problem}")
        return self
