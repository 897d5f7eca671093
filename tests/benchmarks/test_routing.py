"""The routing simulator: its traces, its verifiers by
hand, its bars, a death, and real verifiers.
"""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.routing import measured, simulator, trace
from benchmarks.routing.modelled_cache import ModelledCache
from benchmarks.routing.modelled_fleet import Death, ModelledFleet, made_up_addresses
from benchmarks.routing.modelled_verifier import Costs, ModelledRequest, ModelledVerifier, SharedCores
from benchmarks.routing.trace import Mix, Request

MIX = Mix(rate=200, seconds=60)
# Steps of 10 ms, rows of 1 ms, prompt tokens of 0.1 ms, and whole prompts in one step.
COSTS = Costs(0.01, 0.001, 0.0001, rows=2, cache_tokens=1000, chunk_tokens=100, limit_s=1e9)


def request(length: int, output: int, ids: list[int], at_s: float = 0.0) -> Request:
    return Request(at_s, length, output, tuple(ids))


def drive(verifier: ModelledVerifier) -> list[tuple[float, ModelledRequest]]:
    """Run a verifier until it is idle; return what finished and when."""
    ends = []
    while (now := verifier.next_s) < math.inf:
        ends += [(now, sequence) for sequence in verifier.advance(now)]
    return ends


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    requests = [request(100, 5, [1, 2], 0.25), request(30, 1, [3], 1.5)]
    trace.write(path, requests)
    assert trace.read(path) == requests
    assert json.loads(path.read_text().splitlines()[0]) == {
        "timestamp": 250,
        "input_length": 100,
        "output_length": 5,
        "hash_ids": [1, 2],
    }
    path.write_text('{"timestamp": 1}\n')
    with pytest.raises(ValueError, match=r"trace.jsonl, line 1: KeyError\('input_length'\)"):
        trace.read(path)


def test_prompts_share_tokens_as_far_as_ids() -> None:
    first = trace.token_ids(request(150, 1, [1, 2, 3]), 64)
    second = trace.token_ids(request(192, 1, [1, 2, 4]), 64)
    assert (len(first), len(second)) == (150, 192)
    assert first[:128] == second[:128] and not set(first[128:]) & set(second[128:])
    assert max(trace.token_ids(request(64, 1, [7]), 64, vocab_size=50)) < 50


def test_an_unlimited_cache_finds_all_but_the_last_token() -> None:
    requests = [request(100, 1, [1, 2]), request(128, 1, [1, 3]), request(128, 1, [1, 3])]
    # 64 of the second; 64 and 63 of the third.
    assert trace.infinite_hit_rate(requests, 64) == pytest.approx((64 + 64 + 63) / (100 + 128 + 128))


def test_a_verifier_by_hand() -> None:
    verifier = ModelledVerifier(COSTS, 10)
    verifier.submit(ModelledRequest(request(40, 3, [1, 2, 3, 4]), 0), 0.0)
    ((end, sequence),) = drive(verifier)
    # A step for the prompt, which samples the first token, and two for the others.
    assert sequence.first_token_s == pytest.approx(0.010 + 40 * 0.0001)
    assert end == pytest.approx(0.014 + 2 * 0.011)
    # Of the same blocks only the last token runs again, and another request waits beside both rows.
    verifier = ModelledVerifier(COSTS, 10)
    for _ in range(3):
        verifier.submit(ModelledRequest(request(40, 2, [1, 2, 3, 4]), 0), 0.0)
    ends = drive(verifier)
    assert [round(sequence.queued_s, 4) for _, sequence in ends] == [0.0, 0.014, 0.0251]
    assert (verifier.counts.prompt_tokens, verifier.counts.hit_tokens) == (120, 78)
    assert verifier.counts.output_tokens == 6


def test_a_full_cache_drops_what_was_used_longest_ago() -> None:
    verifier = ModelledVerifier(Costs(0.01, 0, 0, rows=1, cache_tokens=100, chunk_tokens=100), 10)
    prompts = [range(1, 6), range(11, 16), range(21, 26), range(1, 6), range(21, 26)]
    for number, ids in enumerate(prompts):
        verifier.submit(ModelledRequest(request(50, 1, list(ids), number), 0), float(number))
        drive(verifier)
    # The first was dropped for the third. Of the third the last block had to go for the fourth.
    assert verifier.counts.hit_tokens == 40


def test_running_sequences_share_blocks_and_none_starts_without_room() -> None:
    cache = ModelledCache(10)
    assert cache.start([1, 2, 3, 4], 1) == 0
    cache.compute([1, 2, 3, 4])
    assert cache.start([1, 2, 3, 5], 1) == 3
    assert cache.num_used == 7
    # Three are free, and these would need four.
    assert cache.start([6, 7, 8], 1) is None
    cache.release([1, 2, 3, 4], 1, 1)
    assert cache.num_used == 5
    # The output's block goes first, then the prompt's last block that nobody uses.
    assert cache.start([6, 7, 8], 1) == 0
    assert cache.start([1, 2, 3, 4], 0) == 4


def test_verifiers_on_one_core_take_twice_as_long() -> None:
    cores = SharedCores(1)
    first, second = (ModelledVerifier(COSTS, 10, cores) for _ in range(2))
    ends = {}
    for verifier in (first, second):
        verifier.submit(ModelledRequest(request(40, 3, [1, 2, 3, 4]), 0), 0.0)
    while (verifier := min(first, second, key=lambda one: one.next_s)).next_s < math.inf:
        now = verifier.next_s
        if verifier.advance(now):
            ends[verifier] = now
    # A step takes what it takes with the verifiers that compute when it begins: one, then two.
    assert ends == {first: pytest.approx(0.014 + 2 * 2 * 0.011), second: pytest.approx(2 * (0.014 + 2 * 0.011))}
    assert cores.num_busy == 0


