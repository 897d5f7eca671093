"""The options of the n-gram drafter."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from foretoken.config import Settings


class NgramSettings(Settings):
    """Options of the n-gram drafter; names and defaults are SGLang's."""

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
