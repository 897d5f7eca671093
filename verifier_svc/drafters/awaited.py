"""How long a new verifier's readiness waits for the drafters of its settings."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from verifier_svc.drafters.handle import DrafterHandle

logger = logging.getLogger(__name__)

# A drafter that is not attached and prepared so long after the verifier began to serve is done without.
MAX_AWAIT_S = 30.0


class AwaitedDrafters:
    """The drafters that have to attach, and prepare, before the stack counts as ready. Used on the event loop.

    Each is awaited once: one that is lost later costs drafts and no readiness. The verifier serves
    from its start, so this delays no request and no resumed stream.
    """

    def __init__(self, drafters: Iterable[DrafterHandle] = (), clock: Callable[[], float] = time.monotonic) -> None:
        """The wait begins now. ``clock``: seconds."""
        self._drafters = list(drafters)
        self._clock = clock
        self._until = clock() + MAX_AWAIT_S

    def is_waiting(self) -> bool:
        """Return whether a drafter is still awaited; warn of each that was not there in time."""
        self._drafters = [drafter for drafter in self._drafters if not self._is_there(drafter)]
        if self._drafters and self._clock() >= self._until:
            for drafter in self._drafters:
                self._warn(drafter)
            self._drafters = []
        return bool(self._drafters)

    @staticmethod
    def _is_there(drafter: DrafterHandle) -> bool:
        return drafter.is_detached or (drafter.num_attaches > 0 and not drafter.is_preparing)

    @staticmethod
    def _warn(drafter: DrafterHandle) -> None:
        if drafter.num_attaches:
            logger.warning(
                "drafter %s has not captured its graphs within %.0f s; ready with what it has",
                drafter.name,
                MAX_AWAIT_S,
            )
            return
        logger.warning(
            "drafter %s has not attached within %.0f s: %s; ready without it",
            drafter.name,
            MAX_AWAIT_S,
            drafter.reason or "it is still being attached",
        )
