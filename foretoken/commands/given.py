"""What the user set of a command's settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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

    def words(self, kinds: Iterable[type[Settings]]) -> list[str]:
        """Return the command line that gives the classes' field values again, without secrets."""
        from foretoken.config import settings_of

        words: list[str] = []
        found = {setting.path: setting for kind in kinds for setting in settings_of(kind)}
        for (name, *nested), setting in found.items():
            value = self.values.get(name)
            if nested and value is not None:
                value = value.get(nested[0])
            if value is None or value is False or setting.shown.secret:
                continue
            if setting.is_argument:
                words.insert(0, str(value))
            elif value is True:
                words.append(setting.flag)
            else:
                for item in value if isinstance(value, tuple | list) else (value,):
                    words += [setting.flag, str(item)]
        return words
