"""Compiled loops of the n-gram drafter: a suffix trie in flat arrays with exact LRU eviction.

Knows arrays and token ids only.

Every window of at most ``depth`` consecutive tokens is a path from the root of its tenant's salt. A
new token extends the ``depth`` paths that started at the last tokens, so learning it takes
``depth`` child look-ups. After that the ends of the paths *are* the matches of all suffix lengths:
matching needs no search.

- Each path start takes the next *stamp*; a node carries the largest stamp of the paths through it,
  so no child is younger than its parent. Popping the oldest stamp frees exactly the nodes of that
  path that no later path shares, deepest first: eviction in steps of one path, by least recent use,
  without a list.
- A path keeps all its nodes alive until its stamp is popped; after that its saved end is ignored.
- A node at ``depth`` links to the node of its window without the first token, which is always
  younger, and so drafts can be longer than the trie is deep.
- An only child is found by its parent; children with siblings, about one node in seven, through one
  hash table. So learning new text touches few buckets, which are anywhere in memory. The table has
  its full size from the start, and its memory is touched then: moving nodes to new buckets as it
  grows took more time than all else, and first touches stalled the first prompts.
"""

from __future__ import annotations

import mmap
from typing import NamedTuple

import numpy as np
from foretoken_kernels.cpu.compile import inlined
from numpy.typing import NDArray

from foretoken.tree import Int32

Int64 = NDArray[np.int64]

# Columns of Trie.nodes, 32 bytes a node. Node 0 is "none".
TOKEN, PARENT, CHILD, NEXT, PREVIOUS, COUNT, STAMP, CHAIN = range(8)
# TOKEN of a salt's root. It has no siblings: NEXT and PREVIOUS hold the halves of its salt.
ROOT = -1
# Entries of Trie.counters.
NUM_NODES, NUM_CREATED, FREE, NEXT_STAMP, OLDEST_STAMP, NUM_EVICTIONS = range(6)
# Stamps are compared modulo 2**31; live stamps are at most `capacity` apart.
STAMP_MASK = 0x7FFFFFFF


class Trie(NamedTuple):
    """Attributes:
    nodes: int32 [capacity + 1, 8].
    buckets: int32 [capacity / 2, rounded up]; the first node of each hash bucket; CHAIN links the
        others. It has the roots, and the nodes with siblings.
    paths: int32 [capacity]; at ``s % capacity`` the deepest node of the path with stamp ``s``.
    counters: int64 [6].
    """

    nodes: Int32
    buckets: Int32
    paths: Int32
    counters: Int64


def new_trie(capacity: int) -> Trie:
    """Make an empty trie of at most ``capacity`` nodes, 38 bytes each.

    Memory is touched as it fills, but for the buckets.
    """
    return Trie(
        nodes=_zeros(8 * (capacity + 1)).reshape(-1, 8),
        buckets=np.full((capacity + 1) // 2, 0, np.int32),
        paths=_zeros(capacity),
        counters=np.zeros(6, np.int64),
    )


def _zeros(count: int) -> Int32:
    """Return int32 [count] of zeros, whose memory is touched in small pages.

    numpy asks for huge pages. Clearing one takes 1 to 5 ms, and all streams wait for it.
    """
    memory = mmap.mmap(-1, 4 * count)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.int32)


@inlined
def mix(high: int, low: int) -> int:
    """Return a non-negative hash of two 32-bit values (the finaliser of splitmix64)."""
    x = (np.uint64(high & 0xFFFFFFFF) << np.uint64(32)) | np.uint64(low & 0xFFFFFFFF)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return int((x ^ (x >> np.uint64(31))) >> np.uint64(1))


@inlined
def bucket_of(buckets: Int32, digest: int) -> int:
    """Return the bucket of a digest: its upper 32 bits, scaled to the number of buckets.

    Source: Lemire, "Fast random integer generation in an interval", 2019.
    """
    return ((digest >> 31) * len(buckets)) >> 32


@inlined
def digest_of(nodes: Int32, node: int) -> int:
    """Return the hash of a node's key: its parent and token, or its salt if it is a root."""
    if nodes[node, TOKEN] == ROOT:
        return mix(~nodes[node, PREVIOUS], nodes[node, NEXT])
    return mix(nodes[node, PARENT], nodes[node, TOKEN])


