"""Ordinary steps reach a drafter through device memory: when, and with the host's results."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.drafting import DraftBatch, DraftRequest, TargetInfo
from foretoken.overlap_memory import OverlapLayout, OverlapMemory
from foretoken.sampling import SamplingParams, SpeculationOptions
from tests.support.engine_harness import Request, Result, TestSource
from tests.support.oracle_drafter import OracleDrafter
from tests.support.runs import (
    BLOCK,
    NODES,
    VOCAB,
    Runs,
    greedy,
    keep_masked_steps_ordinary,
    oracle_of,
    plain,
    with_grammar,
)
from tests.support.scripted_drafter import ScriptedDrafter
from tests.verifier_svc.drafters.test_device_offer import EPOCH, LAYOUT, LONG_S, attached, client_of, process_at, until
from verifier_svc.drafters import attachment as attachments
from verifier_svc.drafters.attachment import AttachmentSettings
from verifier_svc.drafters.deadline import Deadline
from verifier_svc.drafters.device_feed import DeviceFeed, as_batch_rows, can_feed
from verifier_svc.drafters.handle import DrafterHandle
from verifier_svc.drafters.request import DraftRow, Shape
from verifier_svc.messages import SequenceKey, Submit
from verifier_svc.overlap import blocks as overlap_blocks
from verifier_svc.scheduling.hidden_states import HiddenSlice, PassHiddenStates
from verifier_svc.scheduling.sequence import Sequence as Running

INFO = TargetInfo("hash", VOCAB, 400, 8, NODES, 8, 2, BLOCK, 400, "")
ORACLE = SpeculationOptions(drafter="oracle")
# Each of these keeps its batch from overlapping with the host's work, in these tests.
ODD: dict[str, Callable[[Request], Request]] = {
    "grammar": with_grammar,
}


@pytest.fixture(autouse=True)
def _no_runs_without_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap_blocks, "_TOKENS_AHEAD", 0)
    keep_masked_steps_ordinary(monkeypatch)


@pytest.fixture
def by_host(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that makes the host send everything from then on."""
    return lambda: monkeypatch.setattr(attachments, "can_feed", lambda rows, layout: False)


def facts(results: Sequence[Result]) -> list[object]:
    found: list[object] = []
    for result in results:
        assert result.finished is not None
        stats = result.finished.speculation
        found.append(
            (result.token_ids, result.finished.reason, stats.num_decode_steps, stats.num_draft_tokens, result.sources)
        )
    return found


def run(requests: Sequence[Request], **options: Any) -> tuple[list[Result], OracleDrafter, Runs]:
    """Run with an oracle drafter, which checks what it is sent, and a drafter without a model."""
    expected = plain(requests)
    oracle = oracle_of(requests, expected)
    sources: list[Any] = [oracle, TestSource("quick", ScriptedDrafter({}), INFO)]
    runs = Runs(sources, **options)
    results = runs.harness.run(requests)
    for result, want in zip(results, expected, strict=True):
        assert result.token_ids == want.token_ids
    runs.harness.drain()
    return results, oracle, runs


def batch_with(odd: str) -> list[Request]:
    """Return four oracle rows and, last, the odd one.

    The oracle's rows end one by one, and others get their blocks.
    """
    made = [greedy(i, 5 + i, 14 + 9 * i, speculation=ORACLE) for i in range(4)]
    return [*made, ODD[odd](greedy(9, 7, 80, speculation=ORACLE))]


@pytest.mark.parametrize("odd", list(ODD))
def test_a_batch_that_cannot_overlap_is_sent_by_device_memory(odd: str, by_host: Callable[[], None]) -> None:
    """Trees and hidden states are the host's; final updates go through device memory too."""
    requests = batch_with(odd)
    results, oracle, runs = run(requests)
    by_host()
    others, other, _ = run(requests)
    assert facts(results) == facts(others)
    assert "fed" not in other.ways and other.hidden.keys() == oracle.hidden.keys()
    for place, row in oracle.hidden.items():
        assert (row == other.hidden[place]).all(), place
    # The host sends the prompts, and final updates after which nobody waits for a tree.
    assert oracle.ways[0] == "host" and set(oracle.ways[1:-2]) == {"fed"}
    assert runs.num_ahead == 0
    # The rows end one after another; each is forgotten once its final update is sent.
    assert len(oracle.forgotten) >= 3


