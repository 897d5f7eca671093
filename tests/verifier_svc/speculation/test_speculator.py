"""The speculator's traffic with a drafter: requests, waits, scouting, final updates, releases."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from foretoken.drafting import ROW_COLUMNS, DraftBatch, DrafterNeeds, DraftRequest, TargetInfo
from foretoken.errors import PreconditionError
from foretoken.sampling import SamplingParams
from tests.support.draft_requests import draft_batch
from tests.support.engine_harness import Harness, Request, TestSource
from tests.support.hash_target import HashTarget
from verifier_svc.scheduling.sequence import digest_of_salt
from verifier_svc.speculation.lookup_pace import ASKS_A_TRY, RARELY_FROM

VOCAB = 40
PROMPT = [1, 2, 3]


class Notebook:
    """A drafter that notes what it is sent.

    It drafts one fixed token from its ``first_find``-th request on.
    """

    algorithm = "NOTEBOOK"

    def __init__(self, first_find: int) -> None:
        self.requests: list[DraftRequest] = []
        self.released: list[int] = []
        self._first_find = first_find

    def needs(self, target: TargetInfo) -> DrafterNeeds:
        return DrafterNeeds()

    def attach(self, target: TargetInfo, weights: object) -> None:
        return

    def release(self, batch_slots: Sequence[int]) -> None:
        self.released.extend(batch_slots)

    def gauges(self) -> dict[str, float]:
        return {}

    def draft(self, request: DraftRequest) -> DraftBatch:
        self.requests.append(request)
        finds = len(self.requests) >= self._first_find
        starts, tokens, parents = [0], [], []
        for row in range(request.num_rows):
            tokens.append(int(request.new_tokens[request.new_token_starts[row + 1] - 1]))
            parents.append(-1)
            if finds and request.max_nodes[row] > 1:
                tokens.append(5)
                parents.append(0)
            starts.append(len(tokens))
        return draft_batch(
            request.epoch,
            request.step_id,
            np.array(starts, np.int32),
            np.array(tokens, np.int32),
            np.array(parents, np.int32),
        )


def run(drafter: Notebook, num_tokens: int = 60) -> Harness:
    harness = Harness(
        HashTarget(VOCAB, 100, 4), vocab_size=VOCAB, num_blocks=100, block_size=4, drafters={"notebook": drafter}
    )
    harness.run([Request(PROMPT, SamplingParams(temperature=0.0, max_tokens=num_tokens))])
    harness.drain()
    return harness


def sent(drafter: Notebook) -> list[int]:
    return [int(token) for request in drafter.requests for token in request.new_tokens]


def test_every_token_is_sent_once_and_in_order_also_those_of_paused_steps_and_the_last() -> None:
    drafter = Notebook(first_find=10_000)
    harness = run(drafter)
    result = next(iter(harness.results.values()))
    assert sent(drafter) == PROMPT + result.token_ids
    assert drafter.requests[-1].max_nodes.tolist() == [1]
    assert len(drafter.requests) < 25, "a drafter with nothing to propose is not asked in each step"


def test_a_row_says_what_it_is_and_how_it_is_sampled() -> None:
    drafter = Notebook(first_find=1)
    harness = Harness(
        HashTarget(VOCAB, 100, 4), vocab_size=VOCAB, num_blocks=100, block_size=4, drafters={"notebook": drafter}
    )
    sampling = SamplingParams(temperature=0.5, seed=2**63 + 3, top_k=5, top_p=0.75, min_p=0.125, max_tokens=12)
    harness.run([Request(PROMPT, sampling, choice_index=2, cache_salt="tenant")])
    first = drafter.requests[0]
    assert {name: getattr(first, name).tolist() for name in ROW_COLUMNS} == {
        "salts": [digest_of_salt("tenant")],
        "seeds": [2**63 + 3],
        "batch_slots": [0],
        "generations": first.generations.tolist(),
        "lengths": [len(PROMPT) + 1],
        "prompt_lengths": [len(PROMPT)],
        "max_nodes": [8],
        "max_depths": [7],
        "max_branches": [8],
        "choice_indices": [2],
        "top_ks": [5],
        "temperatures": [0.5],
        "top_ps": [0.75],
        "min_ps": [0.125],
    }
    shapes = {tuple(getattr(r, name)[0] for name in ("max_nodes", "max_depths")) for r in drafter.requests}
    assert any(nodes == depth + 1 > 2 for nodes, depth in shapes), "a chain of several tokens was asked for"


def test_a_find_is_asked_for_in_earnest_in_the_next_step() -> None:
    drafter = Notebook(first_find=7)
    harness = run(drafter)
    counters = harness.speculator.drafter("notebook").counters
    assert counters.num_drafts >= 1
    lengths = [int(request.lengths[0]) for request in drafter.requests]
    # Scouted with pauses; the seventh request's find is seen a step later, and requested then.
    assert lengths[6] - lengths[5] > 2
    assert lengths[7] - lengths[6] == 1


def test_rows_of_a_large_batch_scout_together() -> None:
    """A request costs more than its rows, which come one after the other."""
    drafter = Notebook(first_find=10_000)
    harness = Harness(
        HashTarget(VOCAB, 300, 4), vocab_size=VOCAB, num_blocks=300, block_size=4, drafters={"notebook": drafter}
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=80)
    num_rows = RARELY_FROM
    for i in range(num_rows):
        harness.submit(Request([1, 2, i], sampling))
        harness.step()
    asking_steps, asked = [], set()
    for number in range(60):
        drafter.requests.clear()
        harness.step()
        for request in drafter.requests:
            if max(request.max_nodes) > 1:
                asking_steps.append(number)
                asked |= set(request.batch_slots[request.max_nodes > 1].tolist())
    assert len(asked) == num_rows
    assert len(asking_steps) > 2 and len({number % ASKS_A_TRY for number in asking_steps}) == 1
    harness.drain()


def test_a_batch_slot_is_forgotten_after_its_last_tokens() -> None:
    drafter = Notebook(first_find=1)
    harness = run(drafter)
    assert drafter.released == []
    harness.run([Request(PROMPT, SamplingParams(temperature=0.0, max_tokens=9))])
    assert drafter.released == [int(drafter.requests[0].batch_slots[0])]


def test_a_request_that_wants_no_drafts_is_not_sent() -> None:
    drafter = Notebook(first_find=1)
    harness = Harness(
        HashTarget(VOCAB, 100, 4), vocab_size=VOCAB, num_blocks=100, block_size=4, drafters={"notebook": drafter}
    )
    harness.run([Request(PROMPT, SamplingParams(temperature=0.0, max_tokens=20)).plain()])
    harness.drain()
    assert drafter.requests == []


@pytest.mark.parametrize("has_prediction", [False, True])
def test_a_prompt_is_sent_ahead_if_its_first_ask_is_waited_for(*, has_prediction: bool) -> None:
    drafter = Notebook(first_find=1)
    harness = Harness(
        HashTarget(VOCAB, 100, 4), vocab_size=VOCAB, num_blocks=100, block_size=4, drafters={"notebook": drafter}
    )
    prediction = [1, 2, 3] if has_prediction else []
    harness.run([Request(PROMPT, SamplingParams(temperature=0.0, max_tokens=9), prediction=prediction)])
    first, second = drafter.requests[:2]
    if has_prediction:
        assert first.new_tokens.tolist() == PROMPT and first.max_nodes.tolist() == [1]
        first = second
        assert len(first.new_tokens) == 1
    else:
        assert first.new_tokens.tolist()[: len(PROMPT)] == PROMPT
    assert first.max_nodes[0] > 1


def test_waits_are_counted_for_the_drafter_that_was_waited_for() -> None:
    drafter = Notebook(first_find=1)
    harness = run(drafter)
    counters = harness.speculator.drafter("notebook").counters
    asked = [request for request in drafter.requests if request.max_nodes.max() > 1]
    # A sequence's final update and scouting requests are sent, but nobody waits for them.
    assert 0 < counters.num_awaited <= len(asked)
    assert counters.wait_seconds > 0


def test_a_batch_slot_is_forgotten_before_its_next_owner_is_sent() -> None:
    """A bug once: the release came after the new owner's prompt, and wiped it."""

    class Strict(Notebook):
        sent: set[int]

        def needs(self, target: TargetInfo) -> DrafterNeeds:
            return DrafterNeeds()

        def attach(self, target: TargetInfo, weights: object) -> None:
            self.sent = set()

        def release(self, batch_slots: Sequence[int]) -> None:
            super().release(batch_slots)
            self.sent -= set(batch_slots)

        def draft(self, request: DraftRequest) -> DraftBatch:
            for row, batch_slot in enumerate(request.batch_slots.tolist()):
                whole = request.new_token_starts[row + 1] - request.new_token_starts[row] == request.lengths[row]
                assert whole or batch_slot in self.sent, "a batch slot with a past that was forgotten"
                self.sent.add(batch_slot)
            return super().draft(request)

    drafter = Strict(first_find=3)
    harness = run(drafter, num_tokens=1)
    for length in (1, 9, 1, 9):
        harness.run([Request(PROMPT, SamplingParams(temperature=0.0, max_tokens=length))] * 3)
    harness.drain()
    assert not harness.sources[0].failures
    assert drafter.released


