"""Split a model's reasoning from its answer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Thinking(Enum):
    """What a reply may hold before its answer."""

    # The chat template closed the reasoning, or the model has none.
    NONE = auto()
    # The reply may begin with the opening mark.
    OPTIONAL = auto()
    # The template opened the reasoning: the reply goes on inside.
    OPEN = auto()


class ReasoningPlace(Enum):
    """Where an answer shows the model's reasoning."""

    # As reasoning_content.
    APART = auto()
    # In the content, with its marks, as the model wrote it.
    CONTENT = auto()
    NOWHERE = auto()


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks of one family of models. ``names``: of --reasoning-parser, here and elsewhere."""

    names: tuple[str, ...]
    open: str
    close: str
    # The reply goes on inside unless the template closed the reasoning: these models may leave the
    # opening mark out.
    is_open: bool = False

    def thinking(self, prompt: str, *, continues: bool = False) -> Thinking:
        """Return how a reply to a rendered prompt begins.

        ``continues``: the reply goes on with the prompt's last message.
        """
        end = prompt[-256:].rstrip()
        if end.endswith(self.open):
            return Thinking.OPEN
        if end.endswith(self.close) or continues:
            return Thinking.NONE
        return Thinking.OPEN if self.is_open else Thinking.OPTIONAL


FORMATS = (
    ReasoningFormat(("qwen3", "glm45", "hunyuan_a13b", "think"), "<think>", "</think>"),
    ReasoningFormat(("deepseek_r1", "deepseek-r1", "qwen3-thinking"), "<think>", "</think>", is_open=True),
    ReasoningFormat(("mistral",), "[THINK]", "[/THINK]"),
)
NAMES = tuple(name for kind in FORMATS for name in kind.names)


def reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    """Return the format of a name or, for ``auto``, of a chat template; None for ``none``."""
    if name != "auto":
        return next((kind for kind in FORMATS if name in kind.names), None)
    qwen3, deepseek_r1, mistral = FORMATS
    if mistral.open in template:
        return mistral
    if qwen3.close not in template:
        return None
    # A template that never writes the opening mark leaves it to the model.
    return qwen3 if qwen3.open in template else deepseek_r1


class ReasoningReader:
    """Reads one output. Blanks around the marks are dropped. Implements ReasoningParser."""

    def __init__(self, kind: ReasoningFormat, thinking: Thinking) -> None:
        self._open, self._close = kind.open, kind.close
        # A model may repeat the mark that its template wrote.
        self._at_start = thinking is not Thinking.NONE
        self._is_inside = thinking is Thinking.OPEN
        self._after_close = False
        # Text that is not decided yet: a mark's beginning, or blanks before one.
        self._text = ""

    @property
    def is_inside(self) -> bool:
        return self._is_inside

    def feed(self, text: str, *, finished: bool) -> tuple[str, str]:
        """Return the reasoning and the text after it that ``text`` makes certain."""
        self._text += text
        if self._at_start and not self._read_start(finished):
            return "", ""
        reasoning = self._read_inside(finished) if self._is_inside else ""
        if self._is_inside:
            return reasoning, ""
        if self._after_close:
            self._text = self._text.lstrip()
            self._after_close = not self._text
        answer, self._text = self._text, ""
        return reasoning, answer

    def _read_start(self, finished: bool) -> bool:
        """Decide whether the output begins with the opening mark. Return False to wait."""
        text = self._text.lstrip()
        if not finished and len(text) < len(self._open) and self._open.startswith(text):
            return False
        if text.startswith(self._open):
            self._is_inside = True
            text = text.removeprefix(self._open).lstrip()
            if not text and not finished:
                # Blanks after the mark may follow.
                self._text = self._open
                return False
            self._text = text
        elif self._is_inside:
            self._text = text
        self._at_start = False
        return True

    def _read_inside(self, finished: bool) -> str:
        place = self._text.find(self._close)
        if place >= 0:
            reasoning = self._text[:place].rstrip()
            self._text = self._text[place + len(self._close) :]
            self._is_inside, self._after_close = False, True
            return reasoning
        certain = len(self._text)
        if not finished:
            certain -= next(n for n in range(len(self._close) - 1, -1, -1) if self._text.endswith(self._close[:n]))
        reasoning = self._text[:certain].rstrip()
        self._text = self._text[len(reasoning) :]
        return reasoning
