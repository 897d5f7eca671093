"""KV events: a subscriber rebuilds the prefix index, and it is the verifier's own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from foretoken.config import build
from foretoken.errors import ConfigError
from foretoken.sampling import SamplingParams
from tests.support.block_books import found_hashes
from tests.support.engine_harness import Harness, Request
from tests.support.hash_target import HashTarget
from tests.support.kv_subscriber import Subscriber
from verifier_svc import config, kv_events
from verifier_svc.config import VerifierSettings
from verifier_svc.kv_events import KvEventPublisher, number_of
from verifier_svc.scheduling.block_manager import BlockManager, BlockTable
from verifier_svc.scheduling.cache_events import BlocksStored, CacheCleared, CacheEvents

BLOCK_SIZE = 4


class Stream:
    """A publisher and a subscriber that is connected to it."""

    def __init__(self, folder: Path) -> None:
        self.endpoints = f"ipc://{folder}/events", f"ipc://{folder}/replay"
        self.publisher = KvEventPublisher(*self.endpoints, "kv@pod@model", BLOCK_SIZE)
        self.subscriber = Subscriber(*self.endpoints)
        self.num_published = 1
        # A subscription takes effect some time after the connection;
        # until then messages pass it by.
        while self.subscriber.next_number < self.num_published:
            self.publish([CacheCleared()])
            if self.subscriber._live.poll(10):
                self.catch_up()
        self.subscriber.num_replayed = 0

    def publish(self, events) -> None:
        self.num_published += 1
        self.publisher.publish(events)

    def catch_up(self, lost=lambda number: False) -> None:
        """Take live messages up to the last one; lose those that ``lost`` names."""
        while self.subscriber.next_number < self.num_published:
            message = self.subscriber.receive()
            if not lost(message.number):
                self.subscriber.take(message)

    def close(self) -> None:
        self.subscriber.close()
        self.publisher.close()


@pytest.fixture
def stream(tmp_path) -> Iterator[Stream]:
    stream = Stream(tmp_path)
    yield stream
    stream.close()


def assert_same(stream: Stream, manager: BlockManager) -> None:
    assert stream.subscriber.index.contents.keys() == {number_of(each) for each in found_hashes(manager)}


def test_a_message_has_vllms_form(stream):
    live, first = stream.subscriber, stream.num_published
    hashes = [bytes(15) + b"\x01", b"\x07" * 16]
    stream.publish([BlocksStored(None, "tenant", hashes, [1, 2, 3, 4, 5, 6, 7, 8])])
    message = live.receive()
    assert (message.topic, message.number) == ("kv@pod@model", first)
    seconds, events, rank = message.batch
    assert isinstance(seconds, float) and rank == 0
    assert events == [
        {
            "type": "BlockStored",
            "block_hashes": [1, 0x0707070707070707],
            "parent_block_hash": None,
            "token_ids": [1, 2, 3, 4, 5, 6, 7, 8],
            "block_size": 4,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [["tenant"], None],
        }
    ]


def test_a_manager_without_events_records_nothing_and_one_with_them_each_change_once():
    taken: list[list[object]] = []
    manager = BlockManager(3, BLOCK_SIZE, events=CacheEvents(taken.append))
    tokens = list(range(9))
    table = manager.match_prefix(tokens, "a")
    manager.reserve(table, 9)
    manager.hash_full_blocks(table, tokens, 9)
    manager.events.publish()
    (stored,) = taken.pop()
    assert (stored.parent, stored.salt, stored.token_ids) == (None, "a", list(range(8)))
    assert stored.hashes == [manager._hashes[block_id] for block_id in table.block_ids[:2]]
    manager.free(table)
    manager.events.publish()
    assert taken == [], "freed blocks can still be found"
    other = manager.match_prefix([9] * 9, None)
    manager.reserve(other, 9)
    manager.events.publish()
    ((removed,),) = taken
    assert set(removed.hashes) == set(stored.hashes)


def test_a_flush_of_the_whole_cache_is_one_event():
    taken: list[list[object]] = []
    manager = BlockManager(8, BLOCK_SIZE, events=CacheEvents(taken.append))
    table = manager.match_prefix(list(range(9)), None)
    manager.reserve(table, 9)
    manager.hash_full_blocks(table, list(range(9)), 9)
    manager.free(table)
    manager.flush()
    manager.events.publish()
    assert taken == [[CacheCleared()]]


class Course:
    """Random life of a block manager: sequences of three
    tenants come, grow, are recomputed and go.
    """

    def __init__(self, seed: int, stream: Stream) -> None:
        self.random = random.Random(seed)
        self.manager = BlockManager(24, BLOCK_SIZE, events=CacheEvents(stream.publish))
        self.running: list[tuple[BlockTable, list[int]]] = []
        self.num_evicted = 0

    def prompt(self) -> list[int]:
        # Two token values make shared prefixes common.
        return [self.random.randint(0, 1) for _ in range(self.random.randint(1, 40))]

    def salt(self) -> str | None:
        return self.random.choice([None, "a", "b"])

    def step(self) -> None:
        before = set(found_hashes(self.manager))
        match self.random.choice(["admit", "admit", "admit", "grow", "grow", "end", "end", "forget", "flush"]):
            case "admit":
                self._admit(self.prompt(), self.salt())
            case "grow" if self.running:
                table, tokens = self.random.choice(self.running)
                self._grow(table, tokens, self.prompt())
            case "end" if self.running:
                table, _ = self.running.pop(self.random.randrange(len(self.running)))
                self.manager.free(table)
            case "forget" if self.running and self.random.random() < 0.2:
                table, _ = self.running.pop()
                self.manager.forget(table)
                self.manager.free(table)
            case "flush" if self.random.random() < 0.2:
                self.manager.flush()
        self.num_evicted += len(before - set(found_hashes(self.manager)))
        self.manager.events.publish()

    def _admit(self, tokens: list[int], salt: str | None) -> None:
        table = self.manager.match_prefix(tokens, salt)
        if not self.manager.can_reserve(table, len(tokens)):
            self.manager.free(table)
            return
        self.manager.reserve(table, len(tokens))
        self.manager.hash_full_blocks(table, tokens, len(tokens))
        self.running.append((table, tokens))

    def _grow(self, table: BlockTable, tokens: list[int], more: list[int]) -> None:
        if self.manager.can_reserve(table, len(tokens) + len(more)):
            self.manager.reserve(table, len(tokens) + len(more))
            tokens += more
            self.manager.hash_full_blocks(table, tokens, len(tokens))


@pytest.mark.parametrize("seed", range(6))
def test_the_rebuilt_index_is_the_verifiers_own(stream, seed):
    course = Course(seed, stream)
    for _ in range(40):
        for _ in range(10):
            course.step()
        stream.catch_up()
        assert_same(stream, course.manager)
        for prompt, salt in ((course.prompt(), course.salt()) for _ in range(5)):
            table = course.manager.match_prefix([*prompt, 9], salt)
            assert stream.subscriber.index.num_found(prompt, salt) == len(table.block_ids)
            course.manager.free(table)
    assert course.num_evicted > 50
    assert stream.subscriber.num_replayed == 0


@pytest.mark.parametrize("seed", range(3))
def test_what_was_lost_is_replayed(stream, seed):
    course, lost = Course(seed, stream), random.Random(seed)
    for _ in range(40):
        for _ in range(10):
            course.step()
        # A message that shows the gap, if the last one before it is lost.
        stream.publish([])
        last = stream.num_published - 1
        stream.catch_up(lambda number, last=last: number != last and lost.random() < 0.3)
        assert_same(stream, course.manager)
    assert stream.subscriber.num_replayed > 50


def test_who_comes_late_replays_all(stream):
    course = Course(1, stream)
    for _ in range(200):
        course.step()
    late = Subscriber(*stream.endpoints)
    late.catch_up()
    assert late.next_number == stream.num_published
    assert late.index.contents.keys() == {number_of(each) for each in found_hashes(course.manager)}
    late.close()


def test_a_replay_has_what_is_kept(stream, monkeypatch):
    monkeypatch.setattr(kv_events, "MAX_REPLAY_BATCHES", 5)
    for _ in range(20):
        stream.publish([])
    stream.catch_up()
    assert [each.number for each in stream.subscriber.replay(0)] == list(range(stream.num_published))[-5:]
    assert [each.number for each in stream.subscriber.replay(stream.num_published - 2)] == [
        stream.num_published - 2,
        stream.num_published - 1,
    ]
    assert stream.subscriber.replay(stream.num_published) == []
    monkeypatch.setattr(kv_events, "MAX_REPLAY_BYTES", 1)
    stream.publish([])
    stream.catch_up()
    assert stream.subscriber.replay(0) == []


def test_a_request_that_is_none_is_ignored(stream, caplog):
    stream.subscriber._asking.send_multipart([b"", b"\x01"])
    stream.subscriber._asking.send_multipart([b"", b"a", b"b"])
    assert len(stream.subscriber.replay(0)) == stream.num_published
    assert caplog.text.count("ignored a request for KV events") == 2


def test_a_full_queue_drops_batches_which_their_numbers_show(stream, monkeypatch, caplog):
    monkeypatch.setattr(kv_events, "MAX_QUEUED", 0)
    stream.publish([CacheCleared()])
    stream.publish([CacheCleared()])
    monkeypatch.undo()
    dropped = stream.num_published - 2
    stream.publish([CacheCleared()])
    assert stream.subscriber.receive().number == dropped + 2
    assert [each.number for each in stream.subscriber.replay(dropped)] == [dropped + 2]
    assert "dropped 2 batches of KV events" in caplog.text


def test_closing_sends_what_is_queued(tmp_path):
    stream = Stream(tmp_path)
    for _ in range(100):
        stream.publish([])
    stream.publisher.close()
    stream.catch_up()
    stream.subscriber.close()


def test_an_endpoint_in_use_is_refused_by_its_flag(stream, tmp_path):
    with zmq.Context() as context, context.socket(zmq.PUB) as taken:
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        endpoint = f"tcp://127.0.0.1:{port}"
        with pytest.raises(ConfigError, match=f"--kv-events {endpoint}: Address already in use"):
            KvEventPublisher(endpoint, None, "t", 4)
        with pytest.raises(ConfigError, match=f"--kv-events-replay {endpoint}: Address already in use"):
            KvEventPublisher(f"ipc://{tmp_path}/other", endpoint, "t", 4)


def settings(**values) -> VerifierSettings:
    return build(VerifierSettings, {"model": "m", "served_model_name": "m", "address": "unix:/v", **values})


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "tcp://127.0.0.1:1", "tcp://[::1]:5557", "ipc:///run/events"])
def test_endpoints_that_are_accepted(endpoint):
    assert settings(kv_events=endpoint).kv_events == endpoint


@pytest.mark.parametrize("endpoint", ["5557", "tcp://*", "tcp://*:0", "tcp://*:65536", "udp://h:1", "ipc://relative"])
def test_endpoints_that_are_refused(endpoint):
    with pytest.raises(ConfigError, match=r"--kv-events: expected tcp://ADDRESS:PORT"):
        settings(kv_events=endpoint)


def test_settings_that_contradict_each_other_are_refused():
    for values, message in (
        ({"kv_events_replay": "tcp://*:1"}, "need --kv-events"),
        ({"kv_events_topic": "t"}, "need --kv-events"),
        ({"kv_events": "tcp://*:1", "kv_events_replay": "tcp://*:1"}, "must differ"),
    ):
        with pytest.raises(ConfigError, match=message):
            settings(**values)
    with pytest.raises(ConfigError, match="--disable-radix-cache"):
        settings(kv_events="tcp://*:1", disable_radix_cache=True).check_kv_events()


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(config, "find_spec", lambda name: None)
    settings().check_kv_events()
    with pytest.raises(ConfigError, match=r"pip install 'foretoken\[kv-events\]'"):
        settings(kv_events="tcp://*:5557").check_kv_events()


def test_a_batch_is_what_a_decoder_with_vllms_types_reads(stream):
    """Decode with types, as subscribers with msgspec do; unknown and missing fields would fail."""
    stream.publish([BlocksStored(b"\x01" * 16, None, [b"\x02" * 16], [1, 2, 3, 4])])
    stream.subscriber.receive()
    batch = stream.subscriber.replay(stream.num_published - 1)[0].batch
    typed = msgspec.convert(batch, kv_events.EventBatch)
    assert typed.events[0].parent_block_hash == 0x0101010101010101
    assert typed.events[0].extra_keys is None


@pytest.mark.parametrize("seed", range(3))
def test_the_index_follows_an_engine_that_preempts_and_evicts(stream, seed):
    choose, vocab = random.Random(seed), 40
    run = Harness(HashTarget(vocab, 30, BLOCK_SIZE), vocab_size=vocab, num_blocks=30, block_size=BLOCK_SIZE)
    run.blocks.events = CacheEvents(stream.publish)
    prefixes = [[choose.randrange(vocab) for _ in range(24)] for _ in range(3)]
    for _ in range(60):
        prompt = [*choose.choice(prefixes)[: choose.randint(1, 24)], choose.randrange(vocab)]
        sampling = SamplingParams(temperature=0.0, max_tokens=choose.randint(1, 40))
        run.submit(Request(prompt, sampling, cache_salt=choose.choice([None, "a"])))
        for _ in range(choose.randint(1, 8)):
            run.step()
    run.drain()
    stream.catch_up()
    assert_same(stream, run.blocks)
    assert stream.subscriber.index.contents
    assert run.scheduler.num_preemptions and run.scheduler.num_prefix_hits
