"""Keep what routing knows of each verifier in arrays: a decision over 1,000 takes microseconds."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]

# Rows of a verifier that has not reported them.
ASSUMED_ROWS = 16
UNKNOWN_ROOM = 2**31
# The finalizer of MurmurHash3, by Austin Appleby.
_MIX = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))
_SHIFT = np.uint64(33)


class Fleet:
    """The verifiers by number, and their columns. A vacant number is never open.

    Attributes:
        addresses: the name of each; gateways that know a verifier by one name agree about it.
        load: sequences that run or wait at each.
        usual: ``load`` smoothed by ``remember``.
        rows: sequences that each runs at once.
        fill: share of each one's KV blocks in use, in 0 .. 1.
        room: new sequences that each one's queue takes.
        is_open: whether each takes sequences, if its queue has room.
        version: changes whenever ``is_open`` does.
    """

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self._vacant: list[int] = []
        self._models: dict[str, int] = {"": 0}
        self._ids = np.zeros(0, np.uint64)
        self.is_open = np.zeros(0, np.bool_)
        self.version = 0
        self._model = np.zeros(0, np.int64)
        self.load = np.zeros(0)
        self.usual = np.zeros(0)
        self.rows = np.zeros(0)
        self.fill = np.zeros(0)
        self.room = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self.addresses)

    def add(self, address: str) -> int:
        """Add a verifier, which is not open yet; return its number."""
        if self._vacant:
            number = self._vacant.pop()
            self.addresses[number] = address
        else:
            number = len(self.addresses)
            self.addresses.append(address)
            for name in ("_ids", "is_open", "_model", "load", "usual", "rows", "fill", "room"):
                setattr(self, name, np.append(getattr(self, name), np.zeros(1, getattr(self, name).dtype)))
        digest = hashlib.blake2b(address.encode(), digest_size=8).digest()
        self._ids[number] = int.from_bytes(digest, "little")
        self.update(number, load=0)
        return number

    def remove(self, number: int) -> None:
        """Forget a verifier. Its number may be given to another one."""
        self.close(number)
        self._vacant.append(number)

    def open(self, number: int, model: str) -> None:
        """Let a verifier take sequences of ``model``, a fingerprint.

        Its present load is its usual one.
        """
        if not self.is_open[number]:
            self.usual[number] = self.load[number]
        self._model[number] = self._models.setdefault(model, len(self._models))
        self._set_open(number, True)

    def close(self, number: int) -> None:
        """Let a verifier take no more sequences."""
        self._set_open(number, False)

    def update(
        self, number: int, *, load: int, rows: int = ASSUMED_ROWS, fill: float = 0.0, room: int | None = None
    ) -> None:
        """Replace a verifier's figures. ``room``: None: unknown, and taken for enough."""
        self.load[number] = load
        self.rows[number] = rows
        self.fill[number] = fill
        self.room[number] = UNKNOWN_ROOM if room is None else room

    def remember(self, weight: float) -> None:
        """Move ``usual`` towards ``load`` by ``weight`` of the way, in 0 .. 1."""
        self.usual += (self.load - self.usual) * weight

    def _set_open(self, number: int, is_open: bool) -> None:
        if self.is_open[number] != is_open:
            self.is_open[number] = is_open
            self.version += 1

    def open_for(self, model: str, num_new: int) -> Mask:
        """Return which verifiers may take ``num_new`` new sequences of ``model``.

        An empty name means any model.
        """
        found = self.is_open & (self.room >= num_new)
        if model:
            found &= self._model == self._models.get(model, -1)
        return found

    def scores(self, key: int) -> npt.NDArray[np.uint64]:
        """Return each verifier's score for a key: the highest is the key's first verifier.

        Rendezvous hashing (Thaler and Ravishankar, 1998): if a verifier comes or goes, only keys
        move that it takes or had.
        """
        mixed = self._ids ^ np.uint64(key)
        for factor in _MIX:
            mixed ^= mixed >> _SHIFT
            mixed *= factor
        mixed ^= mixed >> _SHIFT
        return mixed
