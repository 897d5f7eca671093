"""When ordinary steps ask look-up drafters, and wait for them: what these promise, find and cost."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from itertools import pairwise

import pytest

from foretoken.drafting import DraftBatch, DraftRequest
from foretoken.sampling import DraftShape, SamplingParams, SpeculationOptions
from tests.support.engine_harness import Harness, Request
from tests.support.hash_target import HashTarget
from tests.support.lookup_play import Knowing, take_look_ups_for_vain
from tests.support.scripted_drafter import Nodes
from verifier_svc.speculation.draft_round import SEND_BEHIND
from verifier_svc.speculation.lookup_pace import ASKS_A_TRY, RARELY_FROM, RAREST_TRY, TRY_EVERY
from verifier_svc.speculation.ordinary_lookups import MOST_UNREAD

VOCAB = 40
NUM_TOKENS = 230
EVERYWHERE = range(NUM_TOKENS)
# A step takes a millisecond, however many rows it has.
COSTS = {1: 1e-3, 256: 1.001e-3}
# More than any draft can save.
DEAR_S = 1.0


def new_harness(**options: object) -> Harness:
    target = HashTarget(VOCAB, 1000, 4)
    return Harness(target, vocab_size=VOCAB, num_blocks=1000, block_size=4, max_running=16, costs=COSTS, **options)  # type: ignore[arg-type]


def new_request(number: int, num_tokens: int = NUM_TOKENS) -> Request:
    return Request([1, 2, number], SamplingParams(temperature=0.0, max_tokens=num_tokens))


class Timed(Knowing):
    """A drafter that works while it is asked, ``ask_s`` of the clock for each request."""

    def __init__(self, known: Container[int], texts: list[tuple[list[int], list[int]]], ask_s: float) -> None:
        super().__init__(known, texts)
        self.now, self._ask_s = 0.0, ask_s
        # The output that each row had which was asked something, by its prompt's last token.
        self.places: list[tuple[int, int]] = []

    def draft(self, request: DraftRequest) -> DraftBatch:
        if max(request.max_nodes) > 1:
            self.now += self._ask_s
        return super().draft(request)

    def _tree(self, request: DraftRequest, row: int, known: list[int]) -> Nodes:
        if request.max_nodes[row] > 1:
            self.places.append((known[2], len(known) - 3))
        return super()._tree(request, row, known)


class Batch:
    """Requests in ordinary steps with one look-up drafter."""

    def __init__(
        self, requests: list[Request], known: Container[int], ask_s: float = 0.0, *, chunk_tokens: int = 64
    ) -> None:
        outputs = [result.token_ids for result in new_harness().run([request.plain() for request in requests])]
        self.texts = [(list(request.prompt), output) for request, output in zip(requests, outputs, strict=True)]
        self.drafter = Timed(known, self.texts, ask_s)
        self.harness = new_harness(
            drafters={"quick": self.drafter}, clock=lambda: self.drafter.now, chunk_tokens=chunk_tokens
        )
        # The steps that asked.
        self.asking: list[int] = []

    @property
    def num_awaited(self) -> int:
        return self.harness.speculator.drafter("quick").counters.num_awaited

    def step(self) -> None:
        before = len(self.drafter.places)
        self.harness.step()
        if len(self.drafter.places) > before:
            self.asking.append(self.harness.num_steps)

    def run(self, requests: list[Request]) -> None:
        keys = [self.harness.submit(request) for request in requests]
        while not all(self.harness.results[key].is_done for key in keys):
            self.step()
        outputs = [output for _, output in self.texts]
        assert [self.harness.results[key].token_ids for key in keys] == outputs[: len(keys)]


def test_a_large_batch_that_finds_nothing_is_asked_ever_more_rarely() -> None:
    requests = [new_request(number) for number in range(RARELY_FROM)]
    batch = Batch(requests, ())
    batch.run(requests)
    waits = [later - before for before, later in pairwise(batch.asking)]
    # Rows that pause may leave steps out, so some waits are as long as two.
    assert max(waits[: len(waits) // 2]) < waits[-1] and waits[-1] > TRY_EVERY
    assert max(waits) <= 2 * RAREST_TRY // ASKS_A_TRY
    assert batch.num_awaited == 0
    # Texts are sent as they grow, those together that are about as far behind.
    assert max(batch.drafter.num_new) <= RARELY_FROM * (SEND_BEHIND + 1)
    learned = batch.drafter.learned
    assert all(
        any(text[:-SEND_BEHIND] == known[: len(text) - SEND_BEHIND] for known in learned)
        for text in ([*prompt, *output] for prompt, output in batch.texts)
    )
    assert len(batch.drafter.num_new) < NUM_TOKENS / 8 + len(batch.asking)


@pytest.mark.parametrize("num_rows", [1, 4, RARELY_FROM])
@pytest.mark.parametrize("is_dear", [False, True])
def test_a_step_waits_for_look_ups_that_save_more_than_asking_takes(num_rows: int, is_dear: bool) -> None:
    requests = [new_request(number) for number in range(num_rows)]
    batch = Batch(requests, EVERYWHERE, DEAR_S if is_dear else 0.0)
    batch.run(requests)
    num_steps = batch.harness.num_steps
    if is_dear:
        # What asking takes is believed step by step.
        assert 0 < batch.num_awaited < 10 + num_steps / TRY_EVERY
        assert num_steps > NUM_TOKENS / 2
    else:
        assert batch.num_awaited > 0.8 * num_steps and num_steps < NUM_TOKENS / 4


def test_look_ups_that_do_not_pay_make_a_large_batch_ask_rarely() -> None:
    requests = [new_request(number) for number in range(RARELY_FROM)]
    batch = Batch(requests, EVERYWHERE, DEAR_S)
    batch.run(requests)
    late = [step for step in batch.asking if step > 50]
    # A find of scouts is followed once.
    assert 0 < len(late) < (batch.harness.num_steps - 50) / 4


def test_a_try_that_pays_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look-ups were in vain before; now the drafter knows all texts."""
    take_look_ups_for_vain(monkeypatch, try_every=64)
    requests = [new_request(number) for number in range(RARELY_FROM)]
    batch = Batch(requests, EVERYWHERE, ask_s=5e-4)
    keys = [batch.harness.submit(request) for request in requests]
    while not batch.num_awaited:
        batch.step()
    assert batch.harness.num_steps >= 64
    for _ in range(10):
        before = batch.num_awaited
        batch.step()
        assert batch.num_awaited == before + 1
    assert not any(batch.harness.results[key].is_done for key in keys)


