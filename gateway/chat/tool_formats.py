"""The forms of tool calls that foretoken knows: a new one is a file and a row here."""

from __future__ import annotations

from gateway.chat.formats.hermes import Hermes
from gateway.chat.formats.llama3_json import Llama3Json
from gateway.chat.formats.mistral import Mistral
from gateway.chat.formats.pythonic import Pythonic
from gateway.chat.tool_format import ToolFormat

# The first that fits a chat template is taken.
FORMATS: tuple[type[ToolFormat], ...] = (Mistral, Hermes, Pythonic, Llama3Json)
NAMES = tuple(name for kind in FORMATS for name in (kind.name, *kind.aliases))


def tool_format(name: str, template: str) -> ToolFormat | None:
    """Return the form of a name or, for ``auto``, of a chat template; None for ``none``."""
    for kind in FORMATS:
        if name in (kind.name, *kind.aliases) or (name == "auto" and kind.fits(template)):
            return kind(template)
    return None
