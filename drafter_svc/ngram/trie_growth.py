"""Compiled loops of the n-gram drafter: the trie learns a token, and evicts the oldest paths."""

from __future__ import annotations

import numpy as np
from foretoken_kernels.cpu.compile import inlined_uncounted

from drafter_svc.ngram.trie import (
    CHAIN,
    CHILD,
    CHUNK,
    CHUNK_AFTER,
    CHUNK_BEFORE,
    COUNT,
    FREE,
    GAP,
    LAST_CHUNK,
    LAST_STAMP,
    NEXT,
    NEXT_STAMP,
    NO_STAMP,
    NUM_CREATED,
    NUM_EVICTIONS,
    NUM_NODES,
    OLDEST_STAMP,
    OWNER,
    PARENT,
    PREVIOUS,
    ROOT,
    STAMP,
    STAMP_MASK,
    TEXT_STAMP,
    TEXT_TOKEN,
    TOKEN,
    Int64,
    Trie,
    bucket_of,
    find_child,
    full_stamp,
    mix,
    place_after,
    place_before,
)
from foretoken.tree import Int32

# Entry of ``found`` for a path that goes on in the text.
IN_TEXT = -1


@inlined_uncounted
def digest_of(nodes: Int32, node: int) -> int:
    """Return the hash of a node's key: its parent and token, or its salt if it is a root."""
    if nodes[node, TOKEN] == ROOT:
        return mix(~nodes[node, PREVIOUS], nodes[node, NEXT])
    return mix(nodes[node, PARENT], nodes[node, TOKEN])


@inlined_uncounted
def find_root(trie: Trie, salt: int) -> int:
    """Return the root of a salt, or 0."""
    low, high = int(np.int32(salt & 0xFFFFFFFF)), salt >> 32
    node: int = trie.buckets[bucket_of(trie.buckets, mix(~high, low))]
    while node != 0:
        if trie.nodes[node, TOKEN] == ROOT and trie.nodes[node, NEXT] == low and trie.nodes[node, PREVIOUS] == high:
            return node
        node = trie.nodes[node, CHAIN]
    return 0


@inlined_uncounted
def link_first(nodes: Int32, parent: int, node: int) -> None:
    """Make ``node`` the first child of ``parent``: children are listed latest first."""
    first = nodes[parent, CHILD]
    nodes[node, PREVIOUS] = 0
    nodes[node, NEXT] = first
    if first != 0:
        nodes[first, PREVIOUS] = node
    nodes[parent, CHILD] = node


@inlined_uncounted
def unlink(nodes: Int32, node: int) -> None:
    """Remove a node from its parent's list of children."""
    before, after = nodes[node, PREVIOUS], nodes[node, NEXT]
    if before != 0:
        nodes[before, NEXT] = after
    else:
        nodes[nodes[node, PARENT], CHILD] = after
    if after != 0:
        nodes[after, PREVIOUS] = before


@inlined_uncounted
def has_siblings(nodes: Int32, node: int) -> bool:
    """Return whether a node that is not a root has siblings."""
    return bool(nodes[node, PREVIOUS] != 0 or nodes[node, NEXT] != 0)


@inlined_uncounted
def add_to_bucket(trie: Trie, node: int) -> None:
    """Put a node, whose key is set, into its bucket."""
    bucket = bucket_of(trie.buckets, digest_of(trie.nodes, node))
    trie.nodes[node, CHAIN] = trie.buckets[bucket]
    trie.buckets[bucket] = node


@inlined_uncounted
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


@inlined_uncounted
def put_back(trie: Trie, node: int) -> None:
    """Add a node to the free list."""
    trie.nodes[node, CHAIN] = trie.counters[FREE]
    trie.counters[FREE] = node
    trie.counters[NUM_NODES] -= 1


@inlined_uncounted
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


@inlined_uncounted
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


@inlined_uncounted
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


@inlined_uncounted
def allocate_for(trie: Trie, stamp: int) -> int:
    """Return an unused node for path ``stamp``; 0 if making room popped that path itself."""
    node = int(allocate(trie))
    if stamp < trie.counters[OLDEST_STAMP]:
        put_back(trie, node)
        return 0
    return node


