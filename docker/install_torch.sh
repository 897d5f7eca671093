#!/bin/sh
# Installs only PyTorch, with the pip command in the arguments: from $TORCH_INDEX, an index of CPU
# builds; if that does not answer, from docker/wheels, or from pip's index if there is no wheel. If
# $TORCH_INDEX is empty: from pip's index, with the build that it has.
set -eu
index="" what=torch lock=$(dirname "$0")/locks/torch-cpu.txt
if [ -n "$TORCH_INDEX" ]; then
  if python3 -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=10)' "$TORCH_INDEX/torch/" 2>/dev/null
  then
    index="--index-url $TORCH_INDEX"
    case $TORCH_INDEX in
      # PyTorch's own index, or a mirror of it: the files must be those whose hashes are known.
      */whl/cpu | */whl/cpu/) what="--require-hashes --requirement $lock" ;;
    esac
  else
    echo "$TORCH_INDEX does not answer; taking PyTorch from docker/wheels or pip's own index"
    # pip's index may have a later version, which pip would take.
    what=torch==$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' "$lock")
    for wheel in docker/wheels/torch-*.whl; do
      [ ! -e "$wheel" ] || { index="--no-index --find-links docker/wheels" what=torch; }
    done
  fi
fi
# Unquoted: some words or none.
"$@" --no-deps $index $what
# pip's index may have the CUDA build, which would add several gigabytes.
if [ -n "$TORCH_INDEX" ] && "$VIRTUAL_ENV/bin/python" -c '
import importlib.metadata, sys
sys.exit(not any(name.startswith(("nvidia-", "cuda-")) for name in importlib.metadata.requires("torch")))'; then
  echo "That is the CUDA build. Put a CPU wheel of torch into docker/wheels, or name an index that has one:" >&2
  echo "  TORCH_INDEX=URL docker compose build, or docker build --build-arg TORCH_INDEX=URL" >&2
  exit 1
fi
