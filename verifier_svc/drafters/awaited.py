"""How long a new verifier's readiness waits for the drafters of its settings."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from verifier_svc.drafters.handle import DrafterHandle

logger = logging.getLogger(__name__)

# A drafter that has not attached for so long after the verifier began to serve is done without.
MAX_AWAIT_S = 30.0


class AwaitedDrafters:
    """The drafters that have to attach before the stack counts as ready. Used on the event loop.

    Each is awaited once: one that is lost later costs drafts and no readiness. The verifier serves
    from its start, so this delays no request and no resumed stream.
    """

    def __init__(self, drafters: Iterable[DrafterHandle] = (), clock: Callable[[], float] = time.monotonic) -> None:
        """The wait begins now. ``clock``: seconds."""
        self._drafters = list(drafters)
        self._clock = clock
        self._until = clock() + MAX_AWAIT_S

    def is_waiting(self) -> bool:
        """Return whether a drafter is still awaited; warn of each that did not attach in time."""
        self._drafters = [drafter for drafter in self._drafters if not (drafter.num_attaches or drafter.is_detached)]
        if self._drafters and self._clock() >= self._until:
            for drafter in self._drafters:
                logger.warning(
                    "drafter %s has not attached within %.0f s: %s; ready without it",
                    drafter.name,
                    MAX_AWAIT_S,
                    drafter.reason or "it is still being attached",
                )
            self._drafters = []
        return bool(self._drafters)
