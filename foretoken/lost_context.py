"""End a process whose GPU context is lost, with a status that its supervisor knows.

After a fatal fault in a kernel every CUDA call of the process fails, so only a new process helps.
This module does not import torch: a drafter without a model runs without it.
"""

from __future__ import annotations

import logging
import os
import sys

# After the first status every other client of the MPS server may have lost its context too. A
# device-side assertion affects only its own process, with and without MPS.
CONTEXT_LOST_STATUS = 80
ASSERTION_STATUS = 81

# CUDA's text for cudaErrorAssert, in every release so far.
_ASSERTION = "device-side assert"

logger = logging.getLogger(__name__)


def exit_if_context_lost() -> None:
    """End this process at once if its GPU context is lost. Call it after any failure.

    It cleans nothing up: destructors abort when they find their context lost.
    """
    fault = lost_context()
    if fault is None:
        return
    logger.critical("the GPU context is lost, this process ends: %s", fault)
    logging.shutdown()
    os._exit(ASSERTION_STATUS if _ASSERTION in fault else CONTEXT_LOST_STATUS)


def lost_context() -> str | None:
    """Return the error of every CUDA call; None if calls succeed or CUDA is not in use.

    It does not wait for this process's work: the caller's stream may be waiting for another
    process.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    fault = None
    # CUDA reports a transient error once, to the first caller.
    for _ in range(2):
        try:
            # PyTorch reuses streams of normal priority, and graphs are captured on them.
            torch.cuda.Stream(priority=-1).synchronize()
        except RuntimeError as error:
            fault = str(error).partition("\n")[0]
        else:
            return None
    return fault
