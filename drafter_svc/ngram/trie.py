"""Compiled loops of the n-gram drafter: a suffix trie in flat arrays, and how it is read.

It knows arrays and token ids only. trie_growth.py adds to it and evicts.

Every window of at most ``depth`` consecutive tokens is a path from the root of its tenant's salt. A
new token extends the ``depth`` paths that started at the last tokens. The path of the last w tokens
then ends at the node of that suffix. So every suffix is already matched, without a search.

- Most windows occur once. Where a path leaves all others it gets one stored node. Its later tokens
  stay in the text, which is kept, so they cost nothing. The stored node's CHILD is minus the place
  of its token in the text. Each later place is a *text node*, numbered minus the place: it has
  count 1 and no siblings. When a second path reaches that stored node, the first path's next token
  becomes a stored node too, and the first path goes on in the text from there. So a stored node
  with a negative CHILD has one live path, and is that path's last stored node. (After the leaves of
  E. Ukkonen, "On-line construction of suffix trees", 1995, which grow with the text in the same
  way.)
- Each path start takes the next *stamp*. A stored node carries the largest stamp of its paths, so a
  parent is never older than its child. Eviction pops the oldest stamp. It walks that path up from
  its last stored node and frees nodes until it meets one that a later path shares. This is
  least-recently-used order without a list.
- Nodes live at least until their path is popped. The saved end of a popped path may be a freed
  node, so its stamp is compared with OLDEST_STAMP before it is read.
- The text is a ring of chunks. Before a chunk is reused, all paths that start in it are popped. A
  batch slot's text goes on from chunk to chunk, and nothing is ever moved.
- A stored node at full depth holds a suffix link, the node of its window without the first token.
  That node is always younger, so it outlives the link, and drafts can be longer than ``depth``. A
  node whose path is in the text has no link; ``suffix_of`` looks up the path that starts one token
  later.
- An only child is found through its parent's CHILD. Children with siblings are found in one hash
  table. The table has its full size from the start, and its memory is touched then: growing it took
  longer than all other work, and touching it later stalled the first prompts.
"""

from __future__ import annotations

import mmap
from typing import NamedTuple

import numpy as np
from foretoken_kernels.cpu.compile import inlined_uncounted
from numpy.typing import NDArray

from foretoken.tree import Int32

Int64 = NDArray[np.int64]

# Columns of Trie.nodes, 32 bytes a node. Node 0 is "none". CHILD: the latest child, or 0. Negative:
# minus the place of the node's token; the path goes on in the text. At full depth: the suffix link.
TOKEN, PARENT, CHILD, NEXT, PREVIOUS, COUNT, STAMP, CHAIN = range(8)
# TOKEN of a salt's root. It has no siblings: NEXT and PREVIOUS hold the halves of its salt.
ROOT = -1
# Columns of Trie.text: a token, or GAP, and the stamp of the path that starts with it.
TEXT_TOKEN, TEXT_STAMP = range(2)
# Marks a place without a token.
GAP = -1
# Places in a chunk. A path is shorter, so it spans two chunks at most. Place 0 is "none", so chunk
# 0 is not used.
CHUNK = 128
# Columns of Trie.chunks: the batch slot that fills it, the stamp of the last path that starts in
# it, and the next and previous chunks of the same text (0: none).
OWNER, LAST_STAMP, CHUNK_AFTER, CHUNK_BEFORE = range(4)
# Extra chunks, because each batch slot's last chunk is partly empty.
SPARE_CHUNKS = 64
# Entries of Trie.counters.
NUM_NODES, NUM_CREATED, FREE, NEXT_STAMP, OLDEST_STAMP, NUM_EVICTIONS, LAST_CHUNK = range(7)
# Stamps are compared modulo 2**31; live stamps are at most `capacity` apart.
STAMP_MASK = 0x7FFFFFFF
# Means that there is no such path.
NO_STAMP = -1


class Trie(NamedTuple):
    """Attributes:
    nodes: int32 [capacity + 1, 8].
    buckets: int32 [capacity / 2, rounded up]; the first node of each hash bucket; CHAIN links the
        others. The table holds roots and nodes with siblings.
    paths: int32 [capacity]; entry ``s % capacity`` is the last stored node of path ``s``, or 0.
    text: int32 [chunks * CHUNK, 2].
    chunks: int64 [chunks, 4].
    counters: int64 [7].
    """

    nodes: Int32
    buckets: Int32
    paths: Int32
    text: Int32
    chunks: Int64
    counters: Int64


