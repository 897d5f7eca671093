"""Row checks that passed at earlier starts, in a file, each for all that its result depends on.

A check counts again only where nothing of this has changed: the model's files, the project's
sources, the versions of compiler and libraries, the CPU, the numbers of threads. A check that
failed is never kept.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from foretoken_kernels.cpu import compile as compiler

_log = logging.getLogger(__name__)

FILE_NAME = "row-checks.json"
# Checks that a file holds, the newest ones.
MOST_KEPT = 64
# Lines of /proc/cpuinfo that say which CPU this is; cores may differ.
_CPU_KEYS = ("vendor_id", "cpu family", "model", "model name", "stepping", "microcode", "flags")


def checks_file() -> Path | None:
    """Return the file for this user: beside the compiled kernels, or in ``~/.cache``.

    It is None without a home.
    """
    if (folder := compiler.cache_folder()) is not None:
        return folder / FILE_NAME
    try:
        return Path.home() / ".cache" / "foretoken" / FILE_NAME
    except RuntimeError:
        return None


def machine_facts(source_folders: Iterable[Path]) -> dict[str, str]:
    """Return what the arithmetic of a CPU's passes depends on, apart from the model and its sizes.

    ``source_folders``: packages whose sources run in a pass or in the check.
    """
    return {
        **compiler.facts(),
        "python": platform.python_version(),
        "torch": f"{torch.__version__}\n{torch.__config__.show()}",
        "threads": torch.__config__.parallel_info(),
        "numpy": np.__version__,
        "cpu": _cpu(),
        "sources": _digest_of(source_folders),
    }


class KeptCheck:
    """One row check, by the facts that its result depends on."""

    def __init__(self, path: Path, facts: Mapping[str, str]) -> None:
        """``path``: the file, which need not exist."""
        self.path = path
        self._key = hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode()).hexdigest()

    def passed_at(self) -> str | None:
        """Return when this check passed, as an ISO 8601 time; None if no start kept that."""
        return self._read().get(self._key)

    def keep(self) -> None:
        """Write that the check has passed now. A file that cannot be written is only logged."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        kept = sorted((self._read() | {self._key: now}).items(), key=lambda item: item[1])
        self._write(dict(kept[-MOST_KEPT:]))

    def forget(self) -> None:
        """Remove the check, which has failed, if an earlier start kept it."""
        kept = self._read()
        if kept.pop(self._key, None) is not None:
            self._write(kept)

    def _read(self) -> dict[str, str]:
        """Return all times by key.

        There are none if the file is missing or damaged: the check then runs again.
        """
        try:
            found = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        if not isinstance(found, dict):
            return {}
        return {key: at for key, at in found.items() if isinstance(at, str)}

    def _write(self, kept: Mapping[str, str]) -> None:
        """Replace the file; readers see either the old one or the new one."""
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(kept, indent=1) + "\n")
            temporary.replace(self.path)
        except OSError as error:
            _log.info("the next start checks numerics again: %s", error)


def _cpu() -> str:
    """Return the lines that name the CPU's cores, each once."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(sorted({line for line in lines if line.partition(":")[0].strip() in _CPU_KEYS}))


def _digest_of(folders: Iterable[Path]) -> str:
    """Return a digest of the names and contents of all Python files in some folders."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{folder.name}/{path.relative_to(folder)} {len(content)}\n".encode() + content)
    return digest.hexdigest()
