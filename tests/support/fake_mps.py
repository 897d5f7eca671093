"""A stand-in for ``nvidia-cuda-mps-control`` on PATH: it keeps a journal and plays the daemon.

``mode``: works; fails (the daemon does not start); serverless (no server comes up); hangs (it never
answers); deaf (it obeys everything except ``quit``).
"""

from __future__ import annotations

from pathlib import Path

SERVER_PID = 4242

_SCRIPT = """#!/bin/sh
journal={journal}
mode={mode}
pid_file=$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid
if [ "$1" = -d ]; then
  echo "start $CUDA_MPS_PIPE_DIRECTORY visible=$CUDA_VISIBLE_DEVICES" >>"$journal"
  [ $mode != fails ] || {{ echo "An error"; echo "MPS is not supported here" >&2; exit 1; }}
  setsid sleep 1000 &
  echo $! >"$pid_file"
  exit 0
fi
while read -r line; do
  echo "$line in $CUDA_MPS_PIPE_DIRECTORY" >>"$journal"
  [ -f "$pid_file" ] || {{ echo "Cannot find MPS control daemon process"; exit 1; }}
  [ $mode != hangs ] || exec sleep 1000
  case $line in
    get_server_list) [ $mode = serverless ] || echo {server} ;;
    quit*) [ $mode != deaf ] || exec sleep 1000; kill "$(cat "$pid_file")"; rm "$pid_file" ;;
  esac
done
"""


def write(folder: Path, mode: str = "works") -> Path:
    """Write the program into ``folder``; return its journal, a line for each start and command."""
    journal = folder / "journal"
    program = folder / "nvidia-cuda-mps-control"
    program.write_text(_SCRIPT.format(journal=journal, mode=mode, server=SERVER_PID))
    program.chmod(0o755)
    return journal