@pytest.mark.parametrize("odd", list(ODD))
def test_no_hidden_state_comes_to_the_host(odd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the prompts' hidden states do, and the last sequence's."""
    fetched: list[int] = []
    requests = batch_with(odd)
    expected = plain(requests)
    oracle = oracle_of(requests, expected)
    runs = Runs([oracle, TestSource("quick", ScriptedDrafter({}), INFO)])  # type: ignore[list-item]
    runner = runs.harness.runner
    fetch = runner.fetch_hidden_states
    monkeypatch.setattr(runner, "fetch_hidden_states", lambda rows: fetched.append(len(rows)) or fetch(rows))
    runs.harness.run(requests)
    assert fetched[0] == sum(len(request.prompt) for request in requests[:5])
    # The last sequence's final update is sent while nobody waits for a tree.
    assert len(fetched) <= 3 and max(fetched[1:]) <= 4 and oracle.ways.count("fed") > 8


def disturbances(runs: Runs, late: Sequence[Request], keys: list[SequenceKey]) -> Iterator[None]:
    """Yield once for each request.

    Now and then a request comes, which ends a run, or an abort of an
    unknown sequence, which does not.
    """
    for request in late:
        for _ in range(4):
            yield
        runs.harness.abort(SequenceKey(0, "nobody's", 0))
        for _ in range(4):
            yield
        keys.append(runs.harness.submit(request))
    while True:
        yield


def test_changes_between_all_transports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs, steps by device memory and steps by the host take turns.

    Each token is sent once, with its hidden state; trees are accepted as with one transport.
    """
    requests = [greedy(1, 6, 120, speculation=ORACLE), greedy(2, 9, 120, speculation=ORACLE)]
    late = [with_grammar(greedy(3 + i, 5, 14, speculation=ORACLE)) for i in range(3)]
    every = [*requests, *late]
    expected = plain(every)
    found = []
    for may_feed in (True, False):
        count = [0]

        def sometimes(
            rows: Sequence[DraftRow], layout: OverlapLayout, may: bool = may_feed, at: list[int] = count
        ) -> bool:
            at[0] += 1
            return may and at[0] % 3 != 0 and can_feed(rows, layout)

        monkeypatch.setattr(attachments, "can_feed", sometimes)
        oracle = oracle_of(every, expected)
        runs = Runs([oracle])
        keys = [runs.harness.submit(request) for request in requests]
        events = iter(disturbances(runs, late, keys))

        learn = oracle.post

        def post(
            request: DraftRequest, events: Iterator[None] = events, learn: Callable[[DraftRequest], None] = learn
        ) -> None:
            next(events)
            learn(request)

        monkeypatch.setattr(oracle, "post", post)
        while not all(runs.harness.results[key].is_done for key in keys):
            runs.harness.step()
        runs.harness.drain()
        results = [runs.harness.results[key] for key in keys]
        assert [result.token_ids for result in results] == [want.token_ids for want in expected], len(keys)
        assert set(oracle.ways) == ({"run", "fed", "host"} if may_feed else {"run", "host"})
        # A run follows a step by device memory; after a run, the prompt that ended it comes first.
        pairs = set(zip(oracle.ways, oracle.ways[1:], strict=False))
        turns = {("fed", "fed"), ("fed", "host"), ("host", "fed"), ("run", "host"), ("fed", "run")}
        assert not may_feed or turns <= pairs
        found.append(results)
    accepted = [[sum(source > 0 for source in result.sources) for result in results] for results in found]
    steps = [[r.finished.speculation.num_decode_steps for r in results if r.finished] for results in found]
    assert accepted[0] == accepted[1] and steps[0] == steps[1]


def test_a_row_whose_gate_is_shut_is_sent_beside_the_others() -> None:
    """The row wants no tree, and its hidden states are not fetched for later."""
    requests = [
        with_grammar(greedy(1, 6, 60, speculation=ORACLE)),
        greedy(2, 6, 60, speculation=SpeculationOptions(drafter="oracle", max_draft_tokens=1)),
    ]
    expected = plain(requests)
    oracle = oracle_of(requests, expected)
    runs = Runs([oracle], num_steps=0)
    models = runs.harness.speculator.model_round
    plan = models.plan_row
    shut = lambda sequence, drafters, batch: None if sequence.batch_slot == 1 else plan(sequence, drafters, batch)  # noqa: E731
    models.plan_row = shut  # type: ignore[method-assign]
    results = runs.harness.run(requests)
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]
    assert oracle.ways.count("fed") > 5 and oracle.ways.count("host") <= 3