@pytest.mark.parametrize("case", ["prediction", "fixed shape"])
def test_one_that_says_what_to_look_up_is_asked_at_once_and_in_each_step(case: str) -> None:
    requests = [new_request(number) for number in range(RARELY_FROM)]
    late = new_request(20, 40)
    if case == "fixed shape":
        late = replace(late, speculation=SpeculationOptions(drafter="quick", shape=DraftShape(3, 1, 4)))
    # Others find nothing by then, so they are asked rarely.
    batch = Batch([*requests, late], range(60), DEAR_S)
    if case == "prediction":
        late = replace(late, prediction=batch.texts[-1][1])
    for request in requests:
        batch.harness.submit(request)
    for _ in range(150):
        batch.step()
    key = batch.harness.submit(late)
    before = batch.harness.num_steps
    while not batch.harness.results[key].is_done:
        batch.step()
    places = [place for number, place in batch.drafter.places if number == 20]
    assert places[0] == 1 and len(places) >= batch.harness.num_steps - before - 2
    assert batch.harness.num_steps - before < 25, "it drafts"
    assert batch.harness.results[key].token_ids == batch.texts[-1][1]


def test_a_large_batch_follows_what_its_scouts_find() -> None:
    """The text begins to repeat late, when rows are asked rarely. The step after a find asks again."""
    requests = [new_request(number) for number in range(RARELY_FROM)]
    batch = Batch(requests, range(100, NUM_TOKENS))
    batch.run(requests)
    # Each row has a token a step until then.
    first = next(index for index, step in enumerate(batch.asking) if step > 100 + len(requests[0].prompt))
    before, found, after = batch.asking[first - 1 : first + 2]
    assert found - before > 4 and after == found + 1
    assert batch.num_awaited > 0


def test_a_prompt_is_sent_after_its_pass_with_the_rows_that_are_behind() -> None:
    requests = [new_request(number) for number in range(RARELY_FROM)]
    late = Request([1, 2, 20] + [5] * (SEND_BEHIND - 3), SamplingParams(temperature=0.0, max_tokens=4))
    batch = Batch([*requests, late], ())
    sent: list[list[int]] = []
    draft = batch.drafter.draft

    def noting(request: DraftRequest) -> DraftBatch:
        sent.append([stop - start for start, stop in pairwise(request.new_token_starts.tolist())])
        return draft(request)

    batch.drafter.draft = noting  # type: ignore[method-assign]
    for request in requests:
        batch.harness.submit(request)
    while len(sent) < 2 or len(sent[-1]) < RARELY_FROM or max(sent[-1]) < SEND_BEHIND // 2:
        batch.step()
    sent.clear()
    batch.harness.submit(late)
    num_steps = 0
    while not sent:
        batch.step()
        num_steps += 1
    assert sent == [[len(late.prompt) + num_steps]], "the others were sent just now"
    assert num_steps <= 2, "it waits for a pass beside which what was asked before is answered"


