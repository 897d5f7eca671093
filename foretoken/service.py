"""What a supervisor must know of one child: its command, how to ask it, and how to end it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from foretoken.pulse import MAX_SILENCE_S


class Probe(Protocol):
    """Asks one service, one question at a time; each answer takes at most about a second."""

    async def is_ready(self) -> bool:
        """Return whether the service does its work now."""
        ...

    async def last_turn(self) -> float | None:
        """Return when its event loop last turned, by any steady clock; None: no answer."""
        ...

    async def close(self) -> None:
        """Free what it keeps between questions."""
        ...


@dataclass(frozen=True)
class Service:
    """One child.

    Attributes:
        name: its name in messages.
        command: the command to execute.
        probe: asks whether it is ready and alive.
        stop_grace_s: time from SIGTERM to SIGKILL.
        required: the stack is not ready without it.
        environment: additional variables.
        before_kill: a command to run before the child is killed, with its process id as last
            argument; may be empty.
        shares_faults: if a child ends with CONTEXT_LOST_STATUS, all services that share faults are
            ended, and none restarts before the last of them has gone.
        max_stall_s: how long it may not answer, or its event loop may not turn, after its first
            answer.
        reloads: whether it reads files again after SIGHUP.
    """

    name: str
    command: tuple[str, ...]
    probe: Probe
    stop_grace_s: float
    required: bool = True
    # Not shown: it may hold secrets.
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    before_kill: tuple[str, ...] = ()
    shares_faults: bool = False
    max_stall_s: float = MAX_SILENCE_S
    reloads: bool = False