def test_a_step_that_says_more_than_a_batch_row_holds_goes_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [with_grammar(greedy(1, 6, 60, speculation=ORACLE))]
    expected = plain(requests)
    text = [*requests[0].prompt, *expected[0].token_ids]
    oracle = oracle_of(requests, expected)

    def tree(tokens: list[int]) -> tuple[list[int], list[int]]:
        """Return the longest chain: with the bonus token, too much for a row of the memory."""
        chain = [tokens[-1], *text[len(tokens) : len(tokens) + NODES - 1]]
        return chain, list(range(-1, len(chain) - 1))

    monkeypatch.setattr(oracle, "_tree", tree)
    runs = Runs([oracle], num_steps=NODES - 1)
    assert runs.harness.run(requests)[0].token_ids == expected[0].token_ids
    assert oracle.overlap_memory.layout.tokens < NODES and oracle.ways.count("host") > 8


def test_a_drafter_that_has_not_answered_is_not_written_to(by_host: Callable[[], None]) -> None:
    """Its stream may still read the memory of the step that it was late for.

    Once it has answered, the host sends it what it missed, and then the device sends again.
    """
    requests = [with_grammar(greedy(1, 6, 60, speculation=ORACLE))]
    expected = plain(requests)
    oracle = oracle_of(requests, expected)
    runs = Runs([oracle])
    key = runs.harness.submit(requests[0])
    while oracle.ways.count("fed") < 3:
        runs.harness.step()
    number, answer = oracle.numbers[-1], oracle.answer
    oracle.answer = lambda: None  # type: ignore[method-assign]
    runs.harness.step()
    assert oracle.numbers[-1] == number + 1 and len(oracle.failures) == 1
    oracle.is_idle = False
    results = oracle.overlap_memory.results.clone()
    ways = list(oracle.ways)
    for _ in range(4):
        runs.harness.step()
    assert oracle.ways == ways and torch.equal(oracle.overlap_memory.results, results)
    assert int(oracle.overlap_memory.stamp) == number + 1
    oracle.is_idle, oracle.answer = True, answer  # type: ignore[method-assign]
    while not runs.harness.results[key].is_done:
        runs.harness.step()
    assert runs.harness.results[key].token_ids == expected[0].token_ids
    assert oracle.ways[len(ways)] == "host" and "fed" in oracle.ways[len(ways) :]
    assert oracle.numbers == list(range(1, len(oracle.numbers) + 1))