LONG_PROMPT = [1, 2, 20] + [5] * 200


class ScoutingBatch(Batch):
    """Rows that have just scouted, and a request whose prompt takes several passes.

    Two rows scout in each step.

    Attributes:
        reads: whether there was an answer, for each time that the verifier read one.
    """

    def __init__(self, chunk_tokens: int, num_rows: int = 2) -> None:
        requests = [new_request(1 + number) for number in range(num_rows)]
        late = Request(LONG_PROMPT, SamplingParams(temperature=0.0, max_tokens=20))
        super().__init__([*requests, late], EVERYWHERE, DEAR_S, chunk_tokens=chunk_tokens)
        for request in requests:
            self.harness.submit(request)
        # Steps wait until what that costs is believed, and then only to try it, TRY_EVERY steps later.
        num_awaited = 0
        while num_awaited == 0 or self.num_awaited > num_awaited or self.asking[-1] != self.harness.num_steps:
            num_awaited = self.num_awaited
            self.step()
        self.reads: list[bool] = []
        transport = self.harness.sources[0].transport
        assert transport is not None
        receive = transport.receive

        def noting(timeout_s: float) -> DraftBatch | None:
            batch = receive(timeout_s)
            self.reads.append(batch is not None)
            return batch

        transport.receive = noting  # type: ignore[method-assign]
        self._late = self.harness.submit(late)

    @property
    def is_prompt_computed(self) -> bool:
        return bool(self.harness.results[self._late].token_ids)


def test_scouts_are_read_after_a_pass_beside_which_drafters_could_answer() -> None:
    batch = ScoutingBatch(chunk_tokens=128)
    batch.asking.clear()
    batch.step()
    assert not batch.is_prompt_computed
    batch.step()
    assert batch.is_prompt_computed
    assert batch.reads == [] and batch.asking == [], "the last scouts were not answered yet"
    batch.step()
    assert batch.reads == [True] and batch.asking == [batch.harness.num_steps]


def test_what_is_new_of_other_rows_waits_until_scouts_are_read() -> None:
    batch = ScoutingBatch(chunk_tokens=128, num_rows=RARELY_FROM)
    batch.asking.clear()
    while not batch.is_prompt_computed:
        batch.step()
    assert batch.reads == [] and batch.asking == [], "the prompt was not sent in place of the scouts"
    batch.step()
    assert batch.reads == [True] and batch.asking == [batch.harness.num_steps], "rows follow what scouts have found"


def test_scouts_are_read_although_each_pass_computes_prompts() -> None:
    batch = ScoutingBatch(chunk_tokens=24)
    batch.asking.clear()
    for _ in range(2 * MOST_UNREAD):
        batch.step()
    assert not batch.is_prompt_computed
    last = batch.harness.num_steps
    assert batch.reads == [True, True] and batch.asking == [last - MOST_UNREAD, last]


def test_a_step_that_waits_reads_the_scouts_before() -> None:
    # Waiting is tried while the prompt is computed, two steps before the scouts would be read.
    batch = ScoutingBatch(chunk_tokens=5)
    num_awaited = batch.num_awaited
    while batch.num_awaited == num_awaited:
        batch.reads.clear()
        batch.step()
    assert not batch.is_prompt_computed
    assert batch.reads == [True, True], "the scouts' answer, and what was waited for"
    batch.step()
    assert all(batch.reads) and not batch.harness.sources[0].failures


def test_look_ups_that_pay_are_asked_beside_prompts_too() -> None:
    requests = [new_request(1), Request(LONG_PROMPT, SamplingParams(temperature=0.0, max_tokens=4))]
    batch = Batch(requests, EVERYWHERE)
    batch.harness.submit(requests[0])
    while batch.num_awaited < 4:
        batch.step()
    late = batch.harness.submit(requests[1])
    before = batch.num_awaited, batch.harness.num_steps
    while not batch.harness.results[late].token_ids:
        batch.step()
    num_steps = batch.harness.num_steps - before[1]
    assert num_steps > 2 and batch.num_awaited - before[0] == num_steps
