"""A drafter's settings: one frozen object, checked when it is built."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from foretoken.address import Address


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


# Settings that mean nothing to a drafter without a model.
_OF_MODELS = (
    "target",
    "device",
    "threads",
    "dtype",
    "disable_coupled_noise",
    "disable_cuda_graph",
    "speculative_draft_model_path",
)


class DrafterSettings(BaseModel):
    """Settings of one drafter process. Those between ``algorithm`` and ``ngram`` are of drafters with a model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}$")
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
        has_path = self.speculative_draft_model_path is not None
        if self.algorithm in ("EAGLE", "EAGLE3", "STANDALONE") and not has_path:
            raise ValueError(f"a drafter of algorithm {self.algorithm} needs --speculative-draft-model-path")
        if self.algorithm == "MTP" and has_path:
            raise ValueError("--speculative-draft-model-path: an MTP head is part of the target's checkpoint")
        if self.speculative_token_map is not None and self.algorithm not in ("EAGLE", "EAGLE3", "MTP"):
            raise ValueError(
                f"--speculative-token-map is for heads that use the target's output head, not for {self.algorithm}"
            )
        if self.algorithm == "NGRAM":
            for field in _OF_MODELS:
                if getattr(self, field) != type(self).model_fields[field].default:
                    raise ValueError(f"--{field.replace('_', '-')} has no effect with --algorithm NGRAM")
        return self
