"""Follows a verifier's KV events as a router does: rebuilds the
index of prefixes, replays what is lost.

It knows nothing of how the verifier hashes: it finds prefixes by their tokens and their salt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import zmq


class Message(NamedTuple):
    topic: str
    number: int
    batch: list[Any]


class PrefixIndex:
    """The blocks that one verifier holds, by content."""

    def __init__(self) -> None:
        # A block's hash by its content: the hash before it (None: it
        # starts a chain), salt and tokens.
        self.hashes: dict[tuple[int | None, str | None, tuple[int, ...]], int] = {}
        self.contents: dict[int, tuple[int | None, str | None, tuple[int, ...]]] = {}
        self.block_size = 0

    def apply(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "BlockStored":
                self._store(event)
            case "BlockRemoved":
                for block_hash in event["block_hashes"]:
                    del self.hashes[self.contents.pop(block_hash)]
            case "AllBlocksCleared":
                self.hashes.clear()
                self.contents.clear()
            case kind:
                raise AssertionError(f"no event of vLLM: {kind}")

    def num_found(self, tokens: Sequence[int], salt: str | None) -> int:
        """Return how many blocks at the front of these tokens
        are held, as a router's lookup finds them.
        """
        parent, found = None, 0
        while (found + 1) * self.block_size <= len(tokens):
            block = tuple(tokens[found * self.block_size : (found + 1) * self.block_size])
            parent = self.hashes.get((parent, salt if found == 0 else None, block))
            if parent is None:
                break
            found += 1
        return found

    def _store(self, event: dict[str, Any]) -> None:
        self.block_size = size = event["block_size"]
        assert len(event["token_ids"]) == size * len(event["block_hashes"])
        assert (event["medium"], event["lora_id"], event["lora_name"]) == ("GPU", None, None)
        keys = event.get("extra_keys") or [None] * len(event["block_hashes"])
        parent = event["parent_block_hash"]
        assert parent is None or parent in self.contents, "a block without its prefix"
        for index, (block_hash, key) in enumerate(zip(event["block_hashes"], keys, strict=True)):
            content = (parent, key[0] if key else None, tuple(event["token_ids"][index * size : (index + 1) * size]))
            assert block_hash not in self.contents and content not in self.hashes, "stored twice"
            self.contents[block_hash], self.hashes[content] = content, block_hash
            parent = block_hash


class Subscriber:
    """A SUB socket, and a DEALER for replays."""

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        self.index = PrefixIndex()
        self.next_number = 0
        self.num_replayed = 0
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.subscribe(b"")
        self._live.rcvhwm = 0
        self._live.connect(endpoint)
        self._asking = self._context.socket(zmq.DEALER)
        self._asking.rcvhwm = 0
        self._asking.connect(replay_endpoint)
        for socket in (self._live, self._asking):
            socket.linger = 0

    def receive(self) -> Message:
        """Return the next live message."""
        return _message(self._live.recv_multipart())

    def replay(self, first: int) -> list[Message]:
        """Return what the verifier still has from number ``first`` on."""
        self._asking.send_multipart([b"", first.to_bytes(8, "big")])
        messages = []
        while True:
            delimiter, *frames = self._asking.recv_multipart()
            assert delimiter == b""
            if frames[1] == b"\xff" * 8:
                assert frames[0] == frames[2] == b""
                return messages
            messages.append(_message(frames))

    def take(self, message: Message) -> None:
        """Apply a message; replay first what was lost before it."""
        if message.number > self.next_number:
            missed = self.replay(self.next_number)
            assert missed and missed[0].number == self.next_number, "what was lost is gone"
            for each in missed:
                self._apply(each)
            self.num_replayed += len(missed)
        if message.number >= self.next_number:
            self._apply(message)

    def catch_up(self) -> None:
        """Apply everything that was published so far, without the live socket."""
        for message in self.replay(self.next_number):
            self._apply(message)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _apply(self, message: Message) -> None:
        assert message.number == self.next_number
        self.next_number += 1
        _, events, rank = message.batch
        assert rank == 0
        for event in events:
            self.index.apply(event)


def _message(frames: list[bytes]) -> Message:
    topic, number, batch = frames
    return Message(topic.decode(), int.from_bytes(number, "big"), msgspec.msgpack.decode(batch))
