"""Faults in the middle of streams: the figures, the table, and the command on a CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import recovery
from benchmarks.gpu.checkpoint import DEMO
from benchmarks.gpu.disturbed import ARRIVALS_BEFORE, Course, Strike, is_restored
from benchmarks.gpu.faults import FAIL_ASSERTION, FAULTS, WRITE_ASTRAY, with_hooks
from benchmarks.gpu.pauses import FaultPauses, longest_pause, pauses_after
from benchmarks.gpu.watch import Return, Sighting, drafters_return
from benchmarks.stack import StackError
from foretoken.bench.completion import Chunk, Recording, StreamedCompletion

ROOT = Path(__file__).parents[3]
OLD, NEW = (7, 1), (7, 2)


def test_a_pause_begins_with_the_fault_or_with_the_last_token_after_it() -> None:
    # In flight at 2.5: 3 still arrives, then nothing before 7.
    assert pauses_after([[1, 2, 3, 7, 8]], 2.5) == FaultPauses(next_token=0.5, longest=4, longest_began=0.5)
    # Waits before the fault do not count.
    assert pauses_after([[0, 9, 9.5]], 8) == FaultPauses(1, 1, 0)


def test_of_several_streams_the_one_that_waits_longest_counts() -> None:
    assert pauses_after([[1, 3, 4], [1, 2.5, 5]], 2) == FaultPauses(next_token=1, longest=2.5, longest_began=0.5)


def test_a_stream_that_came_later_may_have_the_longest_pause_but_not_the_next_token() -> None:
    assert pauses_after([[1, 2, 3], [4, 10, 11]], 1.5) == FaultPauses(next_token=0.5, longest=6, longest_began=2.5)


def test_a_fault_that_no_stream_met() -> None:
    with pytest.raises(ValueError, match="no stream ran"):
        pauses_after([[1, 2], [3, 4]], 2.5)


def test_the_longest_pause_of_all() -> None:
    assert longest_pause([[1, 2, 5], [0, 1]]) == 3
    assert longest_pause([[1]]) == 0


def test_the_drafter_is_back_with_another_attachment() -> None:
    """The old attachment shows for a while after the fault; then there is none."""
    seen = [
        Sighting(1, OLD, 10, 20),
        Sighting(2),
        Sighting(3, NEW, 12, 20),
        Sighting(4, NEW, 12, 20),
        Sighting(5, NEW, 13, 20),
        Sighting(6, NEW, 14, 22),
        Sighting(7, NEW, 15, 25),
    ]
    assert drafters_return(seen, OLD) == Return(attached_at=3, drafted_at=5, accepted_at=6)
    assert drafters_return(seen[:2], OLD) == Return()
    assert drafters_return(seen[:4], OLD) == Return(attached_at=3)


def test_a_fault_that_ends_no_attachment() -> None:
    seen = [Sighting(1), Sighting(2, OLD, 10, 20), Sighting(3, OLD, 11, 20)]
    assert drafters_return(seen, None) == Return(attached_at=2, drafted_at=3)


def test_a_new_verifier_counts_from_nothing() -> None:
    """An attachment that was lost again does not count as a return."""
    seen = [Sighting(1, NEW, 50, 50), Sighting(2, NEW, 51, 50), Sighting(3, (8, 1), 0, 0), Sighting(4, (8, 1), 2, 3)]
    assert drafters_return(seen, OLD) == Return(attached_at=3, drafted_at=4, accepted_at=4)


class Process:
    """A process that notes the signals that it is sent."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def send_signal(self, number: int) -> None:
        self.numbers.append(number)


def fault(name: str) -> Any:
    return next(fault for fault in FAULTS if fault.name == name)


def test_a_fault_comes_when_every_stream_has_enough() -> None:
    process = Process()
    strike = Strike(fault("killed while awaited"), process)  # type: ignore[arg-type]
    streams = [Recording(0.0, times=[0.0] * ARRIVALS_BEFORE), Recording(0.0, times=[0.0] * (ARRIVALS_BEFORE - 1))]
    strike(streams)
    assert not strike.is_done() and process.numbers == []
    streams[1].times.append(0.0)
    strike(streams)
    strike(streams)
    assert process.numbers == [signal.SIGSTOP] and strike.at is not None
    while not strike.is_done():
        pass
    assert process.numbers == [signal.SIGSTOP, signal.SIGKILL]


def test_which_faults_need_a_settled_process() -> None:
    assert {each.name for each in FAULTS if not each.ends_at_once} == {"stopped for a moment", "stopped"}
    assert [each.name for each in FAULTS if not each.said] == ["stopped for a moment"]


def test_all_is_well_when_every_process_that_ended_is_ready_again() -> None:
    ended = "foretoken: drafter eagle3 ended (status 80: its GPU context is lost); starting it again"
    taken = "foretoken: verifier was ended: it lost its GPU context together with drafter eagle3; starting it again"
    ready = [f"foretoken: {name} is ready again after 6.5 s" for name in ("drafter eagle3", "verifier")]
    illegal = fault("illegal address")
    assert is_restored(illegal, [ended, ready[0]])
    assert not is_restored(illegal, [ended, taken, ready[0]])
    assert is_restored(illegal, [ended, taken, *ready])
    assert is_restored(fault("stopped for a moment"), [])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        # The signal's own effect, where no hook is loaded.
        ("assertion", ["foretoken: drafter eagle3 ended (SIGUSR1); starting it again"]),
        ("killed", []),
        ("stopped for a moment", ["foretoken: drafter eagle3 did not answer for 5.1 s; starting it again"]),
    ],
)
def test_another_end_than_the_faults_is_an_error(name: str, said: list[str]) -> None:
    with pytest.raises(StackError, match=f"{name}: that is not what happened"):
        is_restored(fault(name), said)


