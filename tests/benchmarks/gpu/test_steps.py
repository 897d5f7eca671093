"""The whole command on a CPU: tiny random checkpoints through the real services."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import check, steps
from benchmarks.gpu.bars import SETTINGS
from benchmarks.gpu.checkpoint import SHAPES, random_eagle3, random_target
from benchmarks.gpu.floor import step_bytes

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    random_target(folder / "target", SHAPES["tiny"])
    random_eagle3(folder / "eagle3", folder / "target", draft_vocab_size=1000)
    return folder


@pytest.mark.slow
def test_every_path_is_measured(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(folder / "target"), "--drafter-head", str(folder / "eagle3"), "--output", str(tmp_path)]
    words += ["--settings", "plain", "tree 5-8-32", "--batches", "1", "--threads", "1"]
    words += ["--output-tokens", "48", "--prompt-tokens", "20", "--min-steps", "12", "--numerics", "strict"]
    monkeypatch.setattr(sys, "argv", ["steps", *words])
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'kernels'}")
    steps.main()
    (file,) = tmp_path.glob("*.json")
    assert file.with_suffix(".png").exists()
    result = check.load(file)
    rows = {(row["setting"], row["path"]): row for row in result["rows"]}
    assert set(rows) == {
        ("plain", "processes"),
        ("plain", "gateway"),
        ("tree 5-8-32", "processes"),
        ("tree 5-8-32", "gateway"),
        ("tree 5-8-32", "in-process"),
    }
    for (setting, path), row in rows.items():
        assert len(row["step_ms"]) >= 12 and min(row["step_ms"]) > 0
        assert row["mode"] == result["numerics"] == "strict" and row["commit"] == result["commit"]
        assert row["phases_ms"]["forward"] > 0
        # A busy machine has no time for a draft in some steps.
        assert row["tokens_per_step"] == 1 if setting == "plain" else 1 < row["tokens_per_step"] <= 4.2
        transport = "in-process" if path == "in-process" else "shared-memory"
        assert row["drafters"] == ({} if setting == "plain" else {"eagle3": transport})
    assert "| tree 5-8-32 | 1 | in-process |" in capsys.readouterr().out
    reasons = "\n".join(check.refusals(result, lambda commit: True))
    assert "missing row: chain 3-1-4" in reasons and "the bars are for hidden_size 4096, this is 128" in reasons


def test_nothing_to_measure_is_a_failure(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--model", str(folder / "target"), "--drafter-head", str(folder / "eagle3"), "--output", str(tmp_path)]
    words += ["--settings", "plain", "--paths", "in-process"]
    monkeypatch.setattr(sys, "argv", ["steps", *words])
    with pytest.raises(SystemExit, match="no row has these settings"):
        steps.main()
    assert not list(tmp_path.iterdir())


def test_element_types_are_compared_row_by_row() -> None:
    def result(dtype: str, *medians: float) -> dict[str, Any]:
        return {
            "rows": [
                {"setting": "plain", "batch": batch, "path": "processes", "dtype": dtype, "median_ms": ms}
                for batch, ms in zip((1, 16), medians, strict=True)
            ]
        }

    table, missed = steps.compare([result("bfloat16", 4.0, 5.0), result("float16", 4.08, 5.11)])
    assert "| plain | 1 | processes | 4.000 | bfloat16 | 4.080 | float16 | 1.020 |" in table
    assert missed == ["('plain', 16, 'processes'): float16 takes 1.022 of bfloat16's time"]
    assert steps.parser().parse_args(["--model", "m", "--drafter-head", "h", "--output", "o"]).dtype == ["auto"]


def test_flags_of_the_settings(tmp_path: Path) -> None:
    plain, _, _, tree, *_ = SETTINGS
    assert steps.serve_flags(plain, tmp_path, in_process=False, batch=4)[-2:] == ["--speculative-algorithm", "NONE"]
    flags = " ".join(steps.serve_flags(tree, tmp_path, in_process=True, batch=4))
    assert "--speculative-num-steps 5 --speculative-eagle-topk 8 --speculative-num-draft-tokens 32" in flags
    assert "--drafter-placement in-process" in flags and flags.endswith("--simulate-accept-length 4")


def test_bytes_of_a_step(folder: Path) -> None:
    """The bytes of the tiny shape, by hand: bfloat16 is two bytes."""
    found = step_bytes(folder / "target", folder / "eagle3")
    layer = 128 * (4 + 2 * 2) * 32 + 128 * 128 + 3 * 128 * 384 + 2 * 128
    assert found.target == 2 * (12 * layer + 8256 * 128 + 128)
    assert found.head_once == 2 * 128 * 3 * 128
    head_layer = 2 * 128 * (4 + 2 * 2) * 32 + 128 * 128 + 3 * 128 * 384 + 3 * 128
    assert found.head_level == 2 * (head_layer + 1000 * 128 + 128)
    assert found.cache_per_token == 2 * 2 * 12 * 2 * 32
    assert found.of_step(0, 4, 10) == found.target + 40 * found.cache_per_token
    assert found.of_step(5, 1, 0) == found.target + found.head_once + 5 * found.head_level


def test_prompts_differ_by_round_and_are_the_same_in_every_run(folder: Path) -> None:
    vocab_size = json.loads((folder / "target" / "config.json").read_text())["vocab_size"]
    workload = steps.StepsWorkload(vocab_size, 20, 48, 12, 0.0)
    first, again, other = (workload.prompts(3, seed) for seed in ("a", "a", "b"))
    assert first == again != other
    assert {len(prompt) for prompt in first} == {20} and len({tuple(prompt) for prompt in first}) == 3
    assert all(16 <= token < vocab_size for prompt in first for token in prompt)
