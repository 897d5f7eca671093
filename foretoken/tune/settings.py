"""Declare the settings of ``foretoken tune``, beside the settings of ``foretoken serve``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from foretoken.bench.settings import ABOVE_ZERO, SPLIT, LoadSettings
from foretoken.config import AUTO, Flag
from foretoken.tune.candidates import DEFAULT_SHAPES, ShapeFlags, parse_shape

DEFAULT_BATCHES = (1, 4, 16)
# Of the full grid, for each candidate.
MAX_ROUNDS = 10_000


class TuneSettings(LoadSettings):
    """What to try at which loads, for how long, and where to write what was found."""

    url: Annotated[str | None, Flag(metavar="URL", unset="a server is started for MODEL")] = Field(
        default=None, description="Try a running foretoken server instead, within the bounds of its flags."
    )
    max_concurrency: Annotated[
        tuple[int, ...], SPLIT, ABOVE_ZERO, Flag(metavar="N,N,...", unset="1,4,16", one_or_many=True)
    ] = Field(default=(), description="Requests that run at once; the best setting is found for each number.")
    weights: Annotated[
        tuple[float, ...], SPLIT, ABOVE_ZERO, Flag(metavar="W,W,...", unset="equal", one_or_many=True)
    ] = Field(
        default=(), description="How much each number of --max-concurrency counts in the choice of one setting for all."
    )
    shapes: Annotated[tuple[str, ...], SPLIT, Flag(metavar="S-K-N,...", unset="chains and trees", one_or_many=True)] = (
        Field(
            default=(),
            description="Shapes to try for drafters with a model: levels, most children of a node, nodes with the "
            "root.",
        )
    )
    try_drafters: Annotated[
        tuple[str, ...], SPLIT, Flag(metavar="NAME,NAME+NAME,...", unset="each", one_or_many=True)
    ] = Field(default=(), description="Drafters to try; those joined by + draft together.")
    num_rounds: int = Field(
        default=24, ge=4, le=MAX_ROUNDS, description="Rounds of requests that the full grid gives each candidate."
    )
    budget: float = Field(
        default=0.2, gt=0, le=1, description="Share of the full grid's rounds to use. 1: measure the full grid."
    )
    requests_per_round: Annotated[int, AUTO] = Field(
        default=0,
        ge=0,
        description="Requests of a round, at least the largest number of --max-concurrency. auto: 2 for each "
        "that runs at once, and at least 4.",
    )
    write_config: Annotated[Path, Flag(metavar="FILE")] = Field(
        default=Path("tuned.yaml"), description="YAML file to write, for foretoken serve --config."
    )
    output_file: Annotated[Path | None, Flag(metavar="FILE", unset="none")] = Field(
        default=None, description="JSON file to write."
    )
    picture: Annotated[Path | None, Flag(metavar="FILE", unset="none")] = Field(
        default=None, description="SVG file to write: tokens a second by requests at once."
    )

    @field_validator("shapes")
    @classmethod
    def _are_shapes(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            parse_shape(text)
        return value

    @model_validator(mode="after")
    def _has_a_weight_for_each(self) -> Self:
        if self.weights and len(self.weights) != len(self.batches):
            raise ValueError("--weights: expected as many numbers as --max-concurrency has")
        return self

    @model_validator(mode="after")
    def _fills_each_batch(self) -> Self:
        most = self.batches[-1]
        if 0 < self.requests_per_round < most:
            raise ValueError(
                f"--requests-per-round: {self.requests_per_round} cannot keep {most} requests running at once; "
                f"give at least {most}, or auto"
            )
        return self

    @property
    def batches(self) -> tuple[int, ...]:
        """How many requests run at once, each number once, smallest first."""
        return tuple(sorted(set(self.max_concurrency or DEFAULT_BATCHES)))

    @property
    def weight_of(self) -> dict[int, float]:
        """The weight of each number of requests at once."""
        numbers = self.max_concurrency or DEFAULT_BATCHES
        return dict(zip(numbers, self.weights or [1.0] * len(numbers), strict=True))

    @property
    def draft_shapes(self) -> tuple[ShapeFlags, ...]:
        """The shapes to try."""
        return tuple(map(parse_shape, self.shapes)) or DEFAULT_SHAPES

    def round_size(self, batch: int) -> int:
        """Return how many requests a round sends, ``batch`` of them at once."""
        return self.requests_per_round or max(2 * batch, 4)
