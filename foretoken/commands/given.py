"""What the user set of a command's settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from foretoken.config import Settings

    Kind = TypeVar("Kind", bound=Settings)


@dataclass(frozen=True)
class Given:
    """The values that the user gave by flag, in the environment or in a config file."""

    # By field; nested settings have a mapping of their own.
    values: Mapping[str, Any] = field(default_factory=dict)
    # What to say at the start about flags that have no use here.
    notices: tuple[str, ...] = ()

    def settings(self, kind: type[Kind], **more: Any) -> Kind:
        """Return settings of ``kind`` from the given values; ``more`` wins. Raises ConfigError."""
        from foretoken.config import build

        return build(kind, {name: self.values[name] for name in kind.model_fields if name in self.values} | more)
