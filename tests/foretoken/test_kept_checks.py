"""The file of row checks that passed."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from foretoken_kernels.cpu import compile as compiler

from foretoken.models import kept_checks
from foretoken.models.kept_checks import FILE_NAME, KeptCheck, checks_file, machine_facts


def test_a_check_counts_for_its_own_facts_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / FILE_NAME
    check = KeptCheck(path, {"checkpoint": "a", "threads": "1"})
    assert check.passed_at() is None
    check.keep()
    assert check.passed_at() is not None
    assert KeptCheck(path, {"threads": "1", "checkpoint": "a"}).passed_at() == check.passed_at()
    for facts in ({"checkpoint": "a"}, {"checkpoint": "a", "threads": "2"}, {"checkpoint": "b", "threads": "1"}):
        assert KeptCheck(path, facts).passed_at() is None
    other = KeptCheck(path, {"checkpoint": "b"})
    other.keep()
    check.forget()
    assert check.passed_at() is None and other.passed_at() is not None
    assert [file.name for file in path.parent.iterdir()] == [FILE_NAME]


@pytest.mark.parametrize("content", ["", "{", "[]", '"x"', '{"key": 5}', "\x00"])
def test_a_damaged_file_holds_nothing_and_is_written_again(tmp_path: Path, content: str) -> None:
    path = tmp_path / FILE_NAME
    path.write_text(content)
    check = KeptCheck(path, {})
    assert check.passed_at() is None
    check.forget()
    check.keep()
    assert check.passed_at() is not None


def test_a_file_that_cannot_be_written_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no folder")
    check = KeptCheck(tmp_path / "file" / FILE_NAME, {})
    with caplog.at_level(logging.INFO):
        check.keep()
    assert check.passed_at() is None and "the next start checks numerics again" in caplog.text


def test_the_oldest_checks_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_checks, "MOST_KEPT", 3)
    path = tmp_path / FILE_NAME
    path.write_text(json.dumps({name: f"2026-01-0{day}T00:00:00+00:00" for day, name in enumerate("dcba", start=1)}))
    KeptCheck(path, {}).keep()
    kept = json.loads(path.read_text())
    assert len(kept) == 3 and {"a", "b"} < kept.keys()


def test_facts_change_with_sources_and_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "package"
    (folder / "inner").mkdir(parents=True)
    source = folder / "inner" / "module.py"
    source.write_text("a = 1\n")
    seen = [machine_facts([folder])]
    assert machine_facts([folder]) == seen[0] and all(seen[0].values())

    def changes(name: str) -> None:
        facts = machine_facts([folder])
        assert {key for key in facts if facts[key] != seen[-1][key]} == {name}
        seen.append(facts)

    source.write_text("a = 2\n")
    changes("sources")
    source.rename(folder / "module.py")
    changes("sources")
    monkeypatch.setattr("torch.__version__", "0.1")
    changes("torch")
    monkeypatch.setattr("numpy.__version__", "0.1")
    changes("numpy")
    monkeypatch.setattr("torch.__config__.parallel_info", lambda: "OMP_NUM_THREADS : 7")
    changes("threads")
    monkeypatch.setattr("numba.config.CPU_NAME", "generic")
    changes("numba")
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_name", lambda: "another")
    changes("host")
    monkeypatch.setattr(kept_checks, "_cpu", lambda: "another")
    changes("cpu")


def test_the_file_lies_beside_compiled_kernels_or_in_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "cache_folder", lambda: Path("/var/cache/x"))
    assert checks_file() == Path("/var/cache/x", FILE_NAME)
    monkeypatch.setattr(compiler, "cache_folder", lambda: None)
    monkeypatch.setenv("HOME", "/home/me")
    assert checks_file() == Path("/home/me/.cache/foretoken", FILE_NAME)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert checks_file() is None