def new_trie(capacity: int) -> Trie:
    """Make an empty trie of at most ``capacity`` nodes, 46 bytes each.

    Only the buckets' memory is touched now; the rest as the trie fills.
    """
    num_chunks = 1 + -(-capacity // CHUNK) + SPARE_CHUNKS
    return Trie(
        nodes=_zeros(8 * (capacity + 1)).reshape(-1, 8),
        buckets=np.full((capacity + 1) // 2, 0, np.int32),
        paths=_zeros(capacity),
        text=_zeros(2 * num_chunks * CHUNK).reshape(-1, 2),
        chunks=np.full((num_chunks, 4), (-1, NO_STAMP, 0, 0), np.int64),
        counters=np.zeros(7, np.int64),
    )


def _zeros(count: int) -> Int32:
    """Return int32 [count] of zeros, whose memory is touched in small pages.

    numpy asks for huge pages. Clearing one takes 1 to 5 ms, and all streams wait for it.
    """
    memory = mmap.mmap(-1, 4 * count)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.int32)


@inlined_uncounted
def mix(high: int, low: int) -> int:
    """Return a non-negative hash of two 32-bit values (the finaliser of splitmix64)."""
    x = (np.uint64(high & 0xFFFFFFFF) << np.uint64(32)) | np.uint64(low & 0xFFFFFFFF)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int((x ^ (x >> np.uint64(31))) >> np.uint64(1))


@inlined_uncounted
def bucket_of(buckets: Int32, digest: int) -> int:
    """Return the bucket of a digest: its upper 32 bits, scaled to the number of buckets.

    Source: Lemire, "Fast random integer generation in an interval", 2019.
    """
    return ((digest >> 31) * len(buckets)) >> 32


@inlined_uncounted
def place_after(trie: Trie, place: int) -> int:
    """Return the place after ``place`` in its text, or 0 if no token was learned there."""
    after = place + 1
    if after % CHUNK == 0:
        after = int(trie.chunks[place // CHUNK, CHUNK_AFTER]) * CHUNK
    # Place 0 is never filled.
    return after if trie.text[after, TEXT_TOKEN] != GAP else 0


@inlined_uncounted
def place_before(trie: Trie, place: int, count: int) -> int:
    """Return the place ``count`` tokens before ``place`` in its text: fewer than CHUNK."""
    chunk = place // CHUNK
    if place - count >= chunk * CHUNK:
        return place - count
    return int(trie.chunks[chunk, CHUNK_BEFORE] - chunk + 1) * CHUNK + place - count


@inlined_uncounted
def first_child(trie: Trie, node: int) -> int:
    """Return the latest child of a node, or 0."""
    child = int(trie.nodes[node, CHILD]) if node >= 0 else node
    return child if child >= 0 else -place_after(trie, -child)


@inlined_uncounted
def token_of(trie: Trie, node: int) -> int:
    """Return the token of a node."""
    return int(trie.nodes[node, TOKEN]) if node >= 0 else int(trie.text[-node, TEXT_TOKEN])


@inlined_uncounted
def count_of(trie: Trie, node: int) -> int:
    """Return how often a node's window was learned."""
    return int(trie.nodes[node, COUNT]) if node >= 0 else 1


@inlined_uncounted
def next_sibling(trie: Trie, node: int) -> int:
    """Return the child of the same parent that was seen before a node, or 0."""
    return int(trie.nodes[node, NEXT]) if node >= 0 else 0


@inlined_uncounted
def find_child(trie: Trie, parent: int, token: int) -> int:
    """Return the child of ``parent`` for ``token``, or 0."""
    node = first_child(trie, parent)
    if node == 0 or token_of(trie, node) == token:
        return node
    if next_sibling(trie, node) == 0:
        return 0
    node = int(trie.buckets[bucket_of(trie.buckets, mix(parent, token))])
    while node != 0 and (trie.nodes[node, PARENT] != parent or trie.nodes[node, TOKEN] != token):
        node = int(trie.nodes[node, CHAIN])
    return node


@inlined_uncounted
def full_stamp(trie: Trie, mark: int) -> int:
    """Return the stamp whose low 31 bits are ``mark``; NO_STAMP if it was popped a moment ago."""
    oldest = trie.counters[OLDEST_STAMP]
    age = (mark - oldest) & STAMP_MASK
    return int(oldest + age) if age <= STAMP_MASK >> 1 else NO_STAMP


@inlined_uncounted
def suffix_of(trie: Trie, node: int, depth: int) -> int:
    """Follow the suffix link of ``node``, whose window has ``depth`` tokens; 0 if there is none."""
    child = int(trie.nodes[node, CHILD]) if node >= 0 else node
    if child >= 0:
        return child
    place = -child
    start = place_before(trie, place, depth - 2)
    end = int(trie.paths[full_stamp(trie, trie.text[start, TEXT_STAMP]) % len(trie.paths)])
    after = place_after(trie, place)
    # ``end`` is the last stored node of the path that starts one token later. If a token follows
    # ``place``, that path is one token longer than the wanted window, whose child ``end`` may be.
    if trie.nodes[end, CHILD] >= 0:
        return int(trie.nodes[end, PARENT]) if after != 0 else end
    end_place = -int(trie.nodes[end, CHILD])
    if end_place == after:
        return int(trie.nodes[end, PARENT])
    return end if end_place == place else child