@pytest.mark.parametrize("word", ["drafter", "verifier"])
def test_only_a_drafter_faults_at_a_signal(word: str) -> None:
    code = f"import signal; print([callable(signal.getsignal(n)) for n in ({FAIL_ASSERTION:d}, {WRITE_ASTRAY:d})])"
    # With a service's arguments, and modules on its own path are still found.
    environment = with_hooks({**os.environ, "PYTHONPATH": str(ROOT)})
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"import foretoken; {code}", word],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    # SIG_DFL is no function.
    assert done.stdout.split("\n")[0] == str([word == "drafter"] * 2)


def completion(sent_at: float, times: list[float], text: str = "a") -> StreamedCompletion:
    chunks = tuple(Chunk(at, text, None) for at in times)
    return StreamedCompletion(sent_at, chunks, (), 3, 0, len(times), "length", {"num_resumes": 1})


def test_the_figures_of_one_fault() -> None:
    rounds = [[completion(9.0, [9.5, 10.5, 13.0, 13.5])], [completion(14.0, [14.25, 14.5])]]
    course = Course(rounds, 10.0, Return(12.0, 12.5, None), 14.0, ["verifier"], ["foretoken: a line"])
    found = recovery.figures(course)
    assert found == {
        "next_token_ms": 500,
        "longest_pause_ms": 2500,
        "longest_pause_began_ms": 500,
        "longest_first_token_ms": 250,
        "attached_s": 2.0,
        "drafted_s": 2.5,
        "accepted_s": None,
        "well_s": 4.0,
        "restarted": ["verifier"],
        "num_resumes": 1,
        "num_texts": 2,
        "said": ["foretoken: a line"],
    }


def row(repeat: int, **fields: Any) -> dict[str, Any]:
    found = {"mps": "on", "fault": "killed", "batch": 1, "repeat": repeat, "restarted": ["drafter"], "num_texts": 4}
    found |= {"next_token_ms": 10.0, "longest_pause_ms": 20.0, "undisturbed_pause_ms": 7.0, "attached_s": 1.0}
    found |= {"drafted_s": 1.25, "accepted_s": None, "well_s": 1.5, "num_undisturbed_texts": 2}
    return found | {"num_other_texts": 0, "num_other_undisturbed_texts": 0} | fields


def test_the_table_has_the_median_and_the_worst() -> None:
    rows = [row(0), row(1, well_s=3.0, num_other_texts=1), row(2, well_s=2.0, restarted=["drafter", "verifier"])]
    alone = row(0, mps="off", restarted=[], accepted_s=1.26)
    del alone["num_other_texts"], alone["num_other_undisturbed_texts"]
    first, second = recovery.summarize([*rows, alone])
    assert first["well_s"] == {"median": 2.0, "worst": 3.0} and first["accepted_s"] is None
    assert (first["num_other_texts"], first["num_texts"], first["num_repeats"]) == (1, 12, 3)
    header, rule, *lines = recovery.to_markdown([first, second]).splitlines()
    assert {text.count("|") for text in (header, rule, *lines)} == {header.count("|")}
    assert lines == [
        "| on | killed | 1 | 10.0 / 10.0 | 20.0 / 20.0 | 1.00 / 1.00 | 1.25 / 1.25 | - | 2.00 / 3.00 | 7.0 / 7.0 "
        "| drafter, verifier | 1 of 12 | 0 of 6 |",
        "| off | killed | 1 | 10.0 | 20.0 | 1.00 | 1.25 | 1.26 | 1.50 | 7.0 | none | - | - |",
    ]


def test_a_processor_has_no_faults_of_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    paths = ["--model", "a", "--drafter-head", "b", "--output", "c"]
    assert recovery.parser(True).parse_args(paths).faults == [each.name for each in FAULTS]
    assert "assertion" not in recovery.parser(False).parse_args(paths).faults
    for words in (["--faults", "assertion"], ["--mps", "on"]):
        with pytest.raises(SystemExit):
            recovery.parser(False).parse_args([*paths, *words])
        assert "invalid choice" in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The drafter dies while the verifier may wait for it: same text, accepted drafts again."""
    words = ["--model", str(DEMO / "target"), "--drafter-head", str(DEMO / "eagle3")]
    words += ["--output", str(tmp_path / "recovery.json"), "--tree", "3", "2", "6", "--threads", "1"]
    words += ["--faults", "killed while awaited", "--repeats", "1", "--batches", "2", "--output-tokens", "600"]
    words += ["--mps", "off", "--serve-flags", "--device cpu"]
    monkeypatch.setattr(sys, "argv", ["recovery", *words])
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'kernels'}")
    with pytest.raises(SystemExit, match="0"):
        recovery.main()
    result = json.loads((tmp_path / "recovery.json").read_text())
    assert result["servers"]["off"]["mode"] == "strict" and result["failures"] == []
    (found,) = result["rows"]
    assert (found["fault"], found["batch"], found["restarted"]) == ("killed while awaited", 2, ["drafter"])
    assert found["num_other_texts"] == found["num_other_undisturbed_texts"] == 0
    assert found["num_texts"] >= 2 and found["num_resumes"] == 0
    assert 0 < found["attached_s"] <= min(found["drafted_s"], found["accepted_s"])
    assert max(found["drafted_s"], found["accepted_s"]) <= found["well_s"]
    assert 0 < found["next_token_ms"] <= found["longest_pause_ms"]
    first, second = found["said"]
    assert "drafter eagle3 ended (SIGKILL)" in first and "drafter eagle3 is ready again" in second
    assert first in (tmp_path / "recovery.mps-off.log").read_text()
    assert "| off | killed while awaited | 2 |" in capsys.readouterr().out
