#!/usr/bin/env bash
# Installs each file of a release, a wheel or an sdist, into an empty environment of its
# own, at the versions of constraints.txt, and tries it from another folder. The
# arguments: a Python, and the files.
# Variables: TORCH_INDEX as in docker/install_torch.sh; by default the Makefile's.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=$(realpath -s "$1")
shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TORCH_INDEX=${TORCH_INDEX-$(sed -n 's/^TORCH_INDEX ?= //p' "$root/Makefile")}
export PIP_CONSTRAINT=$root/constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1

for file in "$@"; do
  file=$(realpath "$file")
  echo "Trying $(basename "$file")"
  "$python" -m venv --clear "$work/environment"
  fresh=$work/environment/bin/python
  VIRTUAL_ENV=$work/environment sh "$root/docker/install_torch.sh" "$fresh" -m pip install --quiet
  # From an sdist pip builds the wheel itself, in an environment that it empties too.
  "$fresh" -m pip install --quiet "$file"
  mkdir -p "$work/elsewhere"
  (cd "$work/elsewhere" && NUMBA_CACHE_DIR=$work/cache "$fresh" -I "$root/tests/installed/smoke.py")
done
