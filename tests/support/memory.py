"""How much memory this process has in use."""

from __future__ import annotations

import os
from pathlib import Path


def rss_bytes() -> int:
    """Return the bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
