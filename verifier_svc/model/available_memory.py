"""How much memory this process may still take: what the machine has left, or what its container may have."""

from __future__ import annotations

from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
# Folder below CGROUPS, limit and usage of versions 2 and 1, and the name in memory.stat of the bytes of page cache that
# are given up first.
_VERSIONS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_memory(cgroups: Path = CGROUPS) -> int:
    """Bytes that are free or can be freed, on the machine and below the container's limit.

    ``cgroups``: where the control groups are mounted; a container finds its own at the top.
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
    """Empty where there is no such file."""
    return path.read_text().strip() if path.is_file() else ""
