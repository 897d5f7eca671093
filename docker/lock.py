"""Write docker/locks/*.txt: every package of an installation at one version, with the hashes of all its files.

The first argument is uv's executable; `make locks` installs it. The locks hold for every Python and
platform that the project supports, and name no index. Run it at the repository's root.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from requirements import extra, requirements

FOLDER = Path("docker/locks")
NO_TORCH = {"torch", "numba", "llvmlite", "llguidance"}
HEADER = "# Written by `make locks` from pyproject.toml and constraints.txt.\n"
# PyTorch's CPU builds are in its own index only, under versions and hashes of their own, and some machines have
# another build still. So docker/install_torch.sh and the Makefile install them; what PyPI's CUDA build needs beyond
# them is left out.
TORCH = re.compile(r"(torch|nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+)==")
TRITON = re.compile(r"triton==")
# Packages that pyzmq needs with PyPy only, on which PyTorch does not run.
PYPY = re.compile(r"\S+ ; .*implementation_name == 'pypy'")
# The marker of all packages: see tool.uv in pyproject.toml.
EVERYWHERE = " ; python_full_version < '3.14' and sys_platform == 'linux' \\\n"


def compile_lock(uv: str, *source: str, text: str | None = None) -> list[str]:
    """Return one block of lines for each package that ``source`` needs."""
    command = [
        *(uv, "pip", "compile", "--quiet", "--universal", "--python-version", "3.11", "--generate-hashes"),
        *("--no-annotate", "--no-header", "--no-emit-index-url", "--no-emit-find-links"),
        *("--constraint", "constraints.txt", *source),
    ]
    found = subprocess.run(command, input=text, check=True, stdout=subprocess.PIPE, text=True).stdout
    blocks = re.split(r"\n(?=\S)", found.replace(EVERYWHERE, " \\\n").strip())
    return without(blocks, PYPY)


def write(name: str, blocks: list[str]) -> None:
    (FOLDER / f"{name}.txt").write_text(HEADER + "\n".join(blocks) + "\n")


def without(blocks: list[str], *patterns: re.Pattern[str]) -> list[str]:
    return [block for block in blocks if not any(pattern.match(block) for pattern in patterns)]


def main(uv: str) -> None:
    """Write all locks."""
    pyproject = Path("pyproject.toml")
    FOLDER.mkdir(exist_ok=True)
    # Images can send spans.
    gateway = [*requirements(pyproject, NO_TORCH), *extra(pyproject, "otlp")]
    write("gateway", compile_lock(uv, "-", text="\n".join(gateway)))
    engine = compile_lock(uv, "--extra", "kv-events", "--extra", "otlp", str(pyproject))
    write("engine", without(engine, TORCH, TRITON))
    write("gpu", compile_lock(uv, "--extra", "gpu", "--extra", "kv-events", "--extra", "otlp", str(pyproject)))
    # The tests interpret Triton kernels without a GPU.
    write("dev", without(compile_lock(uv, "--extra", "dev", str(pyproject), "-", text="editables\n"), TORCH))


if __name__ == "__main__":
    main(sys.argv[1])
