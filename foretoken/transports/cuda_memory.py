"""GPU memory that two processes map: one makes it and passes a file descriptor to the other.

It uses CUDA's virtual memory management. The older IPC handles fail across process namespaces on
some drivers.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch

from foretoken.transports.cuda_driver import call, device_index, driver, on


class CudaMemory:
    """An allocation of this or of another process, mapped here.

    It is unmapped by ``close``, or when this object and its last tensor (``tensor``) are gone. The
    memory is freed when no process maps it.
    """

    def __init__(
        self,
        device: torch.device,
        num_bytes: int,
        *,
        drain: Callable[[], None],
        fd: int | None = None,
        read_only: bool = False,
    ) -> None:
        """Allocate or map the memory.

        Raises UnavailableError or PreconditionError with the name of CUDA's error.

        Args:
            num_bytes: at least 1; the same in both processes.
            drain: returns when no stream uses the memory. The last user's thread calls it before
                the memory is unmapped, since unmapping does not wait. It must not refer to the
                memory.
            fd: descriptor from another process's ``export``, which the caller closes. None:
                allocate new memory, with undefined content.
            read_only: a kernel of this process that writes to the memory fails as any illegal
                access does: the GPU is unusable for this process from then on.
        """
        self.device = torch.device("cuda", device_index(device))
        self.num_bytes = num_bytes
        with on(self.device), contextlib.ExitStack() as undo:
            properties = _properties(self.device)
            granularity = call(
                "cuMemGetAllocationGranularity",
                properties,
                driver().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM,
            )
            size = -(-num_bytes // granularity) * granularity
            if fd is None:
                handle = call("cuMemCreate", size, properties, 0)
            else:
                handle = call("cuMemImportFromShareableHandle", fd, _handle_type())
            undo.callback(call, "cuMemRelease", handle)
            address = call("cuMemAddressReserve", size, 0, 0, 0)
            undo.callback(call, "cuMemAddressFree", address, size)
            call("cuMemMap", address, size, 0, handle, 0)
            undo.callback(call, "cuMemUnmap", address, size)
            call("cuMemSetAccess", address, size, [_access(self.device, read_only)], 1)
            undo.pop_all()
        self._handle = handle
        self._address = int(address)
        self._unmap = weakref.finalize(self, _unmap, self.device, address, size, handle, drain)
        # The end of the process frees everything, and may come after the driver is gone.
        self._unmap.atexit = False

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The interface by which PyTorch gets the memory and keeps this object.

        It rejects read-only memory.
        """
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": (self._address, False), "version": 3}

    def tensor(self) -> torch.Tensor:
        """Return the memory as a tensor uint8 [num_bytes]."""
        # Not kept here: the collector would not see the two hold each other.
        return torch.as_tensor(self, device=self.device)

    def export(self) -> int:
        """Return a descriptor to pass to another process.

        The caller may close it once it was passed.
        """
        with on(self.device):
            fd = int(call("cuMemExportToShareableHandle", self._handle, _handle_type(), 0))
        os.set_inheritable(fd, False)
        return fd

    def close(self) -> None:
        """Drain, then unmap; its tensors may not be used afterwards. Idempotent."""
        self._unmap()


def _unmap(device: torch.device, address: Any, size: int, handle: Any, drain: Callable[[], None]) -> None:
    drain()
    with on(device):
        call("cuMemUnmap", address, size)
        call("cuMemRelease", handle)
        call("cuMemAddressFree", address, size)


def _handle_type() -> Any:
    return driver().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _properties(device: torch.device) -> Any:
    properties = driver().CUmemAllocationProp()
    properties.type = driver().CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver().CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device.index
    properties.requestedHandleTypes = _handle_type()
    return properties


def _access(device: torch.device, read_only: bool) -> Any:
    access = driver().CUmemAccessDesc()
    access.location.type = driver().CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device.index
    flags = driver().CUmemAccess_flags
    access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READ if read_only else flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access
