"""Find how much memory this process may still take, on the machine and in its container."""

from __future__ import annotations

from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
# For control groups of version 2 and of version 1: the folder below CGROUPS, the files with limit
# and usage, and the field of memory.stat with the page cache that the kernel reclaims first.
_VERSIONS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_memory(cgroups: Path = CGROUPS) -> int:
    """Return the free and freeable bytes, on the machine and within the container's limit.

    ``cgroups``: where control groups are mounted; a container sees its own group at the top.
    """
    available = int(psutil.virtual_memory().available)
    for folder, limit_file, usage_file, reclaimable in _VERSIONS:
        group = cgroups / folder
        limit = _read(group / limit_file)
        # Version 2 writes "max" for no limit, version 1 a number beyond any machine's memory.
        if not limit.isdigit():
            continue
        stat = dict(line.split() for line in _read(group / "memory.stat").splitlines())
        used = int(_read(group / usage_file)) - int(stat.get(reclaimable, 0))
        available = min(available, max(int(limit) - used, 0))
    return available


def _read(path: Path) -> str:
    """Return a file's text without surrounding white space; empty if there is no such file."""
    return path.read_text().strip() if path.is_file() else ""
