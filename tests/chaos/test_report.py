"""A run is good only if nothing is wrong: each fault is found in an otherwise good run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import pytest

from tests.chaos.killer import Blow
from tests.chaos.load import Tally, Timeline
from tests.chaos.report import TRACEBACK, Run, find_tracebacks, to_json, to_text
from tests.chaos.resources import PROCESSES, Holding, leaks
from tests.chaos.schedule import Process, Strike
from tests.chaos.watcher import Sample

SAMPLE = Sample(9.0, 5, 100, 100, 0, 0, 0, True, 2, 50, 40)
HOLDING = Holding(100 << 20, 20, 10)
HOLDINGS: dict[Process, Holding] = {name: HOLDING for name in PROCESSES}


def blow(process: Process, at: float) -> Blow:
    return Blow(Strike(process, "kill", 0.0), at, at + 0.1, at + 0.2, at + 0.3)


def good_run() -> Run:
    tally = Tally(num_tokens_compared=1000, timelines=[Timeline(0.0, 9.0, {0: (1.0, 2.75, 6.0)})])
    tally.by_kind["chat, whole"]["done"] = 3
    return Run(
        seconds=20,
        seed=1,
        num_requests=3,
        took_s=30.0,
        blows=[blow("verifier", 3.0), blow("drafter", 2.0), blow("gateway", 20.0)],
        num_scheduled={"verifier": 1, "drafter": 1, "gateway": 1},
        tally=tally,
        acceptance_before=(10, 5),
        acceptance=(100, 80),
        num_proofs=2,
        last_sample=SAMPLE,
        num_requests_at_end=0.0,
        holdings_before=dict(HOLDINGS),
        holdings=dict(HOLDINGS),
        tracebacks=(0, ""),
        device="cuda",
        steps=(500, 400),
        stop_s=1.0,
    )


def test_a_good_run_has_no_faults_and_says_so() -> None:
    run = good_run()
    assert run.faults(bars=True) == []
    text = to_text(run, [])
    assert "deaths: 1 verifier (1 scheduled), 1 drafter (1 scheduled), 1 gateway (1 scheduled)" in text
    assert "1000 tokens compared, of 3 distinct requests" in text
    assert "after a drafter's death          median 0.750 s" in text
    assert text.endswith("Nothing changed, lost, doubled or leaked.")
    value = json.loads(to_json(run, []))
    assert (value["deaths"]["verifier"], value["tokens_compared"], value["faults"]) == (1, 1000, [])


def not_replaced(run: Run) -> None:
    run.blows[0].replaced_at = None


def only_paused(run: Run) -> None:
    run.blows[1].strike = Strike("drafter", "pause", 0.0)


def server_error(run: Run) -> None:
    run.tally.num_server_errors = 1


def nothing_compared(run: Run) -> None:
    run.tally.num_tokens_compared = 0


def no_proof(run: Run) -> None:
    run.num_proofs = 0


def nothing_overlapped(run: Run) -> None:
    run.steps = (500, 0)


def stack_trace(run: Run) -> None:
    run.tracebacks = 2, "Traceback: a bug"


def leaked_block(run: Run) -> None:
    run.last_sample = dataclasses.replace(SAMPLE, num_free_blocks=99)


def running_sequence(run: Run) -> None:
    run.last_sample = dataclasses.replace(SAMPLE, num_running=1)


def no_verifier(run: Run) -> None:
    run.last_sample = None


def request_in_gateway(run: Run) -> None:
    run.num_requests_at_end = 1.0


def difference(run: Run) -> None:
    run.tally.failures.append("request 7: 1 difference")


def leak(run: Run) -> None:
    run.leaks.append("gateway: 90 descriptors")


def did_not_stop(run: Run) -> None:
    run.failures.append("processes are left")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (not_replaced, "0 deaths of the verifier, 1 scheduled"),
        (only_paused, "0 deaths of the drafter, 1 scheduled"),
        (server_error, "1 answers with a status of 500 or more"),
        (nothing_compared, "no token was compared"),
        (no_proof, "no draft was accepted"),
        (nothing_overlapped, "none of 500 steps overlapped"),
        (stack_trace, "2 stack traces in the log, first:\nTraceback: a bug"),
        (leaked_block, "at the end 1 blocks, 0 running"),
        (running_sequence, "1 running"),
        (no_verifier, "does not answer"),
        (request_in_gateway, "the gateway counts 1 requests"),
        (difference, "request 7: 1 difference"),
        (leak, "gateway: 90 descriptors"),
        (did_not_stop, "processes are left"),
    ],
)
def test_each_fault_fails_the_run(fault: Callable[[Run], None], said: str) -> None:
    run = good_run()
    fault(run)
    (found,) = run.faults(bars=False)
    assert said in found
    assert "FAILED, 1 faults" in to_text(run, [found])


def test_steps_need_not_overlap_on_a_cpu() -> None:
    run = good_run()
    nothing_overlapped(run)
    run.device = "cpu"
    assert run.faults(bars=True) == []


def test_stack_traces_are_found_in_a_log() -> None:
    assert find_tracebacks("ready\ndone\n") == (0, "")
    first, second = f"{TRACEBACK}:\n  one\n", f"{TRACEBACK}:\n  two\n"
    assert find_tracebacks("ready\n" + first + second) == (2, first + second)


def test_bars_are_judged_only_on_demand() -> None:
    run = good_run()
    run.tally.timelines = [Timeline(0.0, 99.0, {0: (1.0, 50.0)})]
    run.blows = [blow("verifier", 2.0), blow("gateway", 60.0)]
    run.num_scheduled["drafter"] = 0
    assert run.faults(bars=False) == []
    assert run.faults(bars=True) == ["next token after a verifier's death: median 48.00 s, bar 10 s"]


@pytest.mark.parametrize(
    ("name", "change", "num_leaks"),
    [
        ("gateway", {"num_descriptors": 24}, 0),
        ("gateway", {"num_descriptors": 25}, 1),
        ("gateway", {"num_threads": 15}, 1),
        ("gateway", {"rss_bytes": 164 << 20}, 0),
        ("gateway", {"rss_bytes": (164 << 20) + 1}, 1),
        ("supervisor", {"num_descriptors": 23}, 1),
        ("supervisor", {"num_threads": 14}, 0),
        ("supervisor", {"num_threads": 15}, 1),
        ("verifier", {"num_descriptors": 200, "rss_bytes": 1 << 40}, 0),
    ],
)
def test_leaks_have_bounds(name: Process, change: dict[str, int], num_leaks: int) -> None:
    now = {**HOLDINGS, name: dataclasses.replace(HOLDING, **change)}
    assert len(leaks(HOLDINGS, now)) == num_leaks