@inlined
def find_child(trie: Trie, parent: int, token: int) -> int:
    """Return the child of ``parent`` for ``token``, or 0."""
    node: int = trie.nodes[parent, CHILD]
    if node == 0 or trie.nodes[node, TOKEN] == token:
        return node
    if trie.nodes[node, NEXT] == 0:
        return 0
    node = trie.buckets[bucket_of(trie.buckets, mix(parent, token))]
    while node != 0 and (trie.nodes[node, PARENT] != parent or trie.nodes[node, TOKEN] != token):
        node = trie.nodes[node, CHAIN]
    return node


@inlined
def find_root(trie: Trie, salt: int) -> int:
    """Return the root of a salt, or 0."""
    low, high = int(np.int32(salt & 0xFFFFFFFF)), salt >> 32
    node: int = trie.buckets[bucket_of(trie.buckets, mix(~high, low))]
    while node != 0:
        if trie.nodes[node, TOKEN] == ROOT and trie.nodes[node, NEXT] == low and trie.nodes[node, PREVIOUS] == high:
            return node
        node = trie.nodes[node, CHAIN]
    return 0


@inlined
def link_first(nodes: Int32, parent: int, node: int) -> None:
    """Make ``node`` the first child of ``parent``: children are listed latest first."""
    first = nodes[parent, CHILD]
    nodes[node, PREVIOUS] = 0
    nodes[node, NEXT] = first
    if first != 0:
        nodes[first, PREVIOUS] = node
    nodes[parent, CHILD] = node


@inlined
def unlink(nodes: Int32, node: int) -> None:
    """Remove a node from its parent's list of children."""
    before, after = nodes[node, PREVIOUS], nodes[node, NEXT]
    if before != 0:
        nodes[before, NEXT] = after
    else:
        nodes[nodes[node, PARENT], CHILD] = after
    if after != 0:
        nodes[after, PREVIOUS] = before


@inlined
def has_siblings(nodes: Int32, node: int) -> bool:
    """Return whether a node that is not a root has siblings."""
    return bool(nodes[node, PREVIOUS] != 0 or nodes[node, NEXT] != 0)


@inlined
def add_to_bucket(trie: Trie, node: int) -> None:
    """Put a node, whose key is set, into its bucket."""
    bucket = bucket_of(trie.buckets, digest_of(trie.nodes, node))
    trie.nodes[node, CHAIN] = trie.buckets[bucket]
    trie.buckets[bucket] = node


@inlined
def remove_from_bucket(trie: Trie, node: int) -> None:
    """Take a node out of its bucket."""
    nodes, buckets = trie.nodes, trie.buckets
    bucket = bucket_of(buckets, digest_of(nodes, node))
    other = buckets[bucket]
    if other == node:
        buckets[bucket] = nodes[node, CHAIN]
        return
    while nodes[other, CHAIN] != node:
        other = nodes[other, CHAIN]
    nodes[other, CHAIN] = nodes[node, CHAIN]


@inlined
def put_back(trie: Trie, node: int) -> None:
    """Add a node to the free list."""
    trie.nodes[node, CHAIN] = trie.counters[FREE]
    trie.counters[FREE] = node
    trie.counters[NUM_NODES] -= 1


@inlined
def remove(trie: Trie, node: int) -> None:
    """Free a node without children: remove it from its bucket and from its parent."""
    nodes = trie.nodes
    if nodes[node, TOKEN] == ROOT:
        remove_from_bucket(trie, node)
    elif has_siblings(nodes, node):
        remove_from_bucket(trie, node)
        unlink(nodes, node)
        left = int(nodes[nodes[node, PARENT], CHILD])
        if nodes[left, NEXT] == 0:
            remove_from_bucket(trie, left)
    else:
        unlink(nodes, node)
    put_back(trie, node)
    trie.counters[NUM_EVICTIONS] += 1


