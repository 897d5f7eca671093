"""A controller's log, replayed with the same code, gives the same decisions."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from benchmarks import replay_controller
from tests.support.synthetic_machine import H200_MS, Machine, Phase, drive
from verifier_svc.drafters.request import TreeBounds
from verifier_svc.speculation.controller import Controller
from verifier_svc.speculation.controller_log import Record, read, write_to
from verifier_svc.speculation.controller_replay import replay

MACHINE = Machine(H200_MS)
PHASES = [Phase(2.0, batch, (0.7, 0.6), 192) for batch in (1, 64, 3, 256)]


def logged() -> str:
    file = io.StringIO()
    controller = Controller(TreeBounds(16), MACHINE.verify_s, log=write_to(file))
    drive(MACHINE, controller, PHASES)
    # Reading figures in between changes nothing.
    controller.explain()
    return file.getvalue()


def test_the_same_decisions() -> None:
    decisions = list(replay(read(io.StringIO(logged()))))
    assert len(decisions) > 500
    assert len({decision.logged for decision in decisions}) > 2
    assert all(decision.replayed == decision.logged for decision in decisions)


def test_other_inputs_give_other_decisions() -> None:
    def without_matches(record: Record) -> Record:
        return (*record[:4], 0, *record[5:]) if record[0] == "walks" else record

    decisions = list(replay(map(without_matches, read(io.StringIO(logged())))))
    assert any(decision.replayed != decision.logged for decision in decisions)


@pytest.mark.parametrize("records", [[], [("choose", 1, 1, 1, 1)], [("bounds", 8, 0, 4, 0.06), ("surprise", 1)]])
def test_what_is_no_log_is_refused(records: list[Record]) -> None:
    with pytest.raises(ValueError, match=r"bounds|surprise"):
        list(replay(records))


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    log.write_text(logged())
    monkeypatch.setattr(sys, "argv", ["replay_controller", str(log)])
    assert replay_controller.main() == 0
    assert "first_steps" in capsys.readouterr().out
    lines = log.read_text().splitlines()
    number = next(n for n, line in enumerate(lines) if line.startswith('["choose"'))
    lines[number] = json.dumps(["choose", 1, 9, 8, 7])
    log.write_text("\n".join(lines))
    assert replay_controller.main() == 1
