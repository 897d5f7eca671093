"""Samples of nvidia-smi."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu.utilization import first_visible, parse, sampled

FAKE = """#!/bin/sh
echo "$@" > "$0.arguments"
printf '0\\n80\\n100\\n'
touch "$0.sampled"
exec cat
"""


def test_a_line_with_a_number_is_a_sample() -> None:
    assert parse("50\n100\n") == [0.5, 1.0]
    assert parse("[N/A]\n 25\n") == [0.25]
    assert parse("") == []


def test_idle_is_the_share_without_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(FAKE)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    with sampled() as samples:
        # The first sample, of the time before, has been read: nvidia-smi no longer starts.
        assert (tmp_path / "nvidia-smi.arguments").exists()
        while not (tmp_path / "nvidia-smi.sampled").exists():
            pass
    assert samples.idle == pytest.approx(0.1)
    arguments = (tmp_path / "nvidia-smi.arguments").read_text().split()
    assert "--query-gpu=utilization.gpu" in arguments
    assert "--id=1" in arguments


@pytest.mark.parametrize(
    ("visible", "chosen"), [(None, "0"), ("", "0"), ("1", "1"), ("3,1", "3"), ("GPU-5f", "GPU-5f")]
)
def test_the_first_visible_gpu_is_sampled(visible: str | None, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert first_visible() == chosen


def test_without_nvidia_smi_it_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with sampled() as samples:
        pass
    assert samples.idle is None
