"""Grammars compile away from the engine: hostile ones are bounded, good ones compile once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import psutil
import pytest

from foretoken.errors import ForetokenError, InvalidRequestError, PreconditionError, QueueFullError
from foretoken.limits import MAX_GRAMMAR_BYTES
from foretoken.sampling import Grammar
from tests.support.environment import child_environment
from tests.support.grammars import VOCAB, ids_of, regex, schema, vocabulary, write_tokenizer
from verifier_svc.sampling import grammar_compiler
from verifier_svc.sampling.grammar import LIMITS, Vocabulary, to_llguidance
from verifier_svc.sampling.grammar_compiler import GrammarCompiler

DEMO = Path(__file__).parents[3] / "models" / "demo" / "target"
# Minutes and gigabytes to compile, in seventy bytes.
ENDLESS = schema({"type": "integer", "multipleOf": 99999989})
# The checker, whose fork has no core for some seconds.
WITHOUT_A_CORE = """
import sys
import time
from verifier_svc.sampling import grammar_check

check = grammar_check._check

def check_later(*arguments):
    time.sleep(float(sys.argv[2]))
    return check(*arguments)

grammar_check._check = check_later
grammar_check.main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("vocabulary"))


@pytest.fixture
def make(folder: Path) -> Iterator[Callable[..., GrammarCompiler]]:
    made = []

    def compiler(**options: Any) -> GrammarCompiler:
        made.append(GrammarCompiler(lambda: vocabulary(folder), **options))
        return made[-1]

    yield compiler
    for item in made:
        item.close()


def run(work: Awaitable[Any]) -> Any:
    async def main() -> Any:
        return await work

    return asyncio.run(main())


def refused(compiler: GrammarCompiler, grammar: Grammar) -> ForetokenError:
    with pytest.raises(ForetokenError) as caught:
        run(compiler.matcher(grammar))
    return caught.value


def nested_schema(depth: int) -> str:
    return '{"properties":{"a":' * depth + "{}" + "}}" * depth


