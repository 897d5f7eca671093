"""Check in a separate process whether a grammar compiles within bounded time and memory.

Run it as a script by its path, so that it imports only llguidance: ``grammar_check.py OPTIONS``,
with one JSON object of options. It reads one JSON line for each grammar, ``{"grammar": text}``, and
answers with one JSON line: ``error`` is a message, empty for a usable grammar, and ``bytes`` is the
memory that compiling took. It compiles each grammar in a fork: native code cannot be interrupted,
but the fork's own timers can kill the fork, even if no other process is left. One counts CPU time:
on a busy machine a good grammar waits for a core and is compiled all the same. The other is for a
fork that waits for ever, as for a lock that a thread held when it was made.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

PAGE = resource.getpagesize()
# A fork may take so many times its CPU time.
WALL_TIMES = 20


def main() -> None:
    """Answer until the input ends."""
    options = json.loads(sys.argv[1])
    text = Path(options["tokenizer"]).read_text(encoding="utf-8")
    tokenizer = LLTokenizer(text, eos_token=options["eos_ids"] or None)
    while line := sys.stdin.buffer.readline():
        answer = _in_a_fork(tokenizer, json.loads(line)["grammar"], options)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _in_a_fork(tokenizer: LLTokenizer, grammar: str, options: dict[str, Any]) -> dict[str, Any]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        # The parent's clean-up must never run in the child.
        try:
            os.close(reader)
            signal.setitimer(signal.ITIMER_PROF, options["timeout_s"])
            signal.setitimer(signal.ITIMER_REAL, WALL_TIMES * options["timeout_s"])
            answer = _check(tokenizer, grammar, options)
            with os.fdopen(writer, "w") as pipe:
                json.dump(answer, pipe)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    if said:
        return dict(json.loads(said))
    killed_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    if killed_by == signal.SIGALRM:
        return {"error": f"it was not compiled within {WALL_TIMES * options['timeout_s']:g} s", "bytes": 0}
    if killed_by == signal.SIGPROF:
        return {"error": f"it takes more than {options['timeout_s']:g} s of CPU time to compile", "bytes": 0}
    return {"error": f"it takes more than {options['max_bytes'] >> 20} MiB to compile", "bytes": 0}


def _check(tokenizer: LLTokenizer, grammar: str, options: dict[str, Any]) -> dict[str, Any]:
    address_space, resident = _memory()
    most = address_space + options["max_bytes"]
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**options["limits"]))
    if not matcher.is_error():
        # The first mask builds the structures that all later masks use.
        matcher.compute_bitmask()
    return {"error": matcher.get_error(), "bytes": max(_memory()[1] - resident, 0)}


def _memory() -> tuple[int, int]:
    """Return this process's bytes of address space and of resident memory."""
    total, resident = Path("/proc/self/statm").read_text(encoding="ascii").split()[:2]
    return int(total) * PAGE, int(resident) * PAGE


if __name__ == "__main__":
    main()
