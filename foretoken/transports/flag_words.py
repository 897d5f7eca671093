"""Order two processes' streams.

Two words of shared host memory hold the numbers of the last steps.

A stream signals by writing a number and waits until a word reaches one (CUDA's stream memory
operations). A host can write the words, too, so a stream never waits for a dead or stopped process.
An event of another process could hang a stream forever, and a polling kernel would take GPU time
from the other side.

Numbers are positive and below 2**31. They do not wrap around: at a step a millisecond they last 24
days of one attachment, and every attachment has new words.
"""

from __future__ import annotations

import logging
import mmap
import time
import weakref
from abc import ABC, abstractmethod

import numpy as np
import torch

from foretoken.overlap_memory import StreamOrder
from foretoken.transports.cuda_driver import call, checked, device_index, driver, on

logger = logging.getLogger(__name__)

FLAG_BYTES = mmap.PAGESIZE
# A number that ends every wait.
EVERY_STEP = 2**31 - 1

# Indices of the words in the memory as uint32. Each has its own cache lines, also where they come
# in pairs.
_STEP = 0
_DRAFT = 32
# Flags of cuMemHostRegister: portable and device-mapped.
_REGISTER_PORTABLE_DEVICEMAP = 0x01 | 0x02
# CUDA's mode of waiting until a word is at least the number.
_WAIT_GEQ = 0
# Seconds between two queries of streams that must become idle.
_DRAIN_EVERY_S = 0.0005
# Seconds between two reads of a word by a host without streams, and seconds until it stops waiting.
_LOOK_EVERY_S = 0.0001
HOST_TIMEOUT_S = 30.0


class FlagWords:
    """The shared words as the hosts see them."""

    def __init__(self, memory: mmap.mmap) -> None:
        """``memory``: FLAG_BYTES, zeroed by its maker.

        It stays open as long as this object lives.
        """
        self._words = np.frombuffer(memory, np.uint32)

    @property
    def address(self) -> int:
        return self._words.ctypes.data

    def number(self, word: int) -> int:
        return int(self._words[word])

    def raise_to(self, word: int, number: int) -> None:
        """Store ``number`` unless the word has reached it.

        This is not atomic: the device may write between read and store, or a smaller number after
        the store. So a host that releases its stream repeats this until the stream continues.
        """
        if self.number(word) < number:
            self._words[word] = number

    def release(self) -> None:
        """Let every stream continue."""
        self.raise_to(_STEP, EVERY_STEP)
        self.raise_to(_DRAFT, EVERY_STEP)


class _WordOrder(StreamOrder, ABC):
    """Order by the numbers in the shared words."""

    def __init__(self, words: FlagWords) -> None:
        self._words = words

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

    @abstractmethod
    def _signal(self, word: int, number: int) -> None:
        """Set a word, in stream order."""

    @abstractmethod
    def _await(self, word: int, number: int) -> None:
        """Wait, in stream order, until a word is at least the number."""


class HostOrder(_WordOrder):
    """Order for hosts that do all work themselves: an ``await`` blocks.

    Tests of GPU kernels on a CPU are such hosts.
    """

    def __init__(self, words: FlagWords, timeout_s: float = HOST_TIMEOUT_S) -> None:
        """Let a wait end by itself after ``timeout_s``.

        Nobody else could release the caller.
        """
        super().__init__(words)
        self._timeout_s = timeout_s

    def _signal(self, word: int, number: int) -> None:
        self._words.raise_to(word, number)

    def _await(self, word: int, number: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        while self._words.number(word) < number:
            if time.monotonic() > deadline:
                logger.warning("step %d did not arrive within %g s; continuing without it", number, self._timeout_s)
                return
            time.sleep(_LOOK_EVERY_S)


class CudaOrder(_WordOrder):
    """Order for streams on a GPU. Each call concerns PyTorch's current stream and returns at once.

    The memory is unregistered after this object is gone, once its streams are idle.
    """

    def __init__(self, words: FlagWords, device: torch.device) -> None:
        """Register the words with CUDA.

        Raises UnavailableError or PreconditionError, as cuda_driver.call.
        """
        super().__init__(words)
        self._device = torch.device("cuda", device_index(device))
        # Handles of the streams that have signalled or waited.
        self._streams: set[int] = set()
        self._write_value, self._wait_value = driver().cuStreamWriteValue32, driver().cuStreamWaitValue32
        with on(self._device):
            call("cuMemHostRegister", words.address, FLAG_BYTES, _REGISTER_PORTABLE_DEVICEMAP)
            self._unregister = weakref.finalize(self, _unregister, self._device, words, self._streams)
            self._unregister.atexit = False
            self._address = int(call("cuMemHostGetDevicePointer", words.address, 0))

    def drain(self) -> None:
        """Let all streams that were ordered here continue, and wait until they are idle.

        Any thread may call it.
        """
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
                # A late write of the other side's stream may have lowered a word.
                words.release()
            checked("cuStreamQuery", result)


def _unregister(device: torch.device, words: FlagWords, streams: set[int]) -> None:
    _drain(device, words, streams)
    with on(device):
        call("cuMemHostUnregister", words.address)
