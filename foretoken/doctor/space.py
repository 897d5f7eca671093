"""Room on disks, and in the shared memory that CUDA uses between processes."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from foretoken.doctor.finding import Finding, fault, ok, warning

_GIB = 2**30
# MPS and CUDA keep small files there.
MIN_SHM_GIB = 0.06
# Compiled kernels and the stack's sockets and logs.
MIN_DISK_GIB = 1.0
SHM = Path("/dev/shm")


@dataclass(frozen=True)
class Space:
    """Of the file system that holds ``folder``. ``free_gib``: None if the folder does not exist."""

    folder: Path
    free_gib: float | None
    is_writable: bool


def check_shm(space: Space) -> Finding:
    """Judge ``/dev/shm`` of a machine with a GPU."""
    name = str(space.folder)
    if space.free_gib is None or not space.is_writable:
        found = "is missing" if space.free_gib is None else "is not writable"
        return fault(name, found, "mount a tmpfs there; CUDA's services between processes need it")
    if space.free_gib < MIN_SHM_GIB:
        return warning(name, f"{space.free_gib * 1024:.0f} MiB free", "start the container with --shm-size 1g")
    return ok(name, f"{space.free_gib:.1f} GiB free")


def check_disk(name: str, space: Space, needed_gib: float = MIN_DISK_GIB) -> Finding:
    """Judge the disk of a folder that files are written to. ``name``: what the folder is for."""
    if space.free_gib is None:
        return fault(name, f"{space.folder} cannot be made", "make it, or name another folder")
    found = f"{space.free_gib:.1f} GiB free in {space.folder}"
    if not space.is_writable:
        return fault(name, f"{found}, where this user may not write", "give the folder to this user, or name another")
    return (
        warning(name, found, f"make room: {needed_gib:.1f} GiB are wanted")
        if space.free_gib < needed_gib
        else ok(name, found)
    )


def read_space(folder: Path) -> Space:
    """Return the space of a folder, or of the nearest parent in which it would be made."""
    at = folder
    while not at.exists() and at != at.parent:
        at = at.parent
    if not at.is_dir():
        return Space(folder, None, is_writable=False)
    return Space(folder, shutil.disk_usage(at).free / _GIB, os.access(at, os.W_OK | os.X_OK))
