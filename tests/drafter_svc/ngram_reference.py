"""The n-gram drafter's rule in plain Python: dictionaries of windows, no eviction. For comparison in tests."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from drafter_svc.config import NgramSettings
from drafter_svc.ngram_sequences import OWN_SCAN
from drafter_svc.ngram_tree import CONFIDENCE, MIN_WEIGHT, SIBLING_SCAN

Window = tuple[int, ...]


@dataclass
class Sequence:
    """``own`` holds None where tokens were missed; ``run`` what has come since the last of these."""

    generation: int
    salt: int
    seen: int = 0
    last: int = 0
    own: list[int | None] = field(default_factory=list)
    run: list[int] = field(default_factory=list)


@dataclass
class TreeNode:
    """``window``: context in the history, or None; ``own``: index into the own text, or None."""

    token: int
    parent: int
    weight: float
    level: int
    window: Window | None
    own: int | None
    own_window: int
    num_children: int = 0


def confidence(window: int) -> float:
    return CONFIDENCE[min(window, len(CONFIDENCE) - 1)]


class ReferenceNgram:
    def __init__(self, settings: NgramSettings, vocab_size: int) -> None:
        self.settings = settings
        self.vocab_size = vocab_size
        self.depth = settings.max_match_window_size + 1
        self.counts: dict[tuple[int, Window], int] = {}
        # Latest first.
        self.following: dict[tuple[int, Window], list[int]] = {}
        self.sequences: dict[int, Sequence] = {}

    def learn(self, slot: int, generation: int, salt: int, length: int, new_tokens: list[int]) -> None:
        sequence = self.sequences.get(slot)
        if sequence is None or (sequence.generation, sequence.salt) != (generation, salt):
            sequence = self.sequences[slot] = Sequence(generation, salt)
        before = length - len(new_tokens)
        if before < sequence.seen:
            sequence.own, sequence.run = [], []
        if before != sequence.seen:
            sequence.own, sequence.run = [*sequence.own, None], []
        for token in new_tokens:
            if 0 <= token < self.vocab_size:
                sequence.own.append(token)
                sequence.run.append(token)
                self._count_windows(salt, sequence.run)
            else:
                sequence.own, sequence.run = [*sequence.own, None], []
            sequence.last = token
        sequence.seen = length

    def _count_windows(self, salt: int, run: list[int]) -> None:
        for size in range(1, min(len(run), self.depth) + 1):
            window = tuple(run[-size:])
            self.counts[salt, window] = self.counts.get((salt, window), 0) + 1
            siblings = self.following.setdefault((salt, window[:-1]), [])
            if window[-1] in siblings:
                siblings.remove(window[-1])
            siblings.insert(0, window[-1])

    def _find_own(self, own: list[int | None]) -> tuple[int | None, int]:
        most = self.settings.max_match_window_size
        least = max(self.settings.min_match_window_size, min(most, 2))
        last = len(own) - 1

        def matched(place: int) -> int:
            size = 0
            while size < min(most, place + 1) and own[place - size] == own[last - size] is not None:
                size += 1
            return size

        hashed = min(most, 2)
        places = [p for p in range(last - 1, -1, -1) if matched(p) >= hashed][:OWN_SCAN]
        places = [p for p in places if own[p + 1] is not None and matched(p) >= least]
        if not places:
            return None, 0
        longest = max(map(matched, places))
        places = [p for p in places if matched(p) == longest]
        if self.settings.order == "frequency":
            follow = [own[p + 1] for p in places]
            return max(places, key=lambda p: (follow.count(own[p + 1]), p)), longest
        return places[0], longest

    def breadth(self, level: int) -> int:
        s = self.settings
        spread = s.max_bfs_breadth - s.min_bfs_breadth
        return s.max_bfs_breadth - spread * min(level, s.max_match_window_size) // s.max_match_window_size

    def _context(
        self, salt: int, window: Window, level: int, weight: float, offered: set[int]
    ) -> list[tuple[int, float]]:
        """Children of one context with their weights, without those offered before."""
        siblings = self.following.get((salt, window), [])
        by_frequency = self.settings.order == "frequency"
        count = {token: self.counts[salt, (*window, token)] for token in siblings}
        scanned = siblings[: SIBLING_SCAN if by_frequency else self.breadth(level)]
        if by_frequency:
            scanned = sorted(scanned, key=lambda token: -count[token])
        scanned = [token for token in scanned if token not in offered]
        total = sum(count[token] for token in scanned)
        offers, left = [], weight
        for token in scanned[: self.breadth(level)]:
            part = left / 2 if token != siblings[-1] else left
            left -= part
            offers.append((token, weight * count[token] / total if by_frequency else part))
        return offers

    def draft(self, slot: int, max_nodes: int) -> tuple[list[int], list[int]]:
        """(tokens, parents)."""
        sequence = self.sequences[slot]
        salt, own, run = sequence.salt, sequence.own, sequence.run
        s = self.settings
        suffixes = [tuple(run[-w:]) for w in range(min(s.max_match_window_size, len(run)), 0, -1)]
        place, size = self._find_own(own)
        nodes = [TreeNode(sequence.last, -1, 1.0, 0, None, place, size)]
        heap: list[tuple[float, int, TreeNode]] = []
        order = 0

        def offer(child: TreeNode) -> bool:
            nonlocal order
            if child.weight >= MIN_WEIGHT:
                heapq.heappush(heap, (-child.weight, order, child))
                order += 1
            return child.weight >= MIN_WEIGHT

        def expand(at: int) -> None:
            node = nodes[at]
            weight, level = node.weight, node.level
            contexts = suffixes if at == 0 else [] if node.window is None else [node.window[-self.depth + 1 :]]
            offered: set[int] = set()
            if node.own is not None:
                follow = node.own + 1
                if follow == len(own) and place is not None:
                    follow = place + 1
                token = own[follow]
                if token is not None:
                    known = [(*w, token) for w in contexts if (salt, (*w, token)) in self.counts]
                    child = TreeNode(
                        token,
                        at,
                        weight * confidence(node.own_window),
                        level + 1,
                        known[0] if known else None,
                        follow,
                        node.own_window + 1,
                    )
                    if offer(child):
                        offered.add(token)
                        weight *= 1 - confidence(node.own_window)
            if at == 0:
                contexts = [w for w in contexts if len(w) >= s.min_match_window_size and (salt, w) in self.following]
            for window in contexts:
                if at == 0 and weight < MIN_WEIGHT:
                    break
                for token, part in self._context(salt, window, level, weight * confidence(len(window)), offered):
                    if offer(TreeNode(token, at, part, level + 1, (*window, token), None, 0)):
                        offered.add(token)
                if at == 0:
                    weight *= 1 - confidence(len(window))

        while len(nodes) < max_nodes:
            expand(len(nodes) - 1)
            while heap and nodes[heap[0][2].parent].num_children >= self.breadth(nodes[heap[0][2].parent].level):
                heapq.heappop(heap)
            if not heap:
                break
            child = heapq.heappop(heap)[2]
            nodes[child.parent].num_children += 1
            nodes.append(child)
        return [node.token for node in nodes], [node.parent for node in nodes]
