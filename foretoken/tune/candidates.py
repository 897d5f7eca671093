"""List what can be tried.

This is plain decode, the server's own choice, and drafters with and without a fixed shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from foretoken.limits import DRAFTER_JOIN, SHAPE_RANGES


class ShapeFlags(NamedTuple):
    """Levels of a draft tree, most children of one node, and nodes with the root."""

    num_steps: int
    topk: int
    num_draft_tokens: int

    @property
    def name(self) -> str:
        return "-".join(map(str, self))


@dataclass(frozen=True, slots=True)
class TunedDrafter:
    """A drafter of the server. Without a model, it is tried only as it chooses itself."""

    name: str
    has_model: bool


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way of decoding.

    Attributes:
        drafters: the names of those that draft; empty: nobody, or with
            ``auto`` whom the server chooses.
        shape: of their trees; None: the server chooses.
    """

    name: str
    drafters: tuple[str, ...] = ()
    shape: ShapeFlags | None = None

    @property
    def speculative(self) -> dict[str, Any]:
        """Return the request field that asks for it."""
        if self == PLAIN:
            return {"enabled": False}
        asked: dict[str, Any] = {"drafter": DRAFTER_JOIN.join(self.drafters) or self.name}
        if self.shape is not None:
            asked["shape"] = self.shape._asdict()
        return asked


PLAIN, AUTO = Candidate("plain"), Candidate("auto")
# Against these all others are compared, so they are measured to the end.
BASELINES = (PLAIN, AUTO)

# Chains, and the trees among which the controller of overlapped steps chooses if
# trees may have so many nodes.
DEFAULT_SHAPES = (
    *(ShapeFlags(length, 1, length + 1) for length in range(1, 8)),
    ShapeFlags(5, 2, 8),
    ShapeFlags(7, 4, 16),
    ShapeFlags(7, 8, 32),
)


def parse_shape(text: str) -> ShapeFlags:
    """Parse LEVELS-CHILDREN-NODES. Raises ValueError that says what is wrong."""
    words = text.strip().split("-")
    if len(words) != 3 or not all(word.isascii() and word.isdigit() for word in words):
        raise ValueError(f"expected LEVELS-CHILDREN-NODES such as 3-1-4, got {text!r}")
    shape = ShapeFlags(*map(int, words))
    for value, (name, allowed) in zip(shape, SHAPE_RANGES.items(), strict=True):
        if value not in allowed:
            raise ValueError(f"{text}: {name} must be in {allowed}")
    if shape.num_draft_tokens <= shape.num_steps:
        raise ValueError(f"{text}: a path of {shape.num_steps} levels has {shape.num_steps + 1} nodes with the root")
    if shape.topk == 1 and shape.num_draft_tokens != shape.num_steps + 1:
        raise ValueError(f"{text}: a chain of {shape.num_steps} levels has {shape.num_steps + 1} nodes with the root")
    return shape


def bounds_of(shapes: Sequence[ShapeFlags], least: ShapeFlags) -> ShapeFlags:
    """Return the smallest bounds of a server's trees that admit all shapes, and ``least``."""
    return ShapeFlags(*(max(values) for values in zip(least, *shapes, strict=True)))


def candidates(
    drafters: Sequence[TunedDrafter], wanted: Sequence[str], shapes: Sequence[ShapeFlags]
) -> list[Candidate]:
    """Return all candidates, plain decode and ``auto`` first.

    Args:
        drafters: the server's drafters.
        wanted: names, or several joined by +; empty: each drafter by itself.
        shapes: for drafters with a model.

    Raises:
        ValueError: a wanted drafter is not there.
    """
    by_name: Mapping[str, TunedDrafter] = {drafter.name: drafter for drafter in drafters}
    if not by_name:
        return [PLAIN]
    found = list(BASELINES)
    for text in wanted or list(by_name):
        names = tuple(text.split(DRAFTER_JOIN))
        if unknown := [name for name in names if name not in by_name]:
            raise ValueError(f"there is no drafter {unknown[0]}; available: {', '.join(by_name)}")
        if not any(by_name[name].has_model for name in names):
            found.append(Candidate(text, names))
            continue
        found += [Candidate(f"{text} {shape.name}", names, shape) for shape in shapes]
    return list(dict.fromkeys(found))