@inlined_uncounted
def touch(trie: Trie, node: int, stamp: int) -> None:
    """Count one more path through a stored node, and make the node the end of path ``stamp``.

    The node keeps its largest stamp: another batch slot's path may be younger.
    """
    mark = stamp & STAMP_MASK
    if (trie.nodes[node, STAMP] - mark) & STAMP_MASK > STAMP_MASK >> 1:
        trie.nodes[node, STAMP] = mark
    trie.nodes[node, COUNT] += 1
    trie.paths[stamp % len(trie.paths)] = node


@inlined_uncounted
def enter(trie: Trie, node: int, stamp: int, child: int) -> None:
    """Fill a new node that ends path ``stamp``, with this CHILD."""
    nodes = trie.nodes
    nodes[node, CHILD], nodes[node, COUNT] = child, 0
    nodes[node, STAMP] = stamp & STAMP_MASK
    touch(trie, node, stamp)


@inlined_uncounted
def add_root(trie: Trie, salt: int, stamp: int) -> int:
    """Make the root of a new salt; return 0 if an eviction popped path ``stamp``."""
    node = allocate_for(trie, stamp)
    if node != 0:
        trie.nodes[node, TOKEN], trie.nodes[node, PARENT] = ROOT, 0
        trie.nodes[node, NEXT], trie.nodes[node, PREVIOUS] = np.int32(salt & 0xFFFFFFFF), np.int32(salt >> 32)
        add_to_bucket(trie, node)
        enter(trie, node, stamp, 0)
    return node


@inlined_uncounted
def add_child(trie: Trie, parent: int, place: int, stamp: int) -> None:
    """Make a child of ``parent`` for the token at ``place``.

    Path ``stamp`` goes on in the text there.

    Make nothing if making room pops that path: ``parent`` may then be free.
    """
    node = allocate_for(trie, stamp)
    if node != 0:
        nodes = trie.nodes
        nodes[node, TOKEN], nodes[node, PARENT] = trie.text[place, TEXT_TOKEN], parent
        other = int(nodes[parent, CHILD])
        if other != 0:
            if nodes[other, NEXT] == 0:
                add_to_bucket(trie, other)
            add_to_bucket(trie, node)
        link_first(nodes, parent, node)
        enter(trie, node, stamp, -place)


@inlined_uncounted
def split(trie: Trie, node: int, size: int) -> None:
    """Store the next token of the path of ``node``, whose window has ``size`` tokens.

    A second path has reached the node. If the first one has no next token yet, there is no child.
    """
    place = -int(trie.nodes[node, CHILD])
    trie.nodes[node, CHILD] = 0
    stamp = full_stamp(trie, trie.text[place_before(trie, place, size - 1), TEXT_STAMP])
    after = place_after(trie, place)
    if after != 0:
        # If this token's allocations popped the first path, ``stamp`` is NO_STAMP: no node then.
        add_child(trie, node, after, stamp)


@inlined_uncounted
def take_place(trie: Trie, place: int, owner: int) -> int:
    """Return the place for the next token of batch slot ``owner``.

    ``place``: of its last token; 0: a new chunk.
    """
    chunks, counters = trie.chunks, trie.counters
    chunk = place // CHUNK
    if chunk != 0 and chunks[chunk, OWNER] != owner:
        # Another batch slot has taken this chunk; our paths there were popped.
        chunk = 0
    if chunk != 0 and (place + 1) % CHUNK != 0:
        return place + 1
    taken = counters[LAST_CHUNK] + 1
    if taken == len(chunks):
        taken = 1
    counters[LAST_CHUNK] = taken
    while chunks[taken, LAST_STAMP] >= counters[OLDEST_STAMP]:
        evict_oldest(trie)
    if chunk != 0:
        chunks[chunk, CHUNK_AFTER] = taken
    chunks[taken, OWNER], chunks[taken, LAST_STAMP] = owner, NO_STAMP
    chunks[taken, CHUNK_AFTER], chunks[taken, CHUNK_BEFORE] = 0, chunk
    for each in range(taken * CHUNK, (taken + 1) * CHUNK):
        trie.text[each, TEXT_TOKEN] = GAP
    return int(taken * CHUNK)


