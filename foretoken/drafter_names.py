"""Names of drafters, and how many of them a verifier may have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator

from foretoken.errors import ConfigError
from foretoken.limits import DRAFTER_CHOICES, MAX_DRAFTERS, NAME_RULE, is_name

# The flag that names a drafter.
FLAG = "--drafter"


def _check_name(name: str) -> str:
    if not is_name(name):
        raise ValueError(f"expected {NAME_RULE}")
    if name in DRAFTER_CHOICES:
        raise ValueError(f"{name} means a choice of drafters")
    return name


DrafterName = Annotated[str, AfterValidator(_check_name)]


def check_together(names: Sequence[str]) -> None:
    """Check that one verifier can have all drafters with these names. Raises ConfigError if not."""
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{FLAG} name: {twice[0]} is given twice")
    if len(names) > MAX_DRAFTERS:
        raise ConfigError(f"{FLAG}: at most {MAX_DRAFTERS} drafters, got {len(names)}")
