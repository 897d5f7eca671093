"""Find exact and near duplicates of source texts: content hashes, token shingles, MinHash, LSH.

Two texts are near duplicates if the Jaccard similarity of their sets of ``SHINGLE_TOKENS``-token
shingles, estimated from ``NUM_HASHES`` minima, reaches a threshold.
"""

from __future__ import annotations

import hashlib
import re
import zlib

import numpy as np
from numpy.typing import NDArray

UInt64 = NDArray[np.uint64]

SHINGLE_TOKENS = 6
NUM_BANDS = 16
ROWS_PER_BAND = 4
NUM_HASHES = NUM_BANDS * ROWS_PER_BAND
_CHUNK_SHINGLES = 8_192

_TOKEN = re.compile(r"\w+|[^\w\s]")
_POLYNOMIAL_BASE = np.uint64(0x9E3779B97F4A7C15)


def _hash_family() -> tuple[UInt64, UInt64]:
    """Return the hash functions' odd multipliers and offsets [1, NUM_HASHES], fixed by a seed."""
    generator = np.random.Generator(np.random.PCG64(20_240_229))
    multipliers = generator.integers(1, 2**63, size=(1, NUM_HASHES), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    offsets = generator.integers(0, 2**63, size=(1, NUM_HASHES), dtype=np.uint64)
    return multipliers, offsets


_MULTIPLIERS, _OFFSETS = _hash_family()


def content_hash(text: str) -> str:
    """Return a hash that ignores blank lines, whole-line comments and white space at line ends."""
    lines = (line.rstrip() for line in text.split("\n"))
    kept = "\n".join(line for line in lines if line and not line.lstrip().startswith("#"))
    return hashlib.sha256(kept.encode("utf-8", "surrogatepass")).hexdigest()


def shingles(text: str) -> UInt64:
    """Return sorted distinct hashes of the text's token shingles; white space does not count."""
    tokens = np.array([zlib.crc32(token.encode("utf-8", "surrogatepass")) for token in _TOKEN.findall(text)], np.uint64)
    num_shingles = max(len(tokens) - SHINGLE_TOKENS + 1, 0)
    hashes = np.zeros(num_shingles, np.uint64)
    for position in range(SHINGLE_TOKENS):
        hashes = hashes * _POLYNOMIAL_BASE + tokens[position : position + num_shingles]
    hashes ^= hashes >> np.uint64(31)
    hashes *= np.uint64(0xBF58476D1CE4E5B9)
    hashes ^= hashes >> np.uint64(27)
    return np.unique(hashes)


def signature(text_shingles: UInt64) -> UInt64:
    """Return the MinHash signature [NUM_HASHES] of a set of shingles; all ones for an empty set."""
    minima = np.full(NUM_HASHES, np.iinfo(np.uint64).max, np.uint64)
    for start in range(0, len(text_shingles), _CHUNK_SHINGLES):
        chunk = text_shingles[start : start + _CHUNK_SHINGLES, None]
        minima = np.minimum(minima, (chunk * _MULTIPLIERS + _OFFSETS).min(axis=0))
    return minima


def share_inside(text_shingles: UInt64, reference: UInt64) -> float:
    """Return the share (0 to 1) of a text's shingles that also occur in ``reference`` (sorted)."""
    if not len(text_shingles) or not len(reference):
        return 0.0
    places = np.minimum(np.searchsorted(reference, text_shingles), len(reference) - 1)
    return float(np.mean(reference[places] == text_shingles))


class NearDuplicateIndex:
    """Known signatures, found by any of ``NUM_BANDS`` bands of ``ROWS_PER_BAND`` equal minima."""

    def __init__(self) -> None:
        self._signatures: list[UInt64] = []
        self._bands: dict[tuple[int, bytes], list[int]] = {}

    def highest_similarity(self, candidate: UInt64) -> float:
        """Return the largest estimated similarity to a signature that shares a band, else 0."""
        found: set[int] = set()
        for key in self._keys(candidate):
            found.update(self._bands.get(key, ()))
        if not found:
            return 0.0
        others = np.stack([self._signatures[index] for index in found])
        return float((others == candidate).mean(axis=1).max())

    def add(self, new: UInt64) -> None:
        """Add one signature to the index."""
        for key in self._keys(new):
            self._bands.setdefault(key, []).append(len(self._signatures))
        self._signatures.append(new)

    @staticmethod
    def _keys(one: UInt64) -> list[tuple[int, bytes]]:
        return [(band, one[band * ROWS_PER_BAND : (band + 1) * ROWS_PER_BAND].tobytes()) for band in range(NUM_BANDS)]