@inlined_uncounted
def end_text(place: int) -> int:
    """End a batch slot's text at ``place``. Return its new last place, or 0 for a new chunk.

    One place is skipped, which keeps its GAP, so the next text is not read as a continuation.
    """
    return place + 1 if place != 0 and (place + 1) % CHUNK != 0 else 0


@inlined_uncounted
def start_path(trie: Trie, place: int, token: int, salt: int) -> tuple[int, int]:
    """Start a path at the root of ``salt`` with the token at ``place``.

    Return its stamp and the root, which is 0 if an eviction popped the path.
    """
    counters = trie.counters
    stamp = int(counters[NEXT_STAMP])
    if stamp - counters[OLDEST_STAMP] == len(trie.paths):
        evict_oldest(trie)
    counters[NEXT_STAMP] = stamp + 1
    trie.paths[stamp % len(trie.paths)] = 0
    trie.text[place, TEXT_TOKEN], trie.text[place, TEXT_STAMP] = token, stamp & STAMP_MASK
    trie.chunks[place // CHUNK, LAST_STAMP] = stamp
    root = int(find_root(trie, salt))
    if root != 0:
        touch(trie, root, stamp)
    else:
        root = int(add_root(trie, salt, stamp))
    return stamp, root


@inlined_uncounted
def find_and_touch(trie: Trie, ends: Int32, stamps: Int64, found: Int32, token: int) -> None:
    """Fill ``found[d]`` with the child of ``ends[d]`` for ``token``, and mark it as seen.

    It is 0 if there is none, and IN_TEXT for a path that goes on in the text. All look-ups run
    before the first write, so that their cache misses overlap.
    """
    nodes = trie.nodes
    for d in range(len(found)):
        end = int(ends[d])
        # ``ends[d]`` is 0 for a popped path; node 0 has no child.
        found[d] = find_child(trie, end, token) if nodes[end, CHILD] >= 0 else IN_TEXT
    for d in range(len(found)):
        node = int(found[d])
        if node > 0:
            touch(trie, node, stamps[d])
            if nodes[node, PREVIOUS] != 0:
                parent = int(nodes[node, PARENT])
                unlink(nodes, node)
                link_first(nodes, parent, node)


@inlined_uncounted
def insert_token(trie: Trie, place: int, stamps: Int64, scratch: Int32, salt: int, token: int) -> None:
    """Extend the paths that end at a sequence's last token by one token, and start a new path.

    Args:
        place: of the token in the text, from ``take_place``.
        stamps: int64 [depth + 1]; ``stamps[d]`` is the stamp of the path of the last ``d`` tokens;
            below OLDEST_STAMP once it is popped.
        scratch: int32 [at least 2 * depth].
    """
    depth = len(stamps) - 1
    ends, found = scratch[:depth], scratch[depth : 2 * depth]
    paths, counters = trie.paths, trie.counters
    first, ends[0] = start_path(trie, place, token, salt)
    stamps[0] = first
    newest, oldest = first % len(paths), counters[OLDEST_STAMP]
    for d in range(1, depth):
        # ``stamps[d] % len(paths)`` without a division: live stamps differ by less than that.
        at = newest - (first - stamps[d])
        ends[d] = paths[at if at >= 0 else at + len(paths)] if stamps[d] >= oldest else 0
    find_and_touch(trie, ends, stamps, found, token)
    is_seen = found[depth - 1] > 0
    for d in range(depth - 1, -1, -1):
        stamp, node = stamps[d], int(found[d])
        stamps[d + 1] = stamp
        if node == IN_TEXT or stamp < counters[OLDEST_STAMP]:
            # If it was popped meanwhile, its node may be free.
            continue
        if node == 0:
            add_child(trie, ends[d], place, stamp)
        elif d + 1 < depth and trie.nodes[node, CHILD] < 0:
            split(trie, node, d + 1)
    # A window of full depth came again: store its suffix link.
    if is_seen and stamps[depth] >= counters[OLDEST_STAMP]:
        trie.nodes[found[depth - 1], CHILD] = paths[stamps[depth - 1] % len(paths)]
