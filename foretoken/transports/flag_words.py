"""Order between two processes' streams: two words of shared host memory hold the numbers of the last steps.

A stream signals by writing a number and waits for one (CUDA's stream memory operations); a host can write it as well,
so that a stream never waits for a process that has died or stands still. An event of another process could hang it for
ever, and a kernel that polls takes the GPU's time from the other side.

Numbers are positive and below 2**31, and nobody handles their wrapping round: at a step a millisecond they last 24 days
of one attachment, and the words are new in each.
"""

from __future__ import annotations

import logging
import mmap
import time
import weakref

import numpy as np
import torch

from foretoken.resident import StreamOrder
from foretoken.transports.cuda_driver import call, checked, device_index, driver, on

logger = logging.getLogger(__name__)

FLAG_BYTES = mmap.PAGESIZE
# Lets a stream past whatever it waits for.
EVERY_STEP = 2**31 - 1

# The words, by their place in the page as uint32: each in cache lines of its own, also where those come in pairs.
_STEP = 0
_DRAFT = 32
# CUDA's names for what cuMemHostRegister is to do.
_REGISTER_PORTABLE_DEVICEMAP = 0x01 | 0x02
# Waits until a word is at least the number.
_WAIT_GEQ = 0
# Between two looks at streams that are to become idle.
_DRAIN_EVERY_S = 0.0005
# Between two looks at a word by a host without streams, and how long it looks.
_LOOK_EVERY_S = 0.0001
HOST_PATIENCE_S = 30.0


class FlagWords:
    """The page, as the hosts see it. Knows no streams."""

    def __init__(self, memory: mmap.mmap) -> None:
        """``memory``: FLAG_BYTES, zeroed by whoever made it; it stays open as long as this object lives."""
        self._words = np.frombuffer(memory, np.uint32)

    @property
    def address(self) -> int:
        return self._words.ctypes.data

    def number(self, word: int) -> int:
        return int(self._words[word])

    def raise_to(self, word: int, number: int) -> None:
        """A plain store, unless the word is there already.

        A number that a device writes between look and store, or a smaller one that it writes behind the store, may
        undo the other: a host that releases its stream does so again until the stream goes on.
        """
        if self.number(word) < number:
            self._words[word] = number

    def release(self) -> None:
        """Let every stream go on."""
        self.raise_to(_STEP, EVERY_STEP)
        self.raise_to(_DRAFT, EVERY_STEP)


class HostOrder(StreamOrder):
    """Of hosts that do all work themselves, as the tests of GPU kernels on a CPU: an ``await`` holds the caller up."""

    def __init__(self, words: FlagWords, patience_s: float = HOST_PATIENCE_S) -> None:
        """``patience_s``: nobody else could release the caller, so it goes on by itself then."""
        self._words = words
        self._patience_s = patience_s

    def signal_step(self, number: int) -> None:
        self._words.raise_to(_STEP, number)

    def await_step(self, number: int) -> None:
        self._await(_STEP, number)

    def signal_draft(self, number: int) -> None:
        self._words.raise_to(_DRAFT, number)

    def await_draft(self, number: int) -> None:
        self._await(_DRAFT, number)

    def release_draft(self, number: int) -> None:
        self._words.raise_to(_DRAFT, number)

    def release_step(self, number: int) -> None:
        self._words.raise_to(_STEP, number)

    def _await(self, word: int, number: int) -> None:
        deadline = time.monotonic() + self._patience_s
        while self._words.number(word) < number:
            if time.monotonic() > deadline:
                logger.warning("number %d did not come in %g s; going on without", number, self._patience_s)
                return
            time.sleep(_LOOK_EVERY_S)


class CudaOrder(StreamOrder):
    """Of streams on a GPU: each call is about PyTorch's current one, and returns at once.

    The page is unregistered when the object is gone, once its streams are idle.
    """

    def __init__(self, words: FlagWords, device: torch.device) -> None:
        """Raises UnavailableError or PreconditionError, as cuda_driver.call."""
        self._words = words
        self._device = torch.device("cuda", device_index(device))
        # Handles of the streams that have signalled or waited.
        self._streams: set[int] = set()
        self._write_value, self._wait_value = driver().cuStreamWriteValue32, driver().cuStreamWaitValue32
        with on(self._device):
            call("cuMemHostRegister", words.address, FLAG_BYTES, _REGISTER_PORTABLE_DEVICEMAP)
            self._unregister = weakref.finalize(self, _unregister, self._device, words, self._streams)
            self._unregister.atexit = False
            self._address = int(call("cuMemHostGetDevicePointer", words.address, 0))

    def signal_step(self, number: int) -> None:
        self._signal(_STEP, number)

    def await_step(self, number: int) -> None:
        self._await(_STEP, number)

    def signal_draft(self, number: int) -> None:
        self._signal(_DRAFT, number)

    def await_draft(self, number: int) -> None:
        self._await(_DRAFT, number)

    def release_draft(self, number: int) -> None:
        self._words.raise_to(_DRAFT, number)

    def release_step(self, number: int) -> None:
        self._words.raise_to(_STEP, number)

    def drain(self) -> None:
        """Let all streams that were ordered here go on, and wait until they are idle. From any thread."""
        _drain(self._device, self._words, self._streams)

    def _signal(self, word: int, number: int) -> None:
        result = self._write_value(self._stream(), self._address + 4 * word, number, 0)
        checked("cuStreamWriteValue32", result)

    def _await(self, word: int, number: int) -> None:
        result = self._wait_value(self._stream(), self._address + 4 * word, number, _WAIT_GEQ)
        checked("cuStreamWaitValue32", result)

    def _stream(self) -> int:
        stream: int = torch.cuda.current_stream(self._device).cuda_stream
        self._streams.add(stream)
        return stream


def _drain(device: torch.device, words: FlagWords, streams: set[int]) -> None:
    not_ready = driver().CUresult.CUDA_ERROR_NOT_READY
    with on(device):
        for stream in tuple(streams):
            words.release()
            while (result := driver().cuStreamQuery(stream))[0] == not_ready:
                time.sleep(_DRAIN_EVERY_S)
                # What the other side's stream still had to write may have lowered a word.
                words.release()
            checked("cuStreamQuery", result)


def _unregister(device: torch.device, words: FlagWords, streams: set[int]) -> None:
    _drain(device, words, streams)
    with on(device):
        call("cuMemHostUnregister", words.address)