@pytest.mark.parametrize("when", ["before the request", "after it"])
def test_a_drafter_that_dies_in_a_step(when: str) -> None:
    requests = [with_grammar(greedy(i, 6, 40, speculation=ORACLE)) for i in range(2)]
    expected = plain(requests)
    oracle = oracle_of(requests, expected)
    runs = Runs([oracle])
    answer, attachment = oracle.answer, oracle.transport
    assert attachment is not None
    signal = attachment.order.signal_step
    before: list[str] = []

    def die() -> None:
        before[:] = oracle.ways
        oracle.attach_anew()

    def dies_and_says_nothing() -> DraftBatch | None:
        if oracle.ways.count("fed") == 4 and not before:
            die()
            return None
        return answer()

    def signal_and_die(number: int) -> None:
        signal(number)
        if number == 4:
            die()

    if when == "after it":
        oracle.answer = dies_and_says_nothing  # type: ignore[method-assign]
    else:
        attachment.order.signal_step = signal_and_die  # type: ignore[method-assign]
    results = runs.harness.run(requests)
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]
    # The host sends everything to the new attachment, which goes on from there.
    after = oracle.ways[len(before) :]
    assert oracle.num_attaches == 2 and after[0] == "host" and after.count("fed") > 3


LAYOUT_OF_THREE = OverlapLayout(batch_rows=4, tokens=3, nodes=4, hidden_width=3, hidden_dtype=torch.float32)


class SentRows:
    """Rows of sequences of which a drafter has some tokens."""

    def __init__(self, layout: OverlapLayout = LAYOUT_OF_THREE) -> None:
        self.layout = layout
        width = layout.hidden_width
        self.buffer = torch.arange(20 * width).to(layout.hidden_dtype).view(20, width)

    def row(
        self, batch_slot: int, length: int, new: list[int], places: list[int], left: int = 9, **fields: Any
    ) -> DraftRow:
        params = SamplingParams(temperature=0.0, max_tokens=length + left - 1)
        submit = Submit(SequenceKey(1, "r", batch_slot), 0, (1,), (), params, ORACLE, None, None)
        sequence = Running(submit, max_model_len=64, eos_ids=frozenset(), token_limit=VOCAB, now=0.0)
        sequence.tokens = list(range(length))
        sequence.batch_slot = batch_slot
        whole = PassHiddenStates(places, self.buffer, lambda rows: self.buffer[rows].float().numpy())
        hidden = [HiddenSlice(whole, 0, 1), HiddenSlice(whole, 1, len(places))] if len(places) > 1 else []
        hidden = hidden or [HiddenSlice(whole, 0, len(places))]
        row = DraftRow(sequence, batch_slot, 0, length, new, hidden, [], (), Shape(4, 2, 1), True)
        return row._replace(**fields)


def test_what_a_step_leaves_in_the_memory(device: str) -> None:
    sent = SentRows()
    sent.buffer = sent.buffer.to(device)
    memory = OverlapMemory.over(
        torch.full((sent.layout.num_bytes,), 255, dtype=torch.uint8, device=device), sent.layout
    )
    rows = [
        sent.row(2, 10, [5, 6, 7], [4, 9, 6], left=5),
        sent.row(0, 8, [3], [2], left=1),
        sent.row(1, 9, [1, 2], [11, 12], generation=7),
    ]
    feed = DeviceFeed(sent.layout, torch.device(device))
    for number in (1, 2):
        feed.place(rows, memory, number)
        assert memory.stamp.tolist() == [number]
        # The last row's sequence has ended; the fourth batch row is empty.
        assert memory.counts.tolist() == [3, 1, 2, 0] and memory.num_left.tolist() == [5, 1, 0, 0]
        assert memory.lengths[:3].tolist() == [10, 8, 9]
        tokens = memory.new_tokens.tolist()
        assert (tokens[0], tokens[1][:1], tokens[2][:2]) == ([5, 6, 7], [3], [1, 2])
        expected = sent.buffer[[4, 9, 6, 2, 11, 12]]
        assert torch.equal(memory.hidden[[0, 1, 2, 3, 6, 7]], expected)


