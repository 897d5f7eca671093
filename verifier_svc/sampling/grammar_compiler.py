"""Compile grammars outside the engine: check them in a separate process, compile in threads.

A hostile grammar costs the checker's time and never delays a step of the engine. New grammars wait
after it, for a bounded time. A known grammar is compiled again for each sequence, because sequences
cannot share a compiled grammar (see Matcher).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from foretoken.errors import ForetokenError, PreconditionError, QueueFullError
from foretoken.sampling import Grammar
from verifier_svc.sampling import grammar_check
from verifier_svc.sampling.grammar import LIMITS, Matcher, Vocabulary, compile_grammar, refusal, short, to_llguidance

logger = logging.getLogger(__name__)

COMPILE_TIMEOUT_S = 3.0
# Most bytes that compiling one grammar may take, and that all kept grammars may take together.
MAX_COMPILE_BYTES = 256 * 1024 * 1024
MAX_KEPT_BYTES = 256 * 1024 * 1024
MAX_KEPT = 256
# Most grammars that wait to be compiled. It bounds the wait of one: each takes
# at most COMPILE_TIMEOUT_S of CPU time, and WALL_TIMES (grammar_check.py) as
# long where it waits for a core.
MAX_WAITING = 16


class _Kept(NamedTuple):
    matcher: Matcher
    num_bytes: int


class GrammarCompiler:
    """Make matchers for grammars. Await ``matcher``; the slow work runs in two threads."""

    def __init__(
        self,
        make_vocabulary: Callable[[], Vocabulary],
        *,
        timeout_s: float = COMPILE_TIMEOUT_S,
        max_compile_bytes: int = MAX_COMPILE_BYTES,
        max_kept_bytes: int = MAX_KEPT_BYTES,
        looks_ahead: bool = False,
    ) -> None:
        """
        Args:
            make_vocabulary: makes the vocabulary at the first grammar. Raises InvalidRequestError
                if the model's tokenizer cannot be used.
            timeout_s: most seconds of CPU time that compiling one grammar may take.
            max_compile_bytes: most bytes that compiling one grammar may take.
            max_kept_bytes: most bytes of all kept grammars.
            looks_ahead: whether matchers read drafts ahead of the output (Matcher.ahead). It takes
                a second compilation for each output.
        """
        self._make_vocabulary = make_vocabulary
        self._timeout_s = timeout_s
        self._max_compile_bytes = max_compile_bytes
        self._max_kept_bytes = max_kept_bytes
        self._looks_ahead = looks_ahead
        self._vocabulary: Vocabulary | None = None
        self._checker: subprocess.Popen[bytes] | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        # A thread for known grammars, so that they do not wait until a new one is checked.
        self._for_known = ThreadPoolExecutor(1, thread_name_prefix="known-grammar")
        self._lock = threading.Lock()
        self._kept: OrderedDict[Grammar, _Kept] = OrderedDict()
        self._kept_bytes = 0
        self._waiting: dict[Grammar, Future[Matcher]] = {}
        self._closed = False

    async def matcher(self, grammar: Grammar, output_ids: Sequence[int] = ()) -> Matcher:
        """Return a new matcher, advanced by ``output_ids``.

        Raises:
            InvalidRequestError: the grammar cannot be used. The error's field is the grammar's
                kind, and its message is llguidance's.
            PreconditionError: ``output_ids`` do not match the grammar.
            QueueFullError: too many grammars wait to be compiled.
        """
        compiled = self.kept(grammar)
        if compiled is None:
            compiled = await asyncio.shield(asyncio.wrap_future(self._compiled(grammar)))
        made = self._for_known.submit(_matcher_behind, compiled, output_ids, self._looks_ahead)
        return await asyncio.wrap_future(made)

    def kept(self, grammar: Grammar) -> Matcher | None:
        """Return the kept matcher of a grammar, or None. Never advance it: it is shared."""
        with self._lock:
            found = self._kept.get(grammar)
            if found is not None:
                self._kept.move_to_end(grammar)
            return None if found is None else found.matcher

    def close(self) -> None:
        """End the checker process and the threads. Grammars that still wait fail."""
        self._closed = True
        if self._checker is not None:
            self._checker.kill()
        for executor in (self._executor, self._for_known):
            executor.shutdown(cancel_futures=True)
        self._end_checker()

    def _compiled(self, grammar: Grammar) -> Future[Matcher]:
        """Return a grammar's compilation, the current one or a new one. Raises QueueFullError."""
        with self._lock:
            future = self._waiting.get(grammar)
            if future is None:
                if len(self._waiting) >= MAX_WAITING:
                    raise QueueFullError("too many grammars wait to be compiled")
                future = self._waiting[grammar] = self._executor.submit(self._compile, grammar)
        return future

    def _compile(self, grammar: Grammar) -> Matcher:
        try:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
            num_bytes = self._check(grammar, self._vocabulary)
            matcher = compile_grammar(grammar, self._vocabulary)
            self._keep(grammar, _Kept(matcher, num_bytes + len(grammar.text)))
            return matcher
        except ForetokenError as error:
            error.field = error.field or grammar.kind
            raise
        finally:
            with self._lock:
                del self._waiting[grammar]

    def _check(self, grammar: Grammar, vocabulary: Vocabulary) -> int:
        """Return the bytes that compiling took in the checker.

        Raises InvalidRequestError if the grammar must not be compiled in this process.
        """
        line = json.dumps({"grammar": to_llguidance(grammar)}).encode() + b"\n"
        # The checker may have died since the last grammar: then start another one.
        for _ in range(2):
            checker = self._checker or self._start_checker(vocabulary)
            assert checker.stdin is not None and checker.stdout is not None
            try:
                checker.stdin.write(line)
                checker.stdin.flush()
                said = checker.stdout.readline()
            except BrokenPipeError:
                said = b""
            if said:
                answer = json.loads(said)
                if answer["error"]:
                    raise refusal(grammar, answer["error"])
                return int(answer["bytes"])
            logger.warning("the process that checks grammars is gone")
            self._end_checker()
        raise refusal(grammar, "the process that checks grammars died of it")

    def _start_checker(self, vocabulary: Vocabulary) -> subprocess.Popen[bytes]:
        if self._closed:
            raise RuntimeError("closed")
        options = {
            "tokenizer": str(vocabulary.path),
            "eos_ids": vocabulary.eos_ids,
            "timeout_s": self._timeout_s,
            "max_bytes": self._max_compile_bytes,
            "limits": LIMITS,
        }
        # The checker ends with its input, so it cannot outlive this process. Its own session
        # shields it from the terminal's signals. It finds packages where this process does.
        self._checker = subprocess.Popen(
            [sys.executable, "-P", "-s", str(Path(grammar_check.__file__)), json.dumps(options)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self._checker

    def _end_checker(self) -> None:
        checker, self._checker = self._checker, None
        if checker is not None:
            checker.kill()
            checker.communicate()

    def _keep(self, grammar: Grammar, kept: _Kept) -> None:
        """Keep a compiled grammar; drop the least recently used ones to make room."""
        with self._lock:
            if (known := self._kept.pop(grammar, None)) is not None:
                self._kept_bytes -= known.num_bytes
            self._kept[grammar] = kept
            self._kept_bytes += kept.num_bytes
            while len(self._kept) > 1 and (len(self._kept) > MAX_KEPT or self._kept_bytes > self._max_kept_bytes):
                _, oldest = self._kept.popitem(last=False)
                self._kept_bytes -= oldest.num_bytes


def _matcher_behind(compiled: Matcher, output_ids: Sequence[int], looks_ahead: bool) -> Matcher:
    """Return a new matcher, advanced by the tokens that earlier attempts emitted.

    Raises PreconditionError if the tokens do not match the grammar.
    """
    matcher = compiled.anew()
    if looks_ahead:
        matcher.look_ahead()
    if output_ids and not matcher.advance(output_ids):
        raise PreconditionError(
            f"the output emitted so far does not match the grammar: {short(matcher.error)}", field="output_token_ids"
        )
    return matcher
