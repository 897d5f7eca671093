"""How long a new verifier's readiness waits for the drafters of its settings."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from verifier_svc.drafters.handle import DrafterHandle

logger = logging.getLogger(__name__)

# A drafter that is not there so long after the verifier began to serve is done without.
MAX_AWAIT_S = 30.0
# One that is being attached, or is attached and prepares, has longer. On a GPU where its kernels
# were never compiled, either takes more than 30 s. It prepares only while it is idle, so that under
# load requests would meet what it has not captured for minutes.
MAX_PREPARE_S = 150.0


class AwaitedDrafters:
    """The drafters that have to attach, and prepare, before the stack counts as ready.

    Used on the event loop.

    Each is awaited once: one that is lost later costs drafts and no readiness. The verifier serves
    from its start, so this delays no request and no resumed stream.
    """

    def __init__(self, drafters: Iterable[DrafterHandle] = (), clock: Callable[[], float] = time.monotonic) -> None:
        """The wait begins now. ``clock``: seconds."""
        self._drafters = list(drafters)
        self._clock, self._began = clock, clock()

    def is_waiting(self) -> bool:
        """Return whether a drafter is still awaited; warn of each that was not there in time."""
        waited_s = self._clock() - self._began
        awaited = [drafter for drafter in self._drafters if not self._is_there(drafter)]
        late = [drafter for drafter in awaited if waited_s >= _most_s(drafter)]
        for drafter in late:
            _warn(drafter)
        self._drafters = [drafter for drafter in awaited if drafter not in late]
        return bool(self._drafters)

    @staticmethod
    def _is_there(drafter: DrafterHandle) -> bool:
        return drafter.is_detached or (drafter.num_attaches > 0 and not drafter.is_preparing)


def _most_s(drafter: DrafterHandle) -> float:
    # In this order: one that has just been attached is never neither.
    return MAX_PREPARE_S if drafter.is_attaching or drafter.num_attaches else MAX_AWAIT_S


def _warn(drafter: DrafterHandle) -> None:
    if drafter.num_attaches:
        logger.warning(
            "drafter %s has not captured its graphs within %.0f s; ready with what it has", drafter.name, MAX_PREPARE_S
        )
        return
    logger.warning(
        "drafter %s has not attached within %.0f s: %s; ready without it",
        drafter.name,
        _most_s(drafter),
        "it is still being attached" if drafter.is_attaching or not drafter.reason else drafter.reason,
    )
