"""``docker/install_torch.sh`` takes PyTorch from where there is a CPU build."""

from __future__ import annotations

import functools
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docker/install_torch.sh"
NOBODY = "http://127.0.0.1:9"


def call(index: str, folder: Path) -> str:
    """Return how the script calls pip."""
    done = subprocess.run(
        ["sh", str(SCRIPT), "echo", "pip", "install"],
        env={"TORCH_INDEX": index, "VIRTUAL_ENV": sys.prefix, "PATH": "/usr/bin:/bin"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("index", "wheels", "words"),
    [
        (NOBODY, ["torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl"], "--no-index --find-links docker/wheels torch"),
        (NOBODY, [], "torch==2.13.0"),
        ("", ["torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl"], "torch"),
    ],
    ids=["a wheel", "no wheel", "no index asked for"],
)
def test_a_wheel_is_taken_where_the_index_does_not_answer(
    index: str, wheels: list[str], words: str, tmp_path: Path
) -> None:
    """pip's own index may have a later version, which is the CUDA build, and a machine's folder ours."""
    (tmp_path / "docker/wheels").mkdir(parents=True)
    for wheel in wheels:
        (tmp_path / "docker/wheels" / wheel).touch()
    assert call(index, tmp_path) == f"pip install --no-deps {words}"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Serve an index of PyTorch's layout, and another one, from ``tmp_path``."""
    for index in ("whl/cpu", "other"):
        (tmp_path / index / "torch").mkdir(parents=True)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as found:
        threading.Thread(target=found.serve_forever).start()
        yield f"http://127.0.0.1:{found.server_port}"
        found.shutdown()


def test_pytorchs_own_index_must_have_the_files_whose_hashes_are_known(server: str, tmp_path: Path) -> None:
    index = f"{server}/whl/cpu"
    lock = f"--require-hashes --requirement {SCRIPT.parent}/locks/torch-cpu.txt"
    assert call(index, tmp_path) == f"pip install --no-deps --index-url {index} {lock}"
    index = f"{server}/other"
    assert call(index, tmp_path) == f"pip install --no-deps --index-url {index} torch"
