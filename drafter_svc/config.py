"""A drafter's settings: one frozen object, checked when it is built."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from foretoken.address import Address
from foretoken.config import flag_of
from foretoken.drafter_spec import DrafterName, misfit


class NgramSettings(BaseModel):
    """Flags of the n-gram drafter; names and defaults as SGLang users know them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Tokens of the suffix that must match, at least and at most.
    min_match_window_size: int = Field(default=1, ge=1, le=64)
    max_match_window_size: int = Field(default=12, ge=1, le=64)
    # Children kept per node: most at the root, fewest at the deepest level. 1 and 1: single branch.
    min_bfs_breadth: int = Field(default=1, ge=1, le=64)
    max_bfs_breadth: int = Field(default=10, ge=1, le=64)
    # Nodes of the trie.
    capacity: int = Field(default=10_000_000, ge=1024, le=200_000_000)
    # Order of candidates: how often, or how lately seen.
    order: Literal["frequency", "recency"] = "recency"
    # Tokens of all corpora together.
    external_corpus_max_tokens: int = Field(default=10_000_000, ge=1, le=200_000_000)

    @model_validator(mode="after")
    def _ordered(self) -> NgramSettings:
        if self.min_match_window_size > self.max_match_window_size:
            raise ValueError("min_match_window_size must not exceed max_match_window_size")
        if self.min_bfs_breadth > self.max_bfs_breadth:
            raise ValueError("min_bfs_breadth must not exceed max_bfs_breadth")
        return self


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


class DrafterSettings(BaseModel):
    """Settings of one drafter process. Those between ``algorithm`` and ``ngram`` are of drafters with a model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: DrafterName
    # unix:/path or host:port.
    address: Address
    algorithm: Literal["NGRAM", "EAGLE", "EAGLE3", "MTP", "STANDALONE"] = "NGRAM"
    # Folder of the head or of the draft model; of MTP, whose head is in the target's checkpoint, none.
    speculative_draft_model_path: Path | None = None
    # The target's folder, where the one that the verifier names is not visible here.
    target: Path | None = None
    # Target ids that the head may draft (FR-Spec, arXiv 2502.14856).
    speculative_token_map: Path | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    # Launch every kernel by itself.
    disable_cuda_graph: bool = False
    # Threads of a forward pass; 0: one.
    threads: int = Field(default=0, ge=0, le=1024)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    # Draft for temperatures above zero without the sampler's noise, by likelihood alone.
    disable_coupled_noise: bool = False
    ngram: NgramSettings = NgramSettings()

    @model_validator(mode="after")
    def _fits_algorithm(self) -> DrafterSettings:
        fields = type(self).model_fields
        given = [key for key, name in _OF_SOME.items() if getattr(self, name) != fields[name].default]
        if found := misfit(self.algorithm, given):
            key, problem = found
            raise ValueError(f"{flag_of(_OF_SOME[key])}: {problem}")
        return self
