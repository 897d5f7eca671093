"""Traces of requests: read, written, and made up.

A trace is a file of JSON lines in the shape of Mooncake's published traces (arXiv 2407.00079), one
request a line, in the order of time:

    {"timestamp": 1250, "input_length": 1100, "output_length": 96, "hash_ids": [3, 4, 5, 260, 261]}

``timestamp`` is in milliseconds. ``hash_ids`` name the prompt's blocks: two prompts begin
alike as far as their ids do. A block has 512 tokens in Mooncake's files and 64 in those made
here; the last one may be shorter. Outputs have no ids, so what a conversation's next turn
repeats of a reply counts as new text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MADE_BLOCK_TOKENS = 64
VOCAB_SIZE = 1 << 17


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace. Lengths are in tokens."""

    at_s: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read(path: Path) -> list[Request]:
    """Read a trace. Raises ValueError that names the line for what is not a request."""
    requests = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                item = json.loads(line)
                request = Request(
                    item["timestamp"] / 1e3,
                    int(item["input_length"]),
                    max(int(item["output_length"]), 1),
                    tuple(item["hash_ids"]),
                )
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: {error!r}") from None
            requests.append(request)
    return requests


def write(path: Path, requests: Iterable[Request]) -> None:
    """Write a trace."""
    with path.open("w", encoding="utf-8") as file:
        for request in requests:
            item = {
                "timestamp": round(request.at_s * 1e3),
                "input_length": request.input_length,
                "output_length": request.output_length,
                "hash_ids": request.hash_ids,
            }
            file.write(json.dumps(item, separators=(",", ":")) + "\n")


def token_ids(request: Request, block_tokens: int, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """Return a prompt with the request's blocks: the tokens of a block follow from its id."""
    ids = np.repeat(np.asarray(request.hash_ids, np.uint64), block_tokens)[: request.input_length]
    offsets = np.resize(np.arange(block_tokens, dtype=np.uint64), len(ids))
    mixed = ids * np.uint64(0x9E3779B97F4A7C15) + offsets * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(31)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(29)
    found: list[int] = (mixed % np.uint64(vocab_size)).tolist()
    return found


def infinite_hit_rate(requests: Iterable[Request], block_tokens: int) -> float:
    """Return the share of prompt tokens that one verifier's unlimited prefix cache would hold."""
    seen: set[int] = set()
    num_tokens = num_hits = 0
    for request in requests:
        num_tokens += request.input_length
        for index, block in enumerate(request.hash_ids[: request.input_length // block_tokens]):
            if block not in seen:
                break
            # The last token always runs.
            num_hits += min(block_tokens, request.input_length - 1 - index * block_tokens)
        seen.update(request.hash_ids)
    return num_hits / num_tokens


@dataclass(frozen=True)
class Mix:
    """What a made-up trace consists of. Lengths are means, in tokens.

    Attributes:
        rate: requests a second.
        shared: share of conversations that begin with a system prompt.
        num_systems: system prompts; the k-th is used 1 / k as often as the first, which is hot.
        turns: mean number of turns of a conversation.
        think_s: mean time between a reply and the next turn.
    """

    rate: float
    seconds: float
    shared: float = 0.5
    num_systems: int = 20
    system_tokens: int = 1024
    turn_tokens: int = 192
    reply_tokens: int = 128
    turns: float = 3.0
    think_s: float = 8.0
    seed: int = 1
    block_tokens: int = MADE_BLOCK_TOKENS
    most_tokens: int = 8192


@dataclass
class _Names:
    """Hands out block ids that were never used."""

    last: int = 0

    def take(self, num_tokens: int, block_tokens: int) -> list[int]:
        count = -(-num_tokens // block_tokens)
        self.last += count
        return list(range(self.last - count + 1, self.last + 1))


def make(mix: Mix) -> list[Request]:
    """Return a made-up trace: conversations, by default half of them with shared system prompts."""
    random = np.random.default_rng(mix.seed)
    names = _Names()
    systems = [
        names.take(_length(random, mix.system_tokens, mix.block_tokens), mix.block_tokens)
        for _ in range(mix.num_systems)
    ]
    weights = 1 / np.arange(1, mix.num_systems + 1)
    weights /= weights.sum()
    requests: list[Request] = []
    at_s = -4 * mix.think_s
    while (at_s := at_s + random.exponential(mix.turns / mix.rate)) < mix.seconds:
        is_shared = random.random() < mix.shared
        prompt = list(systems[random.choice(mix.num_systems, p=weights)]) if is_shared else []
        requests += _turns(mix, random, names, prompt, at_s)
    requests = [request for request in requests if 0 <= request.at_s < mix.seconds]
    return sorted(requests, key=lambda request: request.at_s)


def _turns(mix: Mix, random: np.random.Generator, names: _Names, prompt: list[int], at_s: float) -> Iterator[Request]:
    """Yield the turns of one conversation, each prompt with all that was said before."""
    for _ in range(int(random.geometric(1 / mix.turns))):
        prompt = prompt + names.take(_length(random, mix.turn_tokens, mix.block_tokens), mix.block_tokens)
        if len(prompt) * mix.block_tokens > mix.most_tokens:
            return
        output = max(int(random.exponential(mix.reply_tokens)), 1)
        yield Request(at_s, len(prompt) * mix.block_tokens, output, tuple(prompt))
        prompt = prompt + names.take(output, mix.block_tokens)
        at_s += random.exponential(mix.think_s)


def _length(random: np.random.Generator, mean: int, block_tokens: int) -> int:
    """Return a length around ``mean``, at least one block."""
    return max(int(random.gamma(2, mean / 2)), block_tokens)
