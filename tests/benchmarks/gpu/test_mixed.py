"""Batches of different requests: fields, verdict on a ragged step, and the command on a CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import mixed
from benchmarks.gpu.checkpoint import SHAPES, random_eagle3, random_target
from benchmarks.gpu.steps import StepsWorkload

ROOT = Path(__file__).parents[3]
WORKLOAD = StepsWorkload(8256, 5, 1, 10, 0.0)


def test_requests_of_a_batch_last_for_as_many_steps() -> None:
    ragged = mixed.ragged_cases(16, 48)[3]
    assert (ragged.name, ragged.against) == ("1 tree beside 15 plain", "16 plain")
    *others, tree = ragged.sequences(WORKLOAD, "x", 4.0, 10)
    assert len(others) == 15 and len({tuple(each.prompt_token_ids) for each in (*others, tree)}) == 16
    assert all(not each.speculation.enabled and each.sampling.max_tokens == 10 for each in others)
    assert tree.speculation.drafter == "eagle3" and tree.sampling.max_tokens == 40
    assert not tree.speculation.HasField("enabled")


def test_the_odd_ones() -> None:
    base, *cases = mixed.host_cases(16)
    assert base.odd is None and [case.against for case in cases] == [base.name] * 3
    batches = [case.sequences(WORKLOAD, "x", 4.0, 10) for case in cases]
    for *others, odd in batches:
        assert len(others) == 15 and odd.sampling.max_tokens == 40
        for each in others:
            assert each.speculation.drafter == "eagle3" and each.sampling.WhichOneof("grammar") is None
            assert not each.sampling.HasField("logprobs")
    by_grammar, by_ngram, by_logprobs = (batch[-1] for batch in batches)
    assert by_grammar.sampling.regex and by_grammar.speculation.drafter == "eagle3"
    assert by_ngram.speculation.drafter == "ngram"
    assert by_logprobs.sampling.logprobs == 5 and by_logprobs.speculation.drafter == "eagle3"


def row(case: mixed.Case, ms: float) -> dict[str, Any]:
    figures = {"num_steps": 9, "num_resident_steps": 7, "last_tokens_per_step": 4.0}
    return {"case": case.name, "against": case.against, "median_ms": ms} | figures


def test_the_ragged_step_is_judged_and_shown_beside_the_one_without() -> None:
    cases = mixed.ragged_cases(16, 48)
    rows = [row(case, ms) for case, ms in zip(cases, (4.5, 5.4, 6.0, 6.9), strict=True)]
    # 1.05 x 5.4 + 1.2 + 0.1 = 6.97
    is_reached, line = mixed.judge(rows, 16, 48, 1.2)
    assert is_reached and line.startswith("pass: 1 tree beside 15 plain: 6.900 ms, must be at most 6.970")
    is_reached, line = mixed.judge(rows, 16, 48, 1.1)
    assert not is_reached and line.startswith("FAIL: ")
    table = mixed.to_markdown(rows)
    assert "| 1 tree beside 15 plain | 6.900 | 4.500 | +2.400 | 7 of 9 | 4.00 |" in table
    assert "| 16 plain | 4.500 |  |  | 7 of 9 |" in table


def test_steps_that_came_at_once_are_no_step() -> None:
    assert mixed.mean_tokens([[(0.0, 1), (0.1, 2), (0.2, 4), (0.3, 5)]], 1) == 1.0
    assert mixed.mean_tokens([[(0.0, 1), (0.1, 5)], [(0.0, 1), (0.1, 3), (0.2, 12)]], 4) == 3.0
    assert mixed.mean_tokens([[(0.0, 1)]], 4) == 0.0


@pytest.mark.slow
def test_the_whole_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    random_target(tmp_path / "target", SHAPES["tiny"])
    random_eagle3(tmp_path / "eagle3", tmp_path / "target", draft_vocab_size=1000)
    words = ["--model", str(tmp_path / "target"), "--drafter-head", str(tmp_path / "eagle3"), "--threads", "1"]
    words += ["--output", str(tmp_path / "mixed.json"), "--batch", "2", "--plain-rows", "3"]
    words += ["--steps", "12", "--min-steps", "8", "--prompt-tokens", "20"]
    monkeypatch.setattr(sys, "argv", ["mixed", *words])
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'kernels'}")
    mixed.main()
    rows = {found["case"]: found for found in json.loads((tmp_path / "mixed.json").read_text())["rows"]}
    assert list(rows) == [case.name for case in (*mixed.ragged_cases(2, 3), *mixed.host_cases(2))]
    for name, found in rows.items():
        assert len(found["step_ms"]) >= 8 and found["num_steps"] > 0 and found["num_resident_steps"] == 0
        has_ngram, has_chains = "n-grams" in name, "chain" in name
        # A busy machine may have no time to draft for a short batch, but nobody drafts unasked.
        assert found["num_drafts"]["eagle3"] == 0 or "tree" in name or has_chains
        if has_chains:
            assert found["num_drafts"]["ngram"] == 0 or has_ngram
        # A busy machine has no time for a draft in some steps.
        assert found["last_tokens_per_step"] == 1 if name.endswith("2 plain") else found["last_tokens_per_step"] <= 4.2
    assert sum(found["num_drafts"]["eagle3"] for found in rows.values()) > 0
    assert "| 2 chains, 1 with logprobs |" in capsys.readouterr().out
