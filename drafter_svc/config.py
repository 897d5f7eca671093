"""A drafter's settings: one frozen object, checked when it is built."""

from __future__ import annotations

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


class DrafterSettings(BaseModel):
    """Settings of one drafter process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}$")
    algorithm: Literal["NGRAM"] = "NGRAM"
    # unix:/path or host:port.
    address: Address
    ngram: NgramSettings = NgramSettings()