@inlined
def evict_oldest(trie: Trie) -> None:
    """Pop the oldest path and free the nodes that no later path shares, deepest first."""
    stamp = trie.counters[OLDEST_STAMP]
    trie.counters[OLDEST_STAMP] = stamp + 1
    node = int(trie.paths[stamp % len(trie.paths)])
    while node != 0 and trie.nodes[node, STAMP] == stamp & STAMP_MASK:
        # A root's parent is 0.
        parent = int(trie.nodes[node, PARENT])
        remove(trie, node)
        node = parent


@inlined
def allocate(trie: Trie) -> int:
    """Return an unused node; evict paths if there is none."""
    counters = trie.counters
    while counters[FREE] == 0 and counters[NUM_CREATED] == len(trie.nodes) - 1:
        evict_oldest(trie)
    counters[NUM_NODES] += 1
    node: int = counters[FREE]
    if node != 0:
        counters[FREE] = trie.nodes[node, CHAIN]
        return node
    node = counters[NUM_CREATED] + 1
    counters[NUM_CREATED] = node
    return node


@inlined
def allocate_for(trie: Trie, stamp: int) -> int:
    """Return an unused node for path ``stamp``; 0 if its eviction popped that path itself."""
    node = int(allocate(trie))
    if stamp < trie.counters[OLDEST_STAMP]:
        put_back(trie, node)
        return 0
    return node


@inlined
def touch(trie: Trie, node: int, stamp: int) -> None:
    """Count a node and make it the end of path ``stamp``; it keeps its largest stamp."""
    mark = stamp & STAMP_MASK
    if (trie.nodes[node, STAMP] - mark) & STAMP_MASK > STAMP_MASK >> 1:
        trie.nodes[node, STAMP] = mark
    trie.nodes[node, COUNT] += 1
    trie.paths[stamp % len(trie.paths)] = node


@inlined
def enter(trie: Trie, node: int, stamp: int) -> None:
    """Put a new node on path ``stamp``."""
    nodes = trie.nodes
    nodes[node, CHILD], nodes[node, COUNT] = 0, 0
    nodes[node, STAMP] = stamp & STAMP_MASK
    touch(trie, node, stamp)


@inlined
def add_root(trie: Trie, salt: int, stamp: int) -> int:
    """Make the root of a new salt; return 0 if an eviction popped path ``stamp``."""
    node = allocate_for(trie, stamp)
    if node != 0:
        trie.nodes[node, TOKEN], trie.nodes[node, PARENT] = ROOT, 0
        trie.nodes[node, NEXT], trie.nodes[node, PREVIOUS] = np.int32(salt & 0xFFFFFFFF), np.int32(salt >> 32)
        add_to_bucket(trie, node)
        enter(trie, node, stamp)
    return node


@inlined
def add_child(trie: Trie, parent: int, token: int, stamp: int) -> int:
    """Make a child of ``parent``; return 0 if an eviction popped path ``stamp``.

    That may have freed the parent.
    """
    node = allocate_for(trie, stamp)
    if node != 0:
        nodes = trie.nodes
        nodes[node, TOKEN], nodes[node, PARENT] = token, parent
        other = int(nodes[parent, CHILD])
        if other != 0:
            if nodes[other, NEXT] == 0:
                add_to_bucket(trie, other)
            add_to_bucket(trie, node)
        link_first(nodes, parent, node)
        enter(trie, node, stamp)
    return node


@inlined
def start_path(trie: Trie, ends: Int32, stamps: Int64, salt: int) -> None:
    """Start a path at the root of ``salt``, in entry 0 of ``ends`` and ``stamps``."""
    counters = trie.counters
    stamp: int = counters[NEXT_STAMP]
    if stamp - counters[OLDEST_STAMP] == len(trie.paths):
        evict_oldest(trie)
    counters[NEXT_STAMP] = stamp + 1
    trie.paths[stamp % len(trie.paths)] = 0
    root = int(find_root(trie, salt))
    if root != 0:
        touch(trie, root, stamp)
    else:
        root = add_root(trie, salt, stamp)
    ends[0] = root
    stamps[0] = stamp


