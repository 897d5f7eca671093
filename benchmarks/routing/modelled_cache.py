"""A prefix cache that exists in numbers only: which blocks are in use, and which can be found.

It follows ``verifier_svc/scheduling/block_manager.py``: running sequences share blocks, the cache
keeps what nobody uses while there is room, and it drops first what was released longest ago, a
sequence's last blocks before its first ones.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence as Items


class ModelledCache:
    """``num_blocks`` KV blocks of one verifier.

    A block of a prompt is known by its id in the trace.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        # How many running sequences use a prompt's block, and which of these blocks are computed.
        self._uses: Counter[int] = Counter()
        self._computed: set[int] = set()
        # Blocks of running sequences besides: what follows a prompt's whole blocks.
        self._num_private = 0
        # Unused blocks that still hold a prefix; the one that was released first comes first.
        self._unused: OrderedDict[int, None] = OrderedDict()
        self._last_output_block = 0

    @property
    def num_used(self) -> int:
        """Return how many blocks running sequences use."""
        return len(self._uses) + self._num_private

    @property
    def fill(self) -> float:
        """Return the share of blocks in use."""
        return self.num_used / self._num_blocks

    def start(self, blocks: Items[int], num_private: int) -> int | None:
        """Take the blocks of a prompt and ``num_private`` more for one sequence.

        Returns how many of the prompt's blocks were found; None if there is no room beside others,
        and nothing is taken then.
        """
        num_new = sum(block not in self._uses for block in blocks) + num_private
        if self.num_used and self.num_used + num_new > self._num_blocks:
            return None
        num_found = 0
        for block in blocks:
            if block not in self._computed and block not in self._unused:
                break
            num_found += 1
        for block in blocks:
            if block in self._unused:
                del self._unused[block]
                self._computed.add(block)
            self._uses[block] += 1
        self._num_private += num_private
        self._evict()
        return num_found

    def compute(self, blocks: Items[int]) -> None:
        """Let blocks of a running sequence's prompt be found."""
        self._computed.update(blocks)

    def release(self, blocks: Items[int], num_private: int, num_outputs: int) -> None:
        """Free a sequence's blocks.

        ``num_outputs`` private ones are full: they stay in the cache a while.
        """
        self._num_private -= num_private
        for _ in range(num_outputs):
            self._last_output_block -= 1
            self._unused[self._last_output_block] = None
        for block in reversed(blocks):
            self._uses[block] -= 1
            if not self._uses[block]:
                del self._uses[block]
                self._computed.remove(block)
                self._unused[block] = None
        self._evict()

    def clear(self) -> None:
        """Lose everything."""
        self._uses.clear()
        self._computed.clear()
        self._unused.clear()
        self._num_private = 0

    def _evict(self) -> None:
        while self._unused and len(self._unused) > self._num_blocks - self.num_used:
            self._unused.popitem(last=False)