UNUSABLE: dict[str, tuple[Grammar, str]] = {
    "no JSON": (Grammar("json_schema", "{"), "EOF"),
    "no object": (Grammar("json_schema", "[]"), "object"),
    "deep": (Grammar("json_schema", nested_schema(2000)), "recursion limit"),
    "deep text": (Grammar("json_schema", "[" * (MAX_GRAMMAR_BYTES["json_schema"] - 1)), "recursion limit"),
    "not a type": (schema({"type": "robot"}), "robot"),
    "unsupported": (schema({"not": {"type": "string"}}), "not"),
    "unique": (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
    "contradiction": (schema({"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
    "nothing allowed": (schema({"allOf": [{"type": "string"}, {"type": "integer"}]}), "incompatible"),
    "endless reference": (schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), "no text"),
    "no character": (regex("[^\\x00-\\U0010ffff]"), "no text"),
    "remote reference": (schema({"$ref": "http://localhost:1/x.json"}), "does not fetch"),
    "product": (
        schema(
            {
                "allOf": [
                    {"anyOf": [{"properties": {f"a{i}_{j}": {"type": "string"}}} for j in range(8)]} for i in range(8)
                ]
            }
        ),
        "too large",
    ),
    "look-ahead in a pattern": (schema({"type": "string", "pattern": "(?=a)b"}), "look-around"),
    "group": (regex("("), "unclosed group"),
    "look-behind": (regex("(?<=a)b"), "look-around"),
    "back reference": (regex("(a)\\1"), "backreferences"),
    "parentheses": (regex("(" * 5000 + ")" * 5000), "nest"),
    "broken off": (regex("a\\\\\\"), "backslash"),
    "another alphabet": (regex("é"), "no text"),
    "no rule": (Grammar("lark", "start: other"), "other"),
    "no Lark": (Grammar("lark", "start = 1"), "="),
    "a special token that is not there": (Grammar("lark", "start: <[99999999]>"), "99999999"),
    "deep Lark": (Grammar("lark", f"start: {'(' * 100_000}"), ""),
    "a schema in it": (Grammar("lark", 'start: %json {"type": "robot"}'), "robot"),
}


def test_what_cannot_be_used_is_refused_with_its_reason_and_the_field(make: Callable[..., GrammarCompiler]) -> None:
    compiler = make()
    for name, (grammar, reason) in UNUSABLE.items():
        error = refused(compiler, grammar)
        assert isinstance(error, InvalidRequestError), name
        assert error.field == grammar.kind, name
        assert reason in error.message, (name, error.message)
        assert len(error.message) < 400 and "\n" not in error.message
    assert len(compiler._kept) == 0


def test_a_grammar_without_end_is_killed_and_the_next_one_is_served(make: Callable[..., GrammarCompiler]) -> None:
    compiler = make(timeout_s=0.5, max_compile_bytes=8 << 30)
    assert "0.5 s" in refused(compiler, ENDLESS).message
    # None of that work goes on.
    for process in psutil.Process().children():
        assert process.children() == []
    assert run(compiler.matcher(regex("[ab]+"))).allowed.any()


def checked(folder: Path, timeout_s: float, without_a_core_s: float) -> str:
    """Return the error of a good grammar whose fork has no core for some seconds."""
    has = vocabulary(folder)
    options = {
        "tokenizer": str(has.path),
        "eos_ids": has.eos_ids,
        "timeout_s": timeout_s,
        "max_bytes": 8 << 30,
        "limits": LIMITS,
    }
    line = json.dumps({"grammar": to_llguidance(regex("[ab]+"))})
    words = [sys.executable, "-c", WITHOUT_A_CORE, json.dumps(options), str(without_a_core_s)]
    done = subprocess.run(words, input=line, env=child_environment(), capture_output=True, text=True)
    assert done.stdout, done.stderr
    return str(json.loads(done.stdout)["error"])


def test_time_without_a_core_is_not_counted(folder: Path) -> None:
    """A good grammar was refused on a busy machine."""
    assert checked(folder, timeout_s=1.0, without_a_core_s=1.2) == ""


def test_a_fork_that_waits_for_ever_is_killed(folder: Path) -> None:
    assert checked(folder, timeout_s=0.05, without_a_core_s=3600.0) == "it was not compiled within 1 s"


def test_a_grammar_that_takes_too_much_memory_is_refused(make: Callable[..., GrammarCompiler]) -> None:
    compiler = make(timeout_s=60, max_compile_bytes=32 << 20)
    assert "32 MiB" in refused(compiler, ENDLESS).message
    assert run(compiler.matcher(regex("[ab]+"))).allowed.any()


HOSTILE = [
    regex("(a+)+b"),
    regex("((a{1,100}){1,100}){1,100}"),
    regex("(.{0,100}x.{0,100}){0,100}"),
    regex("a?" * 500 + "a" * 500),
    regex(".*a.{200}b|.*c.{100}d"),
    regex("|".join(f".*w{i}.*" for i in range(300))),
    regex("(\\w{1,100}\\d{1,100}){1,50}x"),
    schema({"type": "string", "pattern": "^(([a-z]+)+)+$", "maxLength": 1_000_000}),
    schema({"type": "array", "minItems": 100_000, "items": {"type": "integer"}}),
    schema({"enum": [f"value {i}" for i in range(5000)]}),
    schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}),
    Grammar("json_schema", nested_schema(55)),
]


def test_hostile_grammars_are_refused_or_served_within_the_limits(make: Callable[..., GrammarCompiler]) -> None:
    """Random tokens walk each served grammar to its end or to a limit; no process is lost."""
    compiler = make()
    rng = np.random.default_rng(0)
    for grammar in HOSTILE:
        try:
            matcher = run(compiler.matcher(grammar))
        except InvalidRequestError:
            continue
        for _ in range(60):
            allowed = np.flatnonzero(np.unpackbits(matcher.allowed, bitorder="little"))
            if not len(allowed):
                break
            assert matcher.advance((int(rng.choice(allowed)),)) or matcher.error
        assert allowed.size or matcher.is_accepting or matcher.error


def test_a_limit_that_one_output_hits_ends_no_other() -> None:
    """Use the demo model's tokens: one mask then reaches more lexer states."""
    compiler = GrammarCompiler(lambda: Vocabulary(DEMO, vocab_limit=8192, eos_ids=frozenset({0})))
    grammar = regex(".*[aeiou].{22}")
    try:
        hits_it, runs_beside = run(compiler.matcher(grammar)), run(compiler.matcher(grammar))
        assert runs_beside.advance((70,))
        rng = np.random.default_rng(0)
        for _ in range(500):
            if hits_it.error:
                break
            hits_it.advance((int(rng.choice(np.flatnonzero(np.unpackbits(hits_it.allowed, bitorder="little")))),))
        assert "too many states" in hits_it.error
        assert runs_beside.advance((71,)) and runs_beside.allowed.any()
        comes_later = run(compiler.matcher(grammar, (70, 71)))
        assert comes_later.allowed.any() and comes_later.allowed.tolist() == runs_beside.allowed.tolist()
    finally:
        compiler.close()


def test_waiting_for_one_grammar_holds_up_no_kept_one(make: Callable[..., GrammarCompiler]) -> None:
    compiler = make(timeout_s=1.0)

    async def main() -> None:
        await compiler.matcher(regex("[ab]+"))
        slow = asyncio.create_task(compiler.matcher(ENDLESS))
        num_served = 0
        while not slow.done():
            await compiler.matcher(regex("[ab]+"))
            await asyncio.sleep(0)
            num_served += 1
        # If the first one had waited for it, there would be no second.
        assert num_served > 1
        with pytest.raises(InvalidRequestError):
            await slow

    run(main())


def test_many_that_ask_for_one_grammar_wait_for_one_compilation(
    make: Callable[..., GrammarCompiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = make()
    compile_grammar = Mock(wraps=grammar_compiler.compile_grammar)
    monkeypatch.setattr(grammar_compiler, "compile_grammar", compile_grammar)

    async def main() -> None:
        first, *others = await asyncio.gather(*(compiler.matcher(regex("ab|ba")) for _ in range(20)))
        first.advance(ids_of("a"))
        # Each has its own.
        assert all(other.allowed.tolist() != first.allowed.tolist() for other in others)

    run(main())
    compile_grammar.assert_called_once()


def test_too_many_waiting_grammars_are_refused_as_a_full_queue(
    make: Callable[..., GrammarCompiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_WAITING", 3)
    compiler = make(timeout_s=1.0)

    async def main() -> None:
        waiting = [asyncio.create_task(compiler.matcher(g)) for g in (ENDLESS, regex("a"), regex("b"))]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            await compiler.matcher(regex("c"))
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [isinstance(result, InvalidRequestError) for result in results] == [True, False, False]
        await compiler.matcher(regex("c"))

    run(main())


def test_one_that_gives_up_waiting_takes_the_compilation_from_nobody(make: Callable[..., GrammarCompiler]) -> None:
    compiler = make()

    async def main() -> None:
        gone = asyncio.create_task(compiler.matcher(regex("ab")))
        stays = asyncio.create_task(compiler.matcher(regex("ab")))
        await asyncio.sleep(0)
        gone.cancel()
        assert (await stays).allowed.any()

    run(main())


def test_the_least_recently_used_grammars_make_room(
    make: Callable[..., GrammarCompiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_KEPT", 2)
    compiler = make()
    for text in ("a", "b", "a", "c"):
        run(compiler.matcher(regex(text)))
    assert compiler.kept(regex("a")) and compiler.kept(regex("c")) and not compiler.kept(regex("b"))
    by_size = make(max_kept_bytes=1)
    for text in ("abcd", "dcba"):
        run(by_size.matcher(regex(text)))
    assert len(by_size._kept) == 1 and by_size.kept(regex("dcba"))


def test_an_output_emitted_so_far_is_taken_up_or_refused(make: Callable[..., GrammarCompiler]) -> None:
    compiler = make()
    matcher = run(compiler.matcher(regex("ab(cd)+"), ids_of("ab", "c")))
    allowed = np.flatnonzero(np.unpackbits(matcher.allowed, bitorder="little")).tolist()
    assert allowed == ids_of("d")
    with pytest.raises(PreconditionError) as caught:
        run(compiler.matcher(regex("ab(cd)+"), ids_of("ab", "d")))
    assert caught.value.field == "output_token_ids"


def test_the_checking_process_is_started_again_after_its_death(make: Callable[..., GrammarCompiler]) -> None:
    compiler = make()
    before = set(psutil.Process().children())
    run(compiler.matcher(regex("a")))
    (checker,) = set(psutil.Process().children()) - before
    os.kill(checker.pid, signal.SIGKILL)
    assert run(compiler.matcher(regex("b"))).allowed.any()
    compiler.close()
    assert not set(psutil.Process().children()) - before


def test_the_checking_process_finds_packages_where_this_one_does(folder: Path) -> None:
    """With packages that only PYTHONPATH names, every
    grammar was refused: the checker ignored it.
    """
    code = (
        "import asyncio\n"
        "from tests.support.grammars import regex, vocabulary\n"
        "from verifier_svc.sampling.grammar_compiler import GrammarCompiler\n"
        "from pathlib import Path\n"
        f"compiler = GrammarCompiler(lambda: vocabulary(Path({str(folder)!r})))\n"
        "assert asyncio.run(compiler.matcher(regex('ab'))).allowed.any()\n"
        "compiler.close()\n"
    )
    # The interpreter outside the environment has none of the packages itself.
    interpreter = str(Path(sys.executable).resolve())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([interpreter, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_model_without_a_tokenizer_is_named_in_every_refusal(tmp_path: Path) -> None:
    compiler = GrammarCompiler(lambda: Vocabulary(tmp_path, vocab_limit=VOCAB, eos_ids=frozenset()))
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="tokenizer") as caught:
            run(compiler.matcher(schema({})))
        assert caught.value.field == "json_schema"
    compiler.close()


@pytest.mark.parametrize(
    ("pattern", "text"),
    [("a\\d+", "a12"), ("\\w{2}/?", "a1"), ("[^\\d]x", "ax"), ("a\nb", "a\nb"), ("^ab$", "ab"), ("(?i)AB", "ab")],
)
def test_regular_expressions_as_they_are_written(make: Callable[..., GrammarCompiler], pattern: str, text: str) -> None:
    matcher = run(make().matcher(regex(pattern)))
    assert matcher.advance(ids_of(*text)) and matcher.is_accepting


def test_classes_of_characters_are_ascii(folder: Path) -> None:
    digits, words = (to_llguidance(regex(text)) for text in ("\\d", "\\w"))
    assert "[0-9]" in digits and "[0-9a-zA-Z_]" in words


def test_white_space_is_bounded(make: Callable[..., GrammarCompiler]) -> None:
    matcher = run(make().matcher(Grammar("json_schema", json.dumps({"type": "array"}))))
    # After a comma, where every version of llguidance allows white space.
    assert matcher.advance(ids_of("[", "1", ","))
    (space,) = ids_of(" ")
    for _ in range(32):
        assert matcher.advance((space,))
    assert not matcher.allowed[space // 8] >> (space % 8) & 1