def run(num_verifiers: int, **more: object) -> simulator.SimulationReport:
    requests = trace.make(MIX)
    fleet = ModelledFleet(Costs(), made_up_addresses(num_verifiers), MIX.block_tokens, **more)  # type: ignore[arg-type]
    return simulator.report(fleet, fleet.replay(requests), requests, MIX.block_tokens)


@pytest.mark.slow
def test_routing_meets_its_bars_at_eight_verifiers_and_load_alone_does_not() -> None:
    routed, by_load = run(8), run(8, by_load=True)
    assert routed.meets_bars, routed
    assert by_load.hit_rate < 0.75 * routed.hit_rate
    assert set(by_load.reasons) == {"load"}


@pytest.mark.slow
def test_several_gateways_agree() -> None:
    assert run(8, num_gateways=4).hit_rate > 0.95 * run(8).hit_rate


def test_a_death_loses_no_token() -> None:
    requests = trace.make(MIX)[:3000]
    fleet = ModelledFleet(Costs(), made_up_addresses(10), MIX.block_tokens)
    done = fleet.replay(requests, Death(8.0, frozenset({4}), noticed_s=2.0))
    assert len(done.finished) == len(requests)
    assert all(sequence.num_done == sequence.request.output_length for sequence in done.finished)
    paused = [sequence for sequence in done.finished if not math.isnan(sequence.pause_s)]
    assert paused and all(sequence.pause_s >= 2.0 for sequence in paused)
    late = [v.counts.num_requests for v in fleet.verifiers]
    assert late[4] < min(late[:4] + late[5:])


def test_costs_are_learned_from_counters() -> None:
    samples = [
        measured.VerifierReading(9.0, 0.01 * steps + 0.002 * rows + 0.0003 * tokens, steps, rows, tokens + 7, 7, 0)
        for steps, rows, tokens in ((10, 40, 300), (5, 5, 900), (20, 160, 0), (12, 70, 500))
    ]
    costs = measured.fitted(samples)
    assert (costs.step_s, costs.row_s, costs.token_s) == pytest.approx((0.01, 0.002, 0.0003))


def test_costs_are_scaled_to_the_cpu_time_of_the_measured_trace() -> None:
    work = measured.VerifierReading(9.0, 2.0, num_steps=10, generated=40, looked_up=310, hits=10, num_sequences=0)
    costs = replace(COSTS, step_s=0.01, row_s=0.01, token_s=0.001)
    costs = measured.scaled(costs, measured.slowness(costs, [work, work]))
    assert (costs.step_s, costs.row_s, costs.token_s) == pytest.approx((0.025, 0.025, 0.0025))


class HalfIdleServers:
    """Two verifiers. The first one has done more at each look; the second one never has work."""

    work = ((0, 0, 0), (10, 40, 300), (15, 45, 1200), (35, 205, 1200), (47, 275, 1700))

    def __init__(self) -> None:
        self._looks = 0
        self._are_over = asyncio.Event()

    async def figures(self) -> list[measured.VerifierReading]:
        steps, rows, tokens = self.work[min(self._looks, len(self.work) - 1)]
        self._looks += 1
        if self._looks >= len(self.work):
            self._are_over.set()
        cpu_s = 0.01 * steps + 0.002 * rows + 0.0003 * tokens
        return [
            measured.VerifierReading(float(self._looks), cpu_s, steps, rows, tokens, 0, 3),
            measured.VerifierReading(float(self._looks), 0.0, 0, 0, 0, 0, 0),
        ]

    async def serve(self, requests: object) -> None:
        await self._are_over.wait()
        await asyncio.sleep(0)


def test_costs_are_learned_while_some_verifiers_are_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "POLL_S", 0.0)
    costs = asyncio.run(measured.learn_costs(HalfIdleServers(), []))  # type: ignore[arg-type]
    assert (costs.step_s, costs.row_s, costs.token_s) == pytest.approx((0.01, 0.002, 0.0003))


def test_cores_are_those_of_busy_times_and_none_is_an_error() -> None:
    def sample(cpu_s: float, *, are_busy: bool) -> measured.BusySample:
        return measured.BusySample([measured.VerifierReading(2.0, cpu_s, 1, 1, 1, 0, 0)] * 2, are_busy)

    assert measured.cores_used([sample(1.5, are_busy=True), sample(0.1, are_busy=False)]) == 1.5
    with pytest.raises(SystemExit, match="more --requests"):
        measured.cores_used([sample(0.1, are_busy=False)])


@pytest.mark.slow
def test_real_verifiers_hit_as_often_as_the_simulator_says() -> None:
    """One request after the other: what hits while others are
    under way depends on how fast the machine is.
    """
    requests = measured.made(150, seed=2)
    costs = Costs(cache_tokens=measured.CACHE_TOKENS)
    apart = [replace(request, at_s=60.0 * number) for number, request in enumerate(requests)]

    async def serve(servers: measured.Deployment) -> list[measured.VerifierReading]:
        for request in requests:
            await servers.serve([replace(request, at_s=0.0)])
        return await servers.figures()

    with measured.deployment(2) as servers:
        fleet = ModelledFleet(costs, servers.addresses, measured.BLOCK_TOKENS, vocab_size=measured.VOCAB_SIZE)
        fleet.replay(apart)
        done = asyncio.run(serve(servers))
    simulated = [(verifier.counts.hit_tokens, verifier.counts.prompt_tokens) for verifier in fleet.verifiers]
    assert [(figures.hits, figures.looked_up) for figures in done] == simulated
    assert all(hits for hits, _ in simulated)
