"""Build the corpus of installed Python sources, and split it into training and held-out files.

The rule, in order:

1. Discover files below the roots.
2. Drop junk (``source_rule``).
3. Set the held-out packages aside (``held_out``).
4. Drop exact copies.
5. Drop files whose shingles mostly occur in held-out files.
6. Drop near duplicates of held-out files and of training files already kept.
7. Cap each package's bytes.

Package and path fix the order of files, so the same installation gives the same split.
"""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import os
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from models.demo.held_out import HELD_OUT_DEPENDENCIES, HELD_OUT_STANDARD_LIBRARY, TEST_DIRECTORIES
from models.demo.near_duplicates import (
    NearDuplicateIndex,
    UInt64,
    content_hash,
    share_inside,
    shingles,
    signature,
)
from models.demo.source_rule import RejectedSource, check_syntax, is_skipped_path, read_source

HELD_OUT_PACKAGES = frozenset(HELD_OUT_STANDARD_LIBRARY) | frozenset(HELD_OUT_DEPENDENCIES)
MAX_SIMILARITY = 0.7
MAX_SIMILARITY_TO_HELD_OUT = 0.4
MAX_SHARE_INSIDE_HELD_OUT = 0.4
MAX_PACKAGE_BYTES = 32_000_000
STANDARD_LIBRARY_DISTRIBUTION = "Python standard library"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One discovered file. ``package`` is its top-level import name."""

    path: Path
    package: str
    distribution: str

    @property
    def is_held_out(self) -> bool:
        return self.package in HELD_OUT_PACKAGES


@dataclass(frozen=True, slots=True)
class ScannedFile:
    """A readable file with its duplicate keys. ``rejected`` says why it has none."""

    source: SourceFile
    num_bytes: int
    rejected: str | None = None
    content_hash: str = ""
    share_inside_held_out: float = 0.0
    signature: UInt64 = field(default_factory=lambda: np.empty(0, np.uint64))


@dataclass(slots=True)
class Corpus:
    """The split. ``dropped`` counts files by reason. Held-out files have no duplicates."""

    train: list[SourceFile] = field(default_factory=list)
    held_out: list[SourceFile] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    kept_bytes: Counter[str] = field(default_factory=Counter)


def build_corpus(extra_roots: Sequence[Path] = (), num_workers: int | None = None) -> Corpus:
    """Apply the rule to the running interpreter's files and to ``extra_roots``.

    ``extra_roots`` have the layout of site-packages.
    """
    return split_corpus(discover(extra_roots), num_workers)


def discover(extra_roots: Sequence[Path] = ()) -> list[SourceFile]:
    """Return all candidate files: standard library, site-packages, ``extra_roots``; each sorted."""
    paths = sysconfig.get_paths()
    files = list(_discover_root(Path(paths["stdlib"]), is_standard_library=True))
    seen_packages = {file.package for file in files}
    for root in dict.fromkeys((Path(paths["purelib"]), Path(paths["platlib"]), *extra_roots)):
        found = [file for file in _discover_root(root) if file.package not in seen_packages]
        seen_packages.update(file.package for file in found)
        files.extend(found)
    return files


def split_corpus(files: Sequence[SourceFile], num_workers: int | None = None) -> Corpus:
    """Sort discovered files into train, held-out and dropped."""
    workers = num_workers or os.cpu_count() or 1
    held_out = _scan([file for file in files if file.is_held_out], workers)
    texts = (read_source(file.source.path) for file in held_out if file.rejected is None)
    reference = np.unique(np.concatenate([np.empty(0, np.uint64), *(shingles(text) for text in texts)]))
    with tempfile.TemporaryDirectory() as folder:
        reference_file = Path(folder) / "held_out_shingles.npy"
        np.save(reference_file, reference)
        train = _scan([file for file in files if not file.is_held_out], workers, reference_file)
    return _deduplicate(held_out, train)


def _deduplicate(held_out: Sequence[ScannedFile], train: Sequence[ScannedFile]) -> Corpus:
    corpus = Corpus()
    hashes: set[str] = set()
    held_out_index, train_index = NearDuplicateIndex(), NearDuplicateIndex()
    for file in (*held_out, *train):
        is_held_out = file.source.is_held_out
        package = file.source.package
        reason = file.rejected
        if reason is None and file.content_hash in hashes:
            reason = "exact duplicate"
        if reason is None:
            hashes.add(file.content_hash)
            similarity = held_out_index.highest_similarity(file.signature)
            if is_held_out:
                reason = "near duplicate" if similarity >= MAX_SIMILARITY else None
            elif similarity >= MAX_SIMILARITY_TO_HELD_OUT or file.share_inside_held_out >= MAX_SHARE_INSIDE_HELD_OUT:
                reason = "copy of held-out"
            elif train_index.highest_similarity(file.signature) >= MAX_SIMILARITY:
                reason = "near duplicate"
            elif corpus.kept_bytes[package] + file.num_bytes > MAX_PACKAGE_BYTES:
                reason = "package cap"
        if reason is not None:
            corpus.dropped[reason] += 1
            continue
        (held_out_index if is_held_out else train_index).add(file.signature)
        (corpus.held_out if is_held_out else corpus.train).append(file.source)
        corpus.kept_bytes[package] += file.num_bytes
    return corpus


def scan_file(source: SourceFile, held_out_shingles: Path | None = None) -> ScannedFile:
    """Judge a file and compute its duplicate keys, also against shingles in a ``.npy`` file."""
    try:
        text = read_source(source.path)
        check_syntax(text)
    except RejectedSource as error:
        return ScannedFile(source, 0, error.reason)
    text_shingles = shingles(text)
    share = 0.0 if held_out_shingles is None else share_inside(text_shingles, _load_shingles(held_out_shingles))
    num_bytes = len(text.encode())
    return ScannedFile(source, num_bytes, None, content_hash(text), share, signature(text_shingles))


@cache
def _load_shingles(file: Path) -> UInt64:
    loaded: UInt64 = np.load(file)
    return loaded


def _scan(files: Sequence[SourceFile], num_workers: int, held_out_shingles: Path | None = None) -> list[ScannedFile]:
    work = partial(scan_file, held_out_shingles=held_out_shingles)
    if num_workers == 1 or len(files) < 32:
        return list(map(work, files))
    with multiprocessing.get_context("spawn").Pool(num_workers) as pool:
        return pool.map(work, files, chunksize=16)


def _discover_root(root: Path, is_standard_library: bool = False) -> Iterator[SourceFile]:
    distributions = {} if is_standard_library else _distribution_names(root)
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if is_skipped_path(relative):
            continue
        package = relative.parts[0].removesuffix(".py")
        if package in HELD_OUT_PACKAGES and TEST_DIRECTORIES.intersection(relative.parts):
            continue
        if is_standard_library:
            if package in ("test", "pydoc_data") or TEST_DIRECTORIES.intersection(relative.parts):
                continue
            yield SourceFile(path, package, STANDARD_LIBRARY_DISTRIBUTION)
        else:
            yield SourceFile(path, package, distributions.get(package, package))


def _distribution_names(root: Path) -> dict[str, str]:
    """Return ``name version`` of the distribution of each top-level import name below ``root``."""
    names: dict[str, str] = {}
    for distribution in importlib.metadata.distributions(path=[str(root)]):
        label = f"{distribution.metadata['Name']} {distribution.version}"
        for file in distribution.files or ():
            if file.suffix == ".py" and ".." not in file.parts:
                names.setdefault(file.parts[0].removesuffix(".py"), label)
    return names


def package_table(corpus: Corpus) -> list[dict[str, str | int]]:
    """Return kept files and bytes of each distribution and side of the split, largest first."""
    rows: dict[tuple[str, str], NDArray[np.int64]] = {}
    for side, files in (("train", corpus.train), ("held-out", corpus.held_out)):
        for file in files:
            counts = rows.setdefault((side, file.distribution), np.zeros(2, np.int64))
            counts += (1, file.path.stat().st_size)
    version = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    table: list[dict[str, str | int]] = [
        {
            "side": side,
            "distribution": f"{name} {version}" if name == STANDARD_LIBRARY_DISTRIBUTION else name,
            "files": int(counts[0]),
            "bytes": int(counts[1]),
        }
        for (side, name), counts in rows.items()
    ]
    return sorted(table, key=lambda row: (row["side"], -int(row["bytes"])))
