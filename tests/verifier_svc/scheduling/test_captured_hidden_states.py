"""Draft heads are sent each token once, with the target's hidden states of the position before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from foretoken.drafting import FINAL_NORM, DraftBatch, DrafterNeeds, DraftRequest, TargetInfo
from foretoken.models.batch import ForwardBatch
from foretoken.sampling import SamplingParams, SpeculationOptions
from foretoken.transports.in_process import InProcessTransport
from tests.support.draft_requests import draft_batch
from tests.support.engine_harness import Harness, Request
from tests.support.hash_target import HIDDEN_SIZE, HashTarget, hidden_state_of
from verifier_svc.drafters.sent_tokens import CATCH_UP_TOKENS

VOCAB = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


class HeadLike:
    """A drafter that checks what a head is sent.

    It drafts the tokens that followed the last token earlier, so that some are accepted.
    """

    algorithm = "EAGLE3"

    def __init__(self, captured_layers: tuple[int, ...] = (2, 1), num_rerun: int = 1) -> None:
        self._needs = DrafterNeeds(captured_layers, num_rerun, blocks=True)
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.blocks: dict[tuple[int, int], dict[int, int]] = {}
        # By row: positions whose hidden states were sent.
        self.known: dict[tuple[int, int], list[int]] = {}
        self.block_size = 0

    def needs(self, target: TargetInfo) -> DrafterNeeds:
        return self._needs

    def attach(self, target: TargetInfo, weights: object) -> None:
        self.tokens.clear()
        self.block_size = target.block_size

    def release(self, batch_slots: Sequence[int]) -> None:
        return

    def gauges(self) -> dict[str, float]:
        return {}

    def draft(self, request: DraftRequest) -> DraftBatch:
        starts, nodes, parents = [0], [], []
        for row in range(request.num_rows):
            tokens = self._learn(request, row)
            chain = [tokens[-1]]
            if request.max_nodes[row] > 1 and tokens[-1] in tokens[:-1]:
                at = len(tokens) - 2 - tokens[-2::-1].index(tokens[-1])
                most = min(int(request.max_nodes[row]) - 1, int(request.max_depths[row]))
                chain += tokens[at + 1 : at + 1 + most]
            nodes += chain
            parents += range(-1, len(chain) - 1)
            starts.append(len(nodes))
        columns = (np.array(column, np.int32) for column in (starts, nodes, parents))
        return draft_batch(request.epoch, request.step_id, *columns)

    def _learn(self, request: DraftRequest, row: int) -> list[int]:
        key = int(request.batch_slots[row]), int(request.generations[row])
        new = request.new_tokens[slice(*request.new_token_starts[row : row + 2])].tolist()
        hidden = request.hidden[slice(*request.hidden_starts[row : row + 2])]
        blocks = request.block_ids[slice(*request.block_starts[row : row + 2])].tolist()
        tokens = self.tokens.setdefault(key, [])
        sent, length = len(tokens), len(tokens) + len(new)
        assert length == request.lengths[row], "a token was sent twice, or never"
        tokens += new
        for index, states in enumerate(hidden, start=length - len(hidden)):
            expected = [
                value for state in self._needs.captured_layers for value in hidden_state_of(tokens[:index], state)
            ]
            assert states.tolist() == expected, f"hidden states of another position beside token {index}"
            self.known.setdefault(key, []).append(index)
        table = self.blocks.setdefault(key, {})
        for place, block in enumerate(blocks, start=sent // self.block_size):
            assert table.setdefault(place, block) == block
        assert set(table) == set(range((length - 1) // self.block_size + 1))
        return tokens


def ask(prompt: list[int]) -> Request:
    """Return a request that names the head: what it is sent must not depend on its worth."""
    return Request(prompt, GREEDY, speculation=SpeculationOptions(drafter="head"))


def harness(drafter: HeadLike, target: HashTarget | None = None, **options: object) -> Harness:
    num_blocks = int(options.pop("num_blocks", 100))  # type: ignore[call-overload]
    return Harness(
        target or HashTarget(VOCAB, num_blocks, 4, spread=2.0),
        vocab_size=VOCAB,
        num_blocks=num_blocks,
        block_size=4,
        drafters={"head": drafter},
        hidden_size=HIDDEN_SIZE,
        num_layers=2,
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("captured_layers", [(2, 1), (FINAL_NORM,), (0, 2, FINAL_NORM)])
@pytest.mark.parametrize("chunk_tokens", [3, 64])
def test_each_token_is_sent_with_the_hidden_states_of_the_position_before_it(
    captured_layers: tuple[int, ...], chunk_tokens: int
) -> None:
    drafter = HeadLike(captured_layers)
    run = harness(drafter, chunk_tokens=chunk_tokens)
    prompts = [list(range(1, 11)), [3, 1, 4, 1, 5, 9, 2, 6], [7]]
    results = run.run(ask(prompt) for prompt in prompts)
    run.drain()
    sent = sorted(drafter.tokens.values())
    assert sent == sorted(prompt + result.token_ids for prompt, result in zip(prompts, results, strict=True))
    for key, tokens in drafter.tokens.items():
        assert drafter.known[key] == list(range(1, len(tokens))), "a token without hidden states, or out of order"
    assert run.speculator.drafter("head").counters.num_accepted_tokens > 0


def test_rows_that_draft_without_the_head_capture_nothing() -> None:
    target = HashTarget(VOCAB, 100, 4, spread=2.0)
    run = harness(HeadLike((2, 1)), target=target)
    run.run([Request([1, 2, 3], GREEDY, speculation=SpeculationOptions(enabled=False))])
    assert set(target.captured) == {()}
    run.run([ask([1, 2, 3])])
    assert target.captured[-1] == (2, 1)


def test_a_prefix_hit_has_the_hidden_states_of_its_last_position() -> None:
    drafter = HeadLike()
    run = harness(drafter)
    prompt = list(range(10)) * 2
    run.run([ask(prompt)])
    first = run.run([ask([*prompt, 5, 6])])[0]
    run.drain()
    assert first.finished is not None and first.finished.num_cached_tokens == 20
    (key,) = [key for key, tokens in drafter.tokens.items() if tokens[:22] == [*prompt, 5, 6]]
    # The drafter knows the first sequence's KV entries; from the boundary on everything is sent.
    assert drafter.known[key] == list(range(20, len(drafter.tokens[key])))


def test_a_head_of_several_layers_gets_as_many_positions_again() -> None:
    drafter = HeadLike(num_rerun=3)
    run = harness(drafter)
    prompt = list(range(10)) * 2
    run.run([ask(prompt), ask([*prompt, 1])])
    run.run([ask([*prompt, 5])])
    (key,) = [key for key, tokens in drafter.tokens.items() if tokens[:21] == [*prompt, 5]]
    assert drafter.known[key][0] == 18


def test_preempted_sequences_begin_anew_with_hidden_states() -> None:
    drafter = HeadLike()
    run = harness(drafter, num_blocks=26, max_running=6)
    results = run.run(ask([n, n + 1, n + 2]) for n in range(6))
    assert run.scheduler.num_preemptions > 0
    assert all(len(result.token_ids) == 40 for result in results)


def test_a_drafter_that_comes_back_is_sent_all_tokens_and_the_hidden_states_from_then_on() -> None:
    drafter = HeadLike()
    run = harness(drafter)
    (source,) = run.sources
    key = run.submit(ask([1, 2, 3]))
    while len(run.results[key].token_ids) < 15:
        run.step()
    source.kill()
    run.step()
    at = len(run.results[key].token_ids)
    run.step()
    drafter.known.clear()
    source.start()
    while not run.results[key].is_done:
        run.step()
    run.drain()
    (tokens,) = drafter.tokens.values()
    assert tokens == [1, 2, 3, *run.results[key].token_ids]
    (known,) = drafter.known.values()
    assert known[0] > 3 + at and known == list(range(known[0], len(tokens)))


def test_a_drafter_that_is_away_as_a_pass_begins_gets_no_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter is back before the pass ends, but the pass has captured nothing."""

    class Target(HashTarget):
        def forward(self, batch: ForwardBatch, captured_layers: tuple[int, ...] = ()) -> torch.Tensor:
            logits = super().forward(batch, captured_layers)
            if source.transport is None:
                source.start()
            return logits

    target = Target(VOCAB, 100, 4, spread=2.0)
    run = harness(HeadLike(), target=target)
    (source,) = run.sources
    key = run.submit(ask([1, 2, 3]))
    while len(run.results[key].token_ids) < 15:
        run.step()
    schedule = run.scheduler.schedule

    def lose(*arguments: Any) -> Any:
        source.transport = None
        return schedule(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(run.scheduler, "schedule", lose)
        run.step()
    assert target.captured[-1] == () and source.num_attaches == 2
    while not run.results[key].is_done:
        run.step()
    run.drain()
    assert source.failures == [] and target.captured[-1] == (2, 1)


def test_two_drafters_with_other_layers_get_their_own_columns() -> None:
    heads = {"one": HeadLike((1,)), "two": HeadLike((2, 1, FINAL_NORM)), "blind": HeadLike(())}
    run = Harness(
        HashTarget(VOCAB, 100, 4, spread=2.0),
        vocab_size=VOCAB,
        num_blocks=100,
        block_size=4,
        drafters=heads,
        hidden_size=HIDDEN_SIZE,
        num_layers=2,
    )
    names = ["one", "two", "merge", "auto", "blind+one"]
    run.run(Request([n, 2, 3], GREEDY, speculation=SpeculationOptions(drafter=name)) for n, name in enumerate(names))
    run.drain()
    assert sorted(tokens[0] for tokens in heads["one"].tokens.values()) == [0, 2, 3, 4]
    assert sorted(tokens[0] for tokens in heads["two"].tokens.values()) == [1, 2]
    # A bug once: a drafter without hidden states beside one with some ended the engine.
    assert sorted(tokens[0] for tokens in heads["blind"].tokens.values()) == [2, 4]
    for head in (heads["one"], heads["two"]):
        for key, tokens in head.tokens.items():
            assert head.known[key] == list(range(1, len(tokens)))
    assert not heads["blind"].known


def test_a_model_that_writes_a_prompts_entries_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows decode plainly until it is done; then it gets the missed tokens and drafts again."""
    looks = iter([False] * 5)
    monkeypatch.setattr(InProcessTransport, "is_idle", lambda _: next(looks, True))
    requests: list[DraftRequest] = []

    class Watched(HeadLike):
        def draft(self, request: DraftRequest) -> DraftBatch:
            requests.append(request)
            return super().draft(request)

    run = harness(Watched())
    prompt = [n % 10 for n in range(CATCH_UP_TOKENS + 12)]
    run.run([ask(prompt)])
    sent = [(len(request.new_tokens), int(request.max_nodes[0])) for request in requests]
    assert sent[0] == (len(prompt) + 1, 1), "the prompt and the first token, to be learned"
    assert sent[1][0] == 6 and sent[1][1] > 1, "the five steps that nobody waited in, and the next one"


def test_a_model_that_never_catches_up_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InProcessTransport, "is_idle", lambda _: False)
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.5
        return now

    run = harness(HeadLike(), clock=clock, timeout_s=0.1)
    (result,) = run.run([ask([1] * (CATCH_UP_TOKENS + 1))])
    assert len(result.token_ids) == 40
    (source,) = run.sources
    assert source.failures and "no sound draft within 100 ms" in source.failures[0]


def test_a_model_that_was_late_is_asked_again_once_it_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug once: three drafts in a row that waited for one graph capture detached the drafter."""
    received = InProcessTransport.receive
    num_receives, looks = 0, iter([False] * 4)

    def receive(self: InProcessTransport, timeout_s: float) -> DraftBatch | None:
        nonlocal num_receives
        num_receives += 1
        batch = received(self, timeout_s)
        return None if num_receives == 1 else batch

    monkeypatch.setattr(InProcessTransport, "receive", receive)
    monkeypatch.setattr(InProcessTransport, "is_idle", lambda _: next(looks, True))
    run = harness(HeadLike())
    failures: list[str] = []
    run.sources[0].report_failure = failures.append  # type: ignore[method-assign]
    key = run.submit(ask([1, 2, 3, 1, 2]))
    receives: list[int] = []
    while not run.results[key].is_done:
        run.step()
        receives.append(num_receives)
    first = receives.index(1)
    assert receives[first : first + 5] == [1] * 5, "nobody waits while it is busy"
    assert receives[first + 5] == 2, "then it is asked again"
    assert not failures, "nothing is known of its cost: load may explain the wait"