def test_what_a_memory_cannot_take() -> None:
    sent = SentRows()
    good = sent.row(0, 10, [5, 6], [4, 5])
    assert can_feed([good, sent.row(1, 9, [1, 2, 3], [7, 8, 9])], sent.layout)
    fetched = sent.row(1, 9, [1], [3])
    fetched.hidden[0].source.retire()
    part = replace(good.hidden[0], columns=slice(0, 2))
    for bad in (
        sent.row(1, 9, [1, 2, 3, 4], [7, 8, 9, 3]),
        sent.row(1, 9, [], []),
        # The first token of all: the drafter knows nothing of this prompt.
        sent.row(1, 2, [1, 2], [7, 8]),
        sent.row(1, 9, [1, 2], [7]),
        sent.row(0, 9, [1], [3]),
        fetched,
        good._replace(batch_slot=1, hidden=[part, good.hidden[1]]),
    ):
        assert not can_feed([good, bad], sent.layout), bad
    assert not can_feed([sent.row(batch_slot, 9, [1], [3]) for batch_slot in range(5)], sent.layout)
    # Without hidden states nothing says whether an ended sequence's blocks are still its own.
    bare = sent.layout._replace(hidden_width=0)
    ended = good._replace(hidden=[], generation=5)
    assert can_feed([good._replace(hidden=[])], bare) and not can_feed([ended], bare)
    assert can_feed([good._replace(generation=5)], sent.layout)


@pytest.mark.parametrize(("sent", "blocks", "named"), [(8, [2, 3], [2, 3]), (9, [2, 3], [3]), (11, [2], [])])
def test_a_request_names_the_blocks_that_are_not_known(sent: int, blocks: list[int], named: list[int]) -> None:
    row = SentRows().row(0, sent + 2, [1, 2], [0, 1], block_ids=blocks)
    (batch_row,) = as_batch_rows([row], 4)
    assert (batch_row.length, batch_row.new_tokens, batch_row.hidden, batch_row.block_ids) == (sent, [], [], named)
    assert batch_row.shape == row.shape


def test_a_drafters_process_that_stands_still_and_one_that_is_killed(tmp_path: Path) -> None:
    """Nobody waits longer than a draft may take.

    The memory is left alone until everything is answered.
    """
    address = f"unix:{tmp_path}/d.sock"
    sent = SentRows(LAYOUT)
    with client_of(address) as client, process_at(address) as process:
        transport = attached(client)
        memory = transport.overlap_memory
        assert memory is not None
        settings = AttachmentSettings(EPOCH, 1000, 4, LONG_S, time.perf_counter)
        handle = DrafterHandle(client, 1, settings)
        attachment = handle.attachment
        assert attachment is not None

        def post(place: int) -> tuple[bool, list[list[int]]]:
            """Return whether it went through device memory, and the trees."""
            rows = [sent.row(batch_slot, 9, [7, 5 + batch_slot], [0, place + batch_slot]) for batch_slot in range(3)]
            attachment.post(rows, may_feed=True)
            assert attachment._posted is not None
            is_fed = attachment._posted.in_device_memory
            return is_fed, [draft.tree.tokens.tolist() for _, draft in attachment.collect(lambda posted: 0.0)]

        def stop() -> None:
            os.kill(process.pid, signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)

        def expected(place: int) -> list[list[int]]:
            sums = [int(sent.buffer[place + batch_slot].sum()) for batch_slot in range(3)]
            return [[5 + batch_slot + node * sums[batch_slot] for node in range(4)] for batch_slot in range(3)]

        for place in (2, 9):
            assert post(place) == (True, expected(place))
        stop()
        patient, attachment._deadline = attachment._deadline, Deadline(0.05, handle.record.times)
        assert post(4) == (True, [])
        results = memory.results.clone()
        assert post(6) == (False, [])
        assert torch.equal(memory.results, results) and int(memory.stamp) == 3
        os.kill(process.pid, signal.SIGCONT)
        until(transport.is_idle)
        attachment._deadline = patient
        assert post(8) == (True, expected(8)) and int(memory.stamp) == 4
        stop()
        threading.Timer(0.2, process.kill).start()
        assert post(3) == (True, [])
        until(lambda: not handle.is_attached)
