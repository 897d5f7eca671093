"""The answer to one request, independent of its API, and how two answers differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# Shown on either side of a first difference.
SHOWN_CHARS = 60
SHOWN_ITEMS = 8


@dataclass(slots=True)
class Choice:
    """One output. Logprob entries are as the API sends them, and compared bit for bit."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    token_texts: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    # Of this output alone; 0 and 0 if the API counts only for the whole request.
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_finishes: int = 0


@dataclass(slots=True)
class Answer:
    """Everything that came for one request.

    Attributes:
        choices: by index.
        usage: of the whole request, if the API counts so.
        ended: the answer was complete: [DONE], the whole body, or the end of the call.
        violations: rules of the protocol that the answer broke by itself.
    """

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, int] = field(default_factory=dict)
    ended: bool = False
    violations: list[str] = field(default_factory=list)

    def choice(self, index: int) -> Choice:
        """Return the choice of that index; make it if it is new."""
        return self.choices.setdefault(index, Choice())

    @property
    def num_tokens(self) -> int:
        """Return the output tokens as the server counted them."""
        counted = sum(choice.num_output_tokens or len(choice.token_ids) for choice in self.choices.values())
        return self.usage.get("completion_tokens", counted)


@dataclass(frozen=True, slots=True)
class Difference:
    """One wrong field. ``kind``: changed, lost, doubled, or protocol."""

    kind: str
    where: str
    expected: str
    got: str

    def __str__(self) -> str:
        return f"{self.kind} {self.where}\n    expected {self.expected}\n    got      {self.got}"


def differences(expected: Answer, got: Answer) -> list[Difference]:
    """Return all differences of a complete answer from the undisturbed one, and broken rules."""
    found = [Difference("protocol", item, "", "") for item in got.violations]
    if not got.ended:
        found.append(Difference("lost", "the end of the answer", "an end", "none"))
    if expected.usage != got.usage:
        found.append(Difference("changed", "usage", str(expected.usage), str(got.usage)))
    for index in sorted(expected.choices.keys() | got.choices.keys()):
        if index not in got.choices or index not in expected.choices:
            kind = "lost" if index in expected.choices else "doubled"
            found.append(Difference(kind, f"choice {index}", str(sorted(expected.choices)), str(sorted(got.choices))))
            continue
        found += _choice_differences(f"choice {index}", expected.choices[index], got.choices[index])
    return found


def prefix_differences(expected: Answer, got: Answer) -> list[Difference]:
    """Return the differences of a cut answer, which must be a beginning of the undisturbed one."""
    found = [Difference("protocol", item, "", "") for item in got.violations]
    for index, choice in got.choices.items():
        whole = expected.choices.get(index)
        if whole is None:
            found.append(Difference("doubled", f"choice {index}", str(sorted(expected.choices)), str(index)))
            continue
        for name in ("text", "token_ids", "token_texts", "logprobs", "prompt_logprobs"):
            wanted, part = getattr(whole, name), getattr(choice, name)
            if wanted[: len(part)] != part:
                found.append(_first_difference(f"choice {index}: {name}", wanted[: len(part)], part))
        if choice.num_finishes:
            found += _end_differences(f"choice {index}", whole, choice)
    return found


def _choice_differences(where: str, expected: Choice, got: Choice) -> list[Difference]:
    found = []
    for name in ("text", "token_ids", "token_texts", "logprobs", "prompt_logprobs"):
        wanted, part = getattr(expected, name), getattr(got, name)
        if wanted != part:
            found.append(_first_difference(f"{where}: {name}", wanted, part))
    return found + _end_differences(where, expected, got)


def _end_differences(where: str, expected: Choice, got: Choice) -> list[Difference]:
    found = []
    if got.num_finishes != 1:
        kind = "doubled" if got.num_finishes else "lost"
        found.append(Difference(kind, f"{where}: finish", "1", str(got.num_finishes)))
    for name in ("finish_reason", "stop_reason", "num_prompt_tokens", "num_output_tokens"):
        wanted, part = getattr(expected, name), getattr(got, name)
        if wanted != part:
            found.append(Difference("changed", f"{where}: {name}", repr(wanted), repr(part)))
    return found


def _first_difference(where: str, expected: Sequence[Any], got: Sequence[Any]) -> Difference:
    """Name the first place where two sequences differ, and whether an item is lost or doubled."""
    at = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), min(len(expected), len(got)))
    missing, surplus = len(expected) - len(got), len(got) - len(expected)
    if missing > 0 and expected[at + missing :] == got[at:]:
        kind = "lost"
    elif surplus > 0 and got[at + surplus :] == expected[at:]:
        kind = "doubled"
    else:
        kind = "changed"
    lengths = f"{where}, at {at} of {len(expected)}"
    return Difference(kind, lengths, _around(expected, at), _around(got, at))


def _around(items: Sequence[Any], at: int) -> str:
    shown = SHOWN_CHARS if isinstance(items, str) else SHOWN_ITEMS
    start, end = max(0, at - shown), at + shown
    return f"{'...' if start else ''}{items[start:end]!r}{'...' if end < len(items) else ''}"
