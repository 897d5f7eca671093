"""Write docker/locks/*.txt: every package of an installation at one
version, with the hashes of all its files.

docs/site/requirements.txt, what builds the site, is such a file too. The first argument is uv's
executable; `make locks` installs it. The locks hold for every Python and platform that the project
supports, and name no index. Run it at the repository's root.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from requirements import extra, requirements

FOLDER = Path("docker/locks")
SITE = Path("docs/site/requirements.txt")
NO_TORCH = {"torch", "numba", "llvmlite", "llguidance"}
HEADER = "# Written by `make locks` from pyproject.toml and constraints.txt.\n"
# PyTorch's CPU builds are in its own index only, under versions and hashes of their own
# (docker/locks/torch-cpu.txt, by hand), and some machines have another build still. So
# docker/install_torch.sh and the Makefile install them; what PyPI's CUDA build needs beyond them is
# left out.
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


def write(file: Path, blocks: list[str]) -> None:
    file.write_text(HEADER + "\n".join(blocks) + "\n")


def without(blocks: list[str], *patterns: re.Pattern[str]) -> list[str]:
    return [block for block in blocks if not any(pattern.match(block) for pattern in patterns)]


def main(uv: str) -> None:
    """Write all locks."""
    pyproject = Path("pyproject.toml")
    FOLDER.mkdir(exist_ok=True)
    # Images can send spans.
    gateway = [*requirements(pyproject, NO_TORCH), *extra(pyproject, "otlp")]
    write(FOLDER / "gateway.txt", compile_lock(uv, "-", text="\n".join(gateway)))
    engine = compile_lock(uv, "--extra", "kv-events", "--extra", "otlp", str(pyproject))
    write(FOLDER / "engine.txt", without(engine, TORCH, TRITON))
    gpu = ("--extra", "gpu", "--extra", "kv-events", "--extra", "otlp")
    write(FOLDER / "gpu.txt", compile_lock(uv, *gpu, str(pyproject)))
    # The tests interpret Triton kernels without a GPU.
    dev = compile_lock(uv, "--extra", "dev", str(pyproject), "-", text="editables\n")
    write(FOLDER / "dev.txt", without(dev, TORCH))
    site: list[str] = tomllib.loads(pyproject.read_text())["dependency-groups"]["site"]
    write(SITE, compile_lock(uv, "-", text="\n".join(site)))


if __name__ == "__main__":
    main(sys.argv[1])