@inlined
def find_and_touch(trie: Trie, ends: Int32, stamps: Int64, found: Int32, token: int) -> None:
    """Fill ``found[d]`` with the child of ``ends[d]`` for ``token``, or 0, and mark it as seen.

    All look-ups come first: they do not depend on each other, so their cache misses overlap.
    """
    nodes = trie.nodes
    for d in range(len(ends) - 1):
        found[d] = find_child(trie, int(ends[d]), token) if ends[d] != 0 else 0
    for d in range(len(ends) - 1):
        node = int(found[d])
        if node == 0 or stamps[d] < trie.counters[OLDEST_STAMP]:
            found[d] = 0
            continue
        touch(trie, node, stamps[d])
        if nodes[node, PREVIOUS] != 0:
            unlink(nodes, node)
            link_first(nodes, int(ends[d]), node)


@inlined
def extend_paths(trie: Trie, ends: Int32, stamps: Int64, found: Int32, token: int) -> None:
    """Extend each path ``ends[d]`` by ``token``; ``found[d]`` is the child that is there, or 0."""
    for d in range(len(ends) - 2, -1, -1):
        node = int(found[d])
        alive = ends[d] != 0 and stamps[d] >= trie.counters[OLDEST_STAMP]
        if alive and node == 0:
            node = int(add_child(trie, int(ends[d]), token, stamps[d]))
        ends[d + 1] = node if alive else 0
        stamps[d + 1] = stamps[d]


@inlined
def extend_into_unused(trie: Trie, ends: Int32, stamps: Int64, found: Int32, token: int) -> None:
    """Do as ``extend_paths`` where enough nodes were never used, so that nothing is evicted.

    In new text nearly every path needs a node. This takes less than half the time, because
    ``add_child`` and what it calls are written out: as calls they take 0.4 us more a token.
    """
    nodes, paths, counters = trie.nodes, trie.paths, trie.counters
    oldest, before = counters[OLDEST_STAMP], counters[NUM_CREATED]
    first_stamp = stamps[0]
    first_entry = first_stamp % len(paths)
    created = before
    for d in range(len(ends) - 2, -1, -1):
        end, stamp = int(ends[d]), stamps[d]
        stamps[d + 1] = stamp
        if end == 0 or stamp < oldest:
            ends[d + 1] = 0
            continue
        node = int(found[d])
        if node == 0:
            created += 1
            node = created
            other = int(nodes[end, CHILD])
            nodes[node, TOKEN], nodes[node, PARENT] = token, end
            nodes[node, CHILD], nodes[node, NEXT], nodes[node, PREVIOUS] = 0, other, 0
            nodes[node, COUNT], nodes[node, STAMP] = 1, stamp & STAMP_MASK
            if other != 0:
                if nodes[other, NEXT] == 0:
                    add_to_bucket(trie, other)
                add_to_bucket(trie, node)
                nodes[other, PREVIOUS] = node
            nodes[end, CHILD] = node
            # The paths' stamps differ by less than there are entries; dividing each takes longer.
            entry = first_entry - (first_stamp - stamp)
            paths[entry if entry >= 0 else entry + len(paths)] = node
        ends[d + 1] = node
    counters[NUM_CREATED] = created
    counters[NUM_NODES] += created - before


@inlined
def insert_token(trie: Trie, ends: Int32, stamps: Int64, found: Int32, salt: int, token: int) -> None:
    """Extend the paths that end at a sequence's last token by one token, and start a new path.

    Args:
        ends: int32 [depth + 1]; ``ends[d]`` is the node of the last ``d`` tokens, or 0.
        stamps: int64 [depth + 1]; the paths' stamps. ``ends[d]`` is dead once ``stamps[d]`` is
            popped.
        found: int32 [depth]; scratch.
    """
    depth, counters = len(ends) - 1, trie.counters
    start_path(trie, ends, stamps, salt)
    find_and_touch(trie, ends, stamps, found, token)
    if counters[FREE] == 0 and counters[NUM_CREATED] + depth < len(trie.nodes):
        extend_into_unused(trie, ends, stamps, found, token)
    else:
        extend_paths(trie, ends, stamps, found, token)
    if ends[depth] != 0 and stamps[depth] >= trie.counters[OLDEST_STAMP]:
        trie.nodes[ends[depth], CHILD] = ends[depth - 1]
