"""The n-gram drafter's rule in plain Python: dictionaries of windows, no eviction."""

from __future__ import annotations

import heapq
from collections.abc import Container
from dataclasses import dataclass, field

from drafter_svc.ngram.candidates import MIN_WEIGHT, SIBLING_SCAN
from drafter_svc.ngram.sequences import OWN_SCAN, START_RUN, SURE_RUN
from drafter_svc.ngram.settings import NgramSettings
from drafter_svc.ngram.tree import CONFIDENCE

Window = tuple[int, ...]


@dataclass
class Sequence:
    """A sequence: ``own`` has None for missed tokens; ``run`` has the tokens since the last None.

    The output goes on at ``cursor`` in ``predicted``; its last ``hits`` tokens came true in a row.
    """

    generation: int
    salt: int
    seen: int = 0
    last: int = 0
    own: list[int | None] = field(default_factory=list)
    run: list[int] = field(default_factory=list)
    predicted: list[int] = field(default_factory=list)
    cursor: int = 0
    hits: int = START_RUN

    def follow(self, token: int) -> None:
        if self.predicted[self.cursor : self.cursor + 1] == [token]:
            self.cursor, self.hits = self.cursor + 1, self.hits + 1
        elif self.hits > 1:
            self.cursor, self.hits = self.cursor + 1, 1
        else:
            self.hits = 0

    def align(self) -> None:
        """Go on after the longest match of two tokens or more: the nearest, then the later."""
        if self.hits >= SURE_RUN or not self.predicted:
            return

        def key(place: int) -> tuple[int, int, int]:
            size = 0
            while size < min(START_RUN, place + 1) and self.predicted[place - size] == self.own[-1 - size]:
                size += 1
            return size, -abs(place - (self.cursor - 1)), place

        best = max(key(place) for place in range(len(self.predicted)))
        if best[0] > max(self.hits, 1):
            self.cursor, self.hits = best[2] + 1, best[0]


@dataclass
class TreeNode:
    """A node.

    ``window``: context in the history, if any; ``own``: index in the own text, if any.
    """

    token: int
    parent: int
    weight: float
    level: int
    window: Window | None
    own: int | None
    own_window: int
    # Place in the prediction, and tokens matched there; 0: none.
    predicted: int = 0
    hits: int = 0
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

    def learn(
        self,
        batch_slot: int,
        generation: int,
        salt: int,
        length: int,
        new_tokens: list[int],
        prompt_length: int,
        prediction: list[int],
    ) -> None:
        sequence = self.sequences.get(batch_slot)
        if sequence is None or (sequence.generation, sequence.salt) != (generation, salt):
            sequence = self.sequences[batch_slot] = Sequence(generation, salt)
        before = length - len(new_tokens)
        if before < sequence.seen:
            sequence = self.sequences[batch_slot] = Sequence(generation, salt)
        if before != sequence.seen or not sequence.own:
            sequence.own, sequence.run = [*sequence.own, None], []
        if (missed := before - max(sequence.seen, prompt_length)) > 0:
            sequence.cursor, sequence.hits = sequence.cursor + missed, 0
        sequence.predicted += prediction
        for index, token in enumerate(new_tokens, before):
            if 0 <= token < self.vocab_size:
                sequence.own.append(token)
                sequence.run.append(token)
                self._count_windows(salt, sequence.run)
            else:
                sequence.own, sequence.run = [*sequence.own, None], []
            sequence.last = token
            if sequence.predicted and index >= prompt_length:
                sequence.follow(token)
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
        self, salt: int, window: Window, level: int, weight: float, offered: Container[int]
    ) -> list[tuple[int, float]]:
        """Return one context's children with their weights, without children offered before."""
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

    def draft(  # noqa: C901 - the definition, in one piece
        self, batch_slot: int, max_nodes: int, max_depth: int, max_branch: int
    ) -> tuple[list[int], list[int], list[float]]:
        """Return (tokens, parents, weights)."""
        sequence = self.sequences[batch_slot]
        if max_nodes > 1:
            sequence.align()
        salt, own, run = sequence.salt, sequence.own, sequence.run
        s = self.settings
        suffixes = [tuple(run[-w:]) for w in range(min(s.max_match_window_size, len(run)), 0, -1)]
        place, size = self._find_own(own)
        nodes = [TreeNode(sequence.last, -1, 1.0, 0, None, place, size, sequence.cursor - 1, sequence.hits)]
        heap: list[tuple[float, int, TreeNode]] = []
        order = 0

        def offer(child: TreeNode) -> bool:
            nonlocal order
            if child.weight >= MIN_WEIGHT:
                heapq.heappush(heap, (-child.weight, order, child))
                order += 1
            return child.weight >= MIN_WEIGHT

        def full(node: TreeNode) -> bool:
            return node.num_children >= min(self.breadth(node.level), max_branch)

        def expand(at: int) -> None:  # noqa: C901 - the definition, in one piece
            node = nodes[at]
            weight, level = node.weight, node.level
            contexts = suffixes if at == 0 else [] if node.window is None else [node.window[-self.depth + 1 :]]
            offered: dict[int, TreeNode] = {}

            def offer_text(token: int, chance: float) -> TreeNode | None:
                nonlocal weight
                if token not in offered:
                    known = [(*w, token) for w in contexts if (salt, (*w, token)) in self.counts]
                    child = TreeNode(token, at, weight * chance, level + 1, known[0] if known else None, None, 0)
                    if offer(child):
                        offered[token] = child
                        weight *= 1 - chance
                return offered.get(token)

            if node.hits and node.predicted + 1 < len(sequence.predicted):
                child = offer_text(sequence.predicted[node.predicted + 1], confidence(node.hits))
                if child is not None:
                    child.predicted, child.hits = node.predicted + 1, node.hits + 1
            if node.own is not None:
                follow = node.own + 1
                if follow == len(own) and place is not None:
                    follow = place + 1
                token = own[follow]
                child = None if token is None else offer_text(token, confidence(node.own_window))
                if child is not None:
                    child.own, child.own_window = follow, node.own_window + 1
            if at == 0:
                contexts = [w for w in contexts if len(w) >= s.min_match_window_size and (salt, w) in self.following]
            for window in contexts:
                if at == 0 and weight < MIN_WEIGHT:
                    break
                for token, part in self._context(salt, window, level, weight * confidence(len(window)), offered):
                    child = TreeNode(token, at, part, level + 1, (*window, token), None, 0)
                    if offer(child):
                        offered[token] = child
                if at == 0:
                    weight *= 1 - confidence(len(window))

        while len(nodes) < max_nodes:
            if nodes[-1].level < max_depth:
                expand(len(nodes) - 1)
            while heap and full(nodes[heap[0][2].parent]):
                heapq.heappop(heap)
            if not heap:
                break
            child = heapq.heappop(heap)[2]
            nodes[child.parent].num_children += 1
            nodes.append(child)
        return [node.token for node in nodes], [node.parent for node in nodes], [node.weight for node in nodes]