def test_a_batch_slot_that_changes_hands_within_a_step_is_sent_in_order() -> None:
    """A bug once: an aborted owner's final update came after the next prompt and wiped it."""
    drafter = Notebook(first_find=1)
    harness = Harness(
        HashTarget(VOCAB, 100, 4),
        vocab_size=VOCAB,
        num_blocks=100,
        block_size=4,
        drafters={"notebook": drafter},
        max_running=1,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=40)
    first = harness.submit(Request(PROMPT, sampling))
    second = harness.submit(Request([4, 5, 6, 7], sampling))
    while len(harness.results[first].token_ids) < 8:
        harness.step()
    harness.abort(first)
    released_before = None
    while not harness.results[second].is_done:
        harness.step()
        if any(2 in request.generations.tolist() for request in drafter.requests):
            if released_before is None:
                released_before = list(drafter.released)
            assert drafter.released == released_before, "the batch slot has an owner: there is nothing to forget"
    assert released_before is not None, "the second sequence was never sent"
    harness.drain()
    generations = [generation for request in drafter.requests for generation in request.generations.tolist()]
    assert generations == sorted(generations)
    for key, generation in ((first, 1), (second, 2)):
        known = [
            token
            for request in drafter.requests
            for row in range(request.num_rows)
            if request.generations[row] == generation
            for token in request.new_tokens[request.new_token_starts[row] : request.new_token_starts[row + 1]].tolist()
        ]
        prompt = PROMPT if key == first else [4, 5, 6, 7]
        assert known == prompt + harness.results[key].token_ids


def test_an_address_is_attached_once() -> None:
    """A drafter serves one attachment: two names for it would take it from each other for ever."""
    harness = Harness(HashTarget(VOCAB, 50, 4), vocab_size=VOCAB, num_blocks=50, block_size=4)

    def source(name: str, address: str) -> TestSource:
        made = TestSource(name, Notebook(1), TargetInfo("test", VOCAB, 64, 8, 8))
        made.address = address
        return made

    add = harness.speculator.add_source
    add(source("first", "unix:/run/d"))
    add(source("inside", ""))
    add(source("inside too", ""))
    with pytest.raises(PreconditionError, match="unix:/run/d is attached as 'first'") as raised:
        add(source("second", "unix:/run/d"))
    assert raised.value.field == "address"
    with pytest.raises(PreconditionError, match="there is a drafter 'first'"):
        add(source("first", "unix:/run/d"))
    harness.speculator.remove_source("first")
    add(source("second", "unix:/run/d"))
