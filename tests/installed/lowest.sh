#!/usr/bin/env bash
# Builds sdist and wheel, installs the wheel into an empty environment with the lowest versions of
# everything that pyproject.toml names, and tries it from another folder. The argument: a Python
# that has pip and hatchling.
# Variables: TORCH_INDEX as in the Makefile.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
root=$PWD python=$(realpath -s "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The wheel is built from the unpacked sdist, so it lacks every file that the sdist lacks.
"$python" -m hatchling build -t sdist -d "$work/sdist" > /dev/null
mkdir "$work/sources"
tar -xzf "$work"/sdist/*.tar.gz -C "$work/sources" --strip-components 1
(cd "$work/sources" && "$python" -m hatchling build -t wheel -d "$work/wheel" > /dev/null)
wheel=$(echo "$work"/wheel/*.whl)

"$python" -m venv "$work/uv"
"$work/uv/bin/python" -m pip install --quiet --disable-pip-version-check uv==0.13.9
"$python" -m venv "$work/lowest"
lowest=$work/lowest/bin/python

# A CPU build: only PyTorch's own index has that of the lowest version. Elsewhere it is the version
# of constraints.txt, as pip finds it on this machine.
index=${TORCH_INDEX:-$(sed -n 's/^TORCH_INDEX ?= //p' Makefile)}
torch=$(sed -n 's/^ *"torch>=\([0-9.]*\).*/\1/p' pyproject.toml)
if "$python" -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=10)' "$index/torch/" 2> /dev/null; then
  "$lowest" -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --index-url "$index" "torch==$torch"
else
  echo "no CPU build of torch $torch is in reach, which is thus not tried: $index does not answer"
  "$lowest" -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --constraint constraints.txt torch
fi
# lowest-direct lowers the requirements of the named project; a wheel would move them one step away.
install=("$work/uv/bin/uv" pip install --quiet --python "$lowest")
"${install[@]}" --resolution lowest-direct --requirement pyproject.toml
"${install[@]}" --no-deps "$wheel"

# Each bound is the version that is installed, or it says less than is needed.
"$lowest" - "$root/pyproject.toml" << 'EOF'
import re, sys, tomllib
from importlib.metadata import version

with open(sys.argv[1], "rb") as file:
    dependencies = tomllib.load(file)["project"]["dependencies"]
bounds = dict(re.fullmatch(r"([\w-]+)>=([\w.]+)", dependency).groups() for dependency in dependencies)
print(*(f"{name}=={version(name)}" for name in bounds))
def parts(text): return [*map(int, re.findall(r"\d+", text.partition("+")[0]))]
def padded(text): return (parts(text) + [0] * 4)[:4]
wrong = [name for name in bounds if name != "torch" and padded(version(name)) != padded(bounds[name])]
sys.exit(f"their bounds in pyproject.toml are not what is installed: {', '.join(wrong)}" if wrong else 0)
EOF

mkdir "$work/elsewhere"
cd "$work/elsewhere"
NUMBA_CACHE_DIR=$work/cache "$lowest" -I "$root/tests/installed/smoke.py"
