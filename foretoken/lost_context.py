"""The exit of a process whose GPU context is lost, by a status that its supervisor knows.

After a fatal fault of a kernel every call of CUDA fails for as long as the process lives: only a new process helps.
Imports no torch: a drafter without a model has none.
"""

from __future__ import annotations

import logging
import os
import sys

# A process of ours ends with one of these. After the first one every other client of the MPS server has lost its
# context too, or may have; a device-side assertion is its process's own affair, with MPS and without.
CONTEXT_LOST_STATUS = 80
ASSERTION_STATUS = 81

# What CUDA calls cudaErrorAssert, in every release so far.
_ASSERTION = "device-side assert"

logger = logging.getLogger(__name__)


def exit_if_context_lost() -> None:
    """End this process at once if CUDA can do nothing more for it; to be called behind any failure.

    Nothing is cleaned up: what would have to be is on the GPU, and destructors that find their context lost abort.
    """
    fault = lost_context()
    if fault is None:
        return
    logger.critical("the GPU context is lost, this process ends: %s", fault)
    logging.shutdown()
    os._exit(ASSERTION_STATUS if _ASSERTION in fault else CONTEXT_LOST_STATUS)


def lost_context() -> str | None:
    """What every call of CUDA fails with, None where they succeed or CUDA is not in use.

    Waits for no work of this process: a stream that waits for another process may be the reason for the call.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    fault = None
    # An error that passes is reported once, to whoever asks first.
    for _ in range(2):
        try:
            # Graphs are captured on streams of normal priority, which PyTorch gives out again and again.
            torch.cuda.Stream(priority=-1).synchronize()
        except RuntimeError as error:
            fault = str(error).partition("\n")[0]
        else:
            return None
    return fault
