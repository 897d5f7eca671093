"""Keep when a sequence had no verifier, for the spans of its request."""

from __future__ import annotations

import time
from dataclasses import dataclass

WAIT, RESUME = "wait for a verifier", "resume"


@dataclass(slots=True)
class Pause:
    """A time without new tokens, because there was no verifier or the verifier was lost.

    Attributes:
        name: WAIT for a sequence that had not begun, RESUME for one that was lost.
        reason: why there was no verifier.
        began_ns: as time.time_ns().
        ended_ns: when it was submitted (WAIT), or when tokens came again (RESUME); None: not yet.
        verifier: the address where it went on; empty if it did not.
    """

    name: str
    reason: str
    began_ns: int
    ended_ns: int | None = None
    verifier: str = ""


class Pauses:
    """The pauses of one sequence; at most one of them goes on."""

    def __init__(self) -> None:
        self.all: list[Pause] = []
        self._open: Pause | None = None

    def begin(self, name: str, reason: str) -> None:
        """Begin a pause; a pause that goes on stays as it is."""
        if self._open is None:
            self._open = Pause(name, reason, time.time_ns())
            self.all.append(self._open)

    def submitted(self, verifier: str) -> None:
        """Note the verifier that takes the sequence.

        A wait ends; a resume goes on until there are tokens.
        """
        if self._open is not None:
            self._open.verifier = verifier
            if self._open.name == WAIT:
                self.end()

    def end(self) -> None:
        """End the pause that goes on, if any."""
        if self._open is not None:
            self._open.ended_ns = time.time_ns()
            self._open = None
