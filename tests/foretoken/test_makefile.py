"""The Makefile's decisions, with an interpreter that only records what it was asked to do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A suitable Python: it makes "virtual environments" of copies of itself and notes other calls.
PYTHON = """#!/bin/sh
case "$*" in
  "--version") echo "Python 3.12.0"; exit 0 ;;
  "-m venv "*)
    mkdir -p "$3/bin"
    for name in python foretoken ruff mypy lint-imports; do cp "$0" "$3/bin/$name"; done
    exit 0 ;;
  *sys.version_info*) exit "${TOO_OLD:-0}" ;;
  *ensurepip*) exit "${NO_VENV:-0}" ;;
  *urllib*) echo "probe" >> "$CALLS"; exit "${NO_INDEX:-0}" ;;
esac
echo "$(basename "$0") $*" >> "$CALLS"
"""
DEMO = "foretoken serve demo"
INDEX = "https://download.pytorch.org/whl/cpu"
DRIVER = Path("/proc/driver/nvidia/version")


@dataclass
class Checkout:
    """A folder with the Makefile and the files that its rules depend on."""

    folder: Path

    def make(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        # A make that runs the tests hands on its flags, and its variables by their names.
        variables = re.findall(r"\$\(([A-Z_]+)\)", (self.folder / "Makefile").read_text())
        left_out = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", *variables}
        inherited = {key: value for key, value in os.environ.items() if key not in left_out}
        inherited |= {"PATH": f"{self.folder / 'bin'}:/usr/bin:/bin", "CALLS": str(self.folder / "calls")}
        return subprocess.run(
            ["make", *arguments], cwd=self.folder, env=inherited | environment, capture_output=True, text=True
        )

    def calls(self) -> list[str]:
        """Return the calls since the last time."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines

    def torch_call(self) -> str:
        (call,) = [line for line in self.calls() if line.endswith(" torch")]
        return call


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    (tmp_path / "bin").mkdir()
    (tmp_path / "protos").mkdir()
    (tmp_path / "protos" / "common_pb2_grpc.py").touch()
    executable(tmp_path / "bin" / "python3", PYTHON)
    (tmp_path / "tests" / "installed").mkdir(parents=True)
    executable(tmp_path / "tests" / "installed" / "lowest.sh", '#!/bin/sh\necho "lowest.sh $*" >> "$CALLS"\n')
    # Without a driver, whatever this machine has.
    executable(tmp_path / "bin" / "nvidia-smi", "#!/bin/sh\nexit 9\n")
    return Checkout(tmp_path)


def executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def test_serve_sets_up_once_and_then_uses_no_installer(checkout: Checkout) -> None:
    first = checkout.make("serve")
    assert first.returncode == 0, first.stderr
    calls = checkout.calls()
    assert calls[-1] == f"{DEMO} --port 8000 --grpc-port 50051"
    assert any("pip install" in call and call.endswith("--editable .") for call in calls)
    assert not any("[dev]" in call for call in calls)
    assert checkout.make("serve").returncode == 0
    assert checkout.calls() == [calls[-1]]


def test_ports_come_from_the_environment_or_the_command_line(checkout: Checkout) -> None:
    checkout.make("serve", "PORT=9000", "GRPC_PORT=9001")
    assert checkout.calls()[-1] == f"{DEMO} --port 9000 --grpc-port 9001"
    checkout.make("serve", PORT="9002", GRPC_PORT="9003")
    assert checkout.calls()[-1] == f"{DEMO} --port 9002 --grpc-port 9003"


def test_a_model_and_more_flags(checkout: Checkout) -> None:
    for arguments in ("--speculative-algorithm NONE", "--drafter name=mine,algorithm=NGRAM"):
        checkout.make("serve", f"ARGS={arguments}")
        assert checkout.calls()[-1] == f"{DEMO} --port 8000 --grpc-port 50051 {arguments}"
    checkout.make("serve", "MODEL=org/model", "ARGS=--threads 2")
    assert checkout.calls()[-1] == "foretoken serve org/model --port 8000 --grpc-port 50051 --threads 2"


@pytest.mark.parametrize(
    ("target", "tool"),
    [
        ("test", "python -m pytest --numprocesses"),
        ("test-all", "python -m pytest --numprocesses"),
        ("test-compose", "python -m pytest --compose"),
        ("bench", "python -m benchmarks.run"),
        ("bench-load", "python -m benchmarks.served_load"),
        ("bench-gpu-check", "python -m benchmarks.gpu.check"),
        ("bench-serving-check", "python -m benchmarks.gpu.serving_check"),
        ("chaos", "python -m tests.chaos --seconds 60 --seed 1"),
        ("format", "ruff format ."),
        ("lint", "ruff check ."),
        ("test-lowest", "lowest.sh"),
    ],
)
def test_every_target_sets_up_what_it_needs(checkout: Checkout, target: str, tool: str) -> None:
    checkout.make(target)
    calls = checkout.calls()
    installed = next(index for index, call in enumerate(calls) if call.endswith("--editable .[dev]"))
    used = next(index for index, call in enumerate(calls) if call.startswith(tool))
    assert installed < used


def test_stubs_come_from_a_generator_of_their_own(checkout: Checkout) -> None:
    checkout.make("proto")
    calls = checkout.calls()
    installed = next(index for index, call in enumerate(calls) if re.search(r"--target \S+ grpcio-tools==1\.", call))
    used = next(index for index, call in enumerate(calls) if call.startswith("python -m grpc_tools.protoc"))
    assert installed < used


