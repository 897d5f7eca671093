"""Tries the installed foretoken: every module, every command's help, the demo model's completions.

An interpreter that has foretoken from a wheel runs it in a folder away from the sources. It needs
only Python's own library. It ends with status 1 and the reason at the first failure.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

PACKAGES = ("foretoken", "gateway", "verifier_svc", "drafter_svc", "protos", "foretoken_kernels")
# Extras, which are not installed. Only modules for a GPU, for Ray, KV
# events or spans may want them.
EXTRAS = ("triton", "cuda", "flashinfer", "ray", "zmq", "msgspec", "opentelemetry.exporter.otlp")
COMMANDS = {
    "": (
        *("serve", "gateway", "verifier", "drafter", "doctor", "train", "convert", "probe", "complete"),
        *("bench", "tune", "top", "corpus", "drafters", "key"),
    ),
    "corpus": ("add", "list", "remove"),
    "drafters": ("list", "attach", "detach"),
}
FORETOKEN = (sys.executable, "-m", "foretoken")
READY_S = 240
ANSWER_S = 60


def main() -> None:
    sources = Path(__file__).resolve().parents[2]
    count = import_everything(sources)
    print(f"imported {count} modules")
    print(f"{ask_for_help()} commands have help")
    print(f"the demo model wrote {complete_with_the_demo()!r}")


def import_everything(sources: Path) -> int:
    count = 0
    for package in map(importlib.import_module, PACKAGES):
        if sources in Path(str(package.__file__)).parents:
            sys.exit(f"{package.__name__} is that of the sources, not of the wheel")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.", onerror=_raise):
            if module.name.endswith("__main__"):
                continue
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                if not _is_of_an_extra(error):
                    raise
                continue
            count += 1
    return count


def _is_of_an_extra(error: ModuleNotFoundError) -> bool:
    return any(f"{error.name}.".startswith(f"{name}.") for name in EXTRAS)


def _raise(name: str) -> None:
    """Raise the error of a walked package, unless an extra is missing."""
    error = sys.exc_info()[1]
    if not (isinstance(error, ModuleNotFoundError) and _is_of_an_extra(error)):
        raise RuntimeError(f"cannot import {name}") from error


def ask_for_help() -> int:
    count = 0
    for group, commands in COMMANDS.items():
        before = [group] if group else []
        listed = _foretoken(*before, "--help")
        for command in commands:
            if not re.search(rf"\b{command}\b", listed):
                sys.exit(f"foretoken {group} --help does not list {command}")
            # The help must list the options: a library may have taken some for its own.
            if "--help" not in _foretoken(*before, command, "--help"):
                sys.exit(f"foretoken {group} {command} has no help")
            count += 1
    # Options are read, not only listed: the folder is at fault, not the flag.
    run = subprocess.run(
        (*FORETOKEN, "verifier", "--address", "unix:/none", "/none"), capture_output=True, text=True, timeout=ANSWER_S
    )
    if run.returncode != 2 or "no such folder: /none" not in run.stderr:
        sys.exit(f"foretoken verifier --address does not take its flags: {run.stderr}")
    return count


def complete_with_the_demo() -> str:
    """Return the demo's text, which each drafter and plain decode must write alike."""
    port, grpc_port = _free_ports()
    command = (*FORETOKEN, "serve", "demo", "--port", str(port), "--grpc-port", str(grpc_port))
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert server.stdout is not None
    # A server that neither gets ready nor ends must not hold the run.
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(server.pid, signal.SIGKILL))
    signal.alarm(READY_S)
    try:
        if not any("is ready: foretoken-demo at" in line for line in server.stdout):
            sys.exit(f"foretoken serve demo did not get ready, and ended with status {server.wait()}")
        signal.alarm(0)
        asked = ("complete", "def read_json(path):", "--temperature", "0", "--max-tokens", "48")
        asked += ("--url", f"http://127.0.0.1:{port}")
        text = _foretoken(*asked, "--no-speculation")
        if not text.strip():
            sys.exit(f"the demo model wrote {text!r}")
        for drafter in ("eagle3", "ngram"):
            if (drafted := _foretoken(*asked, "--drafter", drafter)) != text:
                sys.exit(f"with {drafter} the demo model wrote {drafted!r}, without it {text!r}")
        return text
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(ANSWER_S)
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)


def _foretoken(*arguments: str) -> str:
    """Return a command's stdout. Exit with its stderr if it fails."""
    run = subprocess.run((*FORETOKEN, *arguments), capture_output=True, text=True, timeout=ANSWER_S)
    if run.returncode != 0:
        sys.exit(f"foretoken {' '.join(arguments)} ended with status {run.returncode}: {run.stderr}")
    return run.stdout


def _free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as other:
        for listener in (one, other):
            listener.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


if __name__ == "__main__":
    main()
