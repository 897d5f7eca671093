"""Run ``foretoken verifier`` unchanged, in a process that can record its work on the GPU.

    python -m benchmarks.gpu.traced_verifier ARGUMENTS OF foretoken verifier

Commands are lines on stdin: ``start``, and ``stop FILE``, which writes FILE as a Chrome trace. A
line on stdout answers each. The end of stdin ends the verifier.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import IO, Any

DONE = "done"


def main() -> None:
    from foretoken import cli

    # All other output goes to stderr.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # As the command itself does before it loads PyTorch.
    os.environ.setdefault("GOMP_SPINCOUNT", cli.OPENMP_SPIN_COUNT)
    has_torch = threading.Event()
    threading.Thread(target=_obey, args=(sys.stdin, replies, has_torch), name="recorder", daemon=True).start()
    has_torch.wait()
    sys.argv.insert(1, "verifier")
    # In the main thread, where signals are handled.
    cli.main()


def _obey(commands: IO[str], replies: IO[str], has_torch: threading.Event) -> None:
    """Obey commands until stdin ends, then stop this process."""
    try:
        # The profiler complains if a thread other than its own loaded PyTorch.
        import torch  # noqa: F401

        has_torch.set()
        for line in commands:
            recorder = _start(line)
            print(DONE, file=replies, flush=True)
            word, _, file = commands.readline().rstrip("\n").partition(" ")
            if word != "stop":
                raise ValueError(f"recording, and got {word!r}")
            recorder.stop()
            recorder.export_chrome_trace(file)
            print(DONE, file=replies, flush=True)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def _start(line: str) -> Any:
    if line.strip() != "start":
        raise ValueError(f"not recording, and got {line!r}")
    import torch
    from torch.profiler import ProfilerActivity, profile

    # The profiler needs an activity to record; without a GPU it records the CPU's.
    recorder = profile(activities=[ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU])
    recorder.start()
    return recorder


if __name__ == "__main__":
    main()
