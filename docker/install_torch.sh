#!/bin/sh
# Installs PyTorch alone, with the pip command that the arguments are: from $TORCH_INDEX, PyTorch's own index of CPU
# builds, or where that does not answer from pip's own index. Empty: from pip's own index, whichever build that has.
set -eu
index=""
if [ -n "$TORCH_INDEX" ]; then
  if python3 -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=10)' "$TORCH_INDEX/torch/" 2>/dev/null
  then
    index="--index-url $TORCH_INDEX"
  else
    echo "$TORCH_INDEX does not answer; taking PyTorch from docker/wheels or pip's own index"
  fi
fi
# Unquoted: two words or none.
"$@" --no-deps $index torch
# pip's own index may have the CUDA build, and several gigabytes would follow.
if [ -n "$TORCH_INDEX" ] && "$VIRTUAL_ENV/bin/python" -c '
import importlib.metadata, sys
sys.exit(not any(name.startswith(("nvidia-", "cuda-")) for name in importlib.metadata.requires("torch")))'; then
  echo "That is the CUDA build. Put a CPU wheel of torch into docker/wheels, or name an index that has one:" >&2
  echo "  TORCH_INDEX=URL docker compose build, or docker build --build-arg TORCH_INDEX=URL" >&2
  exit 1
fi