def test_tests_are_quick_ones_all_or_those_that_are_named(checkout: Checkout) -> None:
    parallel = "python -m pytest --numprocesses 3 --dist loadfile"
    for arguments, call in (
        (["test"], f"{parallel} -m not slow"),
        (["test", "ARGS=tests/gateway -x"], "python -m pytest tests/gateway -x"),
        (["test-all"], parallel),
        (["test-all", "ARGS=-x"], f"{parallel} -x"),
    ):
        checkout.make(*arguments, "WORKERS=3")
        # make leaves no space after the last word.
        assert checkout.calls()[-1].rstrip() == call


def test_new_constraints_are_installed(checkout: Checkout) -> None:
    checkout.make("serve")
    checkout.calls()
    stamp = (checkout.folder / ".venv" / ".core").stat().st_mtime
    os.utime(checkout.folder / "constraints.txt", (stamp + 1, stamp + 1))
    checkout.make("serve")
    assert any("--constraint constraints.txt" in call for call in checkout.calls())


@pytest.mark.skipif(DRIVER.exists(), reason="an NVIDIA driver is here")
def test_without_a_driver_torch_comes_from_its_own_index(checkout: Checkout) -> None:
    checkout.make("serve")
    assert f"--no-deps --index-url {INDEX} torch" in checkout.torch_call()


@pytest.mark.skipif(DRIVER.exists(), reason="an NVIDIA driver is here")
def test_an_index_that_does_not_answer_is_left_out_with_a_word(checkout: Checkout) -> None:
    result = checkout.make("serve", NO_INDEX="1")
    assert f"{INDEX} does not answer" in result.stdout
    assert "--index-url" not in checkout.torch_call()


def test_an_empty_index_means_pips_own(checkout: Checkout) -> None:
    checkout.make("serve", "TORCH_INDEX=")
    calls = checkout.calls()
    assert "probe" not in calls
    assert not any("--index-url" in call for call in calls)


@pytest.mark.parametrize("driver", [True, False])
def test_an_index_that_is_given_is_taken_as_it_is(checkout: Checkout, driver: bool) -> None:
    """An index given by the user, say of an older CUDA, is never replaced by another."""
    executable(checkout.folder / "bin" / "nvidia-smi", f"#!/bin/sh\nexit {0 if driver else 9}\n")
    index = INDEX.replace("cpu", "cu126")
    checkout.make("serve", f"TORCH_INDEX={index}", NO_INDEX="1")
    assert f"--no-deps --index-url {index} torch" in checkout.torch_call()
    shutil.rmtree(checkout.folder / ".venv")
    checkout.make("serve", TORCH_INDEX=index, NO_INDEX="1")
    assert f"--no-deps --index-url {index} torch" in checkout.torch_call()


def test_with_a_driver_torch_comes_from_pips_own_index(checkout: Checkout) -> None:
    executable(checkout.folder / "bin" / "nvidia-smi", "#!/bin/sh\n")
    checkout.make("serve")
    assert "--index-url" not in checkout.torch_call()


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (
            ("PYTHON=python3",),
            {"TOO_OLD": "1"},
            "foretoken: needs Python 3.11, 3.12 or 3.13; install one, or name it: make",
        ),
        (("PYTHON=/nowhere/python",), {}, "foretoken: needs Python 3.11, 3.12 or 3.13; install one, or name it: make"),
        (("PYTHON=python3",), {"NO_VENV": "1"}, "foretoken: python3 has no venv module; install it (Debian, Ubuntu:"),
    ],
)
def test_an_unsuitable_python_is_one_line_that_says_what_to_do(
    checkout: Checkout, arguments: tuple[str, ...], environment: dict[str, str], message: str
) -> None:
    result = checkout.make("serve", *arguments, **environment)
    assert result.returncode != 0
    ours = [line for line in result.stderr.splitlines() if not line.startswith("make")]
    assert len(ours) == 1
    assert ours[0].startswith(message)
    assert not (checkout.folder / ".venv").exists()


def test_help_names_every_target(checkout: Checkout) -> None:
    text = checkout.make().stdout
    for target in (
        "serve",
        "test",
        "test-all",
        "test-compose",
        "bench",
        "bench-load",
        "bench-gpu-check",
        "bench-serving-check",
        "chaos",
        "lint",
        "format",
        "proto",
        "setup",
        "clean",
        "help",
    ):
        assert f"make {target}" in text
    assert checkout.calls() == []


def test_locked_installs_only_what_has_a_known_hash(checkout: Checkout) -> None:
    (checkout.folder / "docker" / "locks").mkdir(parents=True)
    for name in ("dev.txt", "torch-cpu.txt"):
        (checkout.folder / "docker" / "locks" / name).touch()
    assert checkout.make("test", "LOCKED=1", "ARGS=x").returncode == 0
    installs = [call for call in checkout.calls() if "pip install" in call]
    assert sum("--require-hashes --no-deps --requirement docker/locks/dev.txt" in call for call in installs) == 1
    torch = f"--no-deps --index-url {INDEX} --require-hashes --requirement docker/locks/torch-cpu.txt"
    assert sum(call.endswith(torch) for call in installs) == 1
    # foretoken itself has no hash.
    assert all("--no-deps" in call for call in installs)


def test_locks_are_written_by_uv(checkout: Checkout) -> None:
    assert checkout.make("locks").returncode == 0
    *_, install, write = checkout.calls()
    assert re.search(r"pip install .*--target .venv/.uv-[\d.]+ uv==[\d.]+$", install)
    assert re.fullmatch(r"python docker/lock.py .venv/.uv-[\d.]+/bin/uv", write)
