"""The measurements send the right requests, to a scripted server that behaves like the stack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.figures import Timing
from benchmarks.measure import Bench, PairWorkload, UnexpectedAnswerError
from benchmarks.prompts import BenchPrompt
from foretoken.bench.completion import Chunk, StreamedCompletion

PROMPTS = (BenchPrompt((1, 2, 3), "a.py"), BenchPrompt((4, 5, 6), "b.py"), BenchPrompt((7, 8, 9), "c.py"))
WORKLOAD = PairWorkload("code", PROMPTS, num_tokens=3)


class ScriptedServer:
    """A server that answers three tokens named after the prompt: 4 s a token, drafted 2 s."""

    def __init__(self, *, drafted: int | None = None, cached: int = 0, changed: int | None = None) -> None:
        """Make a server; ``changed``: the prompt's first id for which drafts change the text."""
        self.bodies: list[dict[str, Any]] = []
        self.num_at_once: list[int] = []
        self._drafted = drafted
        self._cached = cached
        self._changed = changed

    def __call__(self, bodies: Sequence[dict[str, Any]]) -> list[StreamedCompletion]:
        self.bodies += bodies
        self.num_at_once.append(len(bodies))
        return [self._answer(body) for body in bodies]

    def _answer(self, body: dict[str, Any]) -> StreamedCompletion:
        first, enabled = body["prompt"][0], body["speculative"]["enabled"]
        step_s = 2.0 if enabled else 4.0
        name = "other" if enabled and first == self._changed else "token"
        continuous = body["stream_options"].get("continuous_usage_stats", False)
        return StreamedCompletion(
            sent_at=0.0,
            chunks=tuple(
                Chunk(1 + step_s * i, f"<{name} {first}.{i}>", i + 1 if continuous else None) for i in range(3)
            ),
            token_ids=tuple(first + i for i in (1, 2, 3)) if body.get("return_token_sources") else (),
            num_prompt_tokens=3,
            num_cached_tokens=self._cached,
            num_tokens=3,
            finish_reason="length",
            speculation={
                "num_draft_tokens": (2 if enabled else 0) if self._drafted is None else self._drafted,
                "mean_tokens_per_step": 1.5 if enabled else 1.0,
            },
        )


def quiet(line: str) -> None:
    """Ignore progress."""


def test_a_pair_differs_in_speculation_alone_and_every_salt_is_new() -> None:
    server = ScriptedServer()
    pairs = Bench(server, "demo", quiet).pairs(WORKLOAD, 2)
    assert [len(pair.plain) for pair in pairs] == [len(pair.speculative) for pair in pairs] == [3, 3]
    assert server.num_at_once == [1] * 12
    salts = [body.pop("cache_salt") for body in server.bodies]
    assert len(set(salts)) == 12
    enabled = [body.pop("speculative")["enabled"] for body in server.bodies]
    # The order of plain and drafted alternates, by prompt and by pair.
    assert enabled == [False, True, True, False, False, True, True, False, False, True, True, False]
    for first, second in zip(server.bodies[::2], server.bodies[1::2], strict=True):
        assert first == second
    assert server.bodies[0] == {
        "model": "demo",
        "prompt": [1, 2, 3],
        "max_tokens": 3,
        "temperature": 0.0,
        "seed": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_a_pair_keeps_texts_and_figures() -> None:
    (pair,) = Bench(ScriptedServer(), "demo", quiet).pairs(WORKLOAD, 1)
    assert [sample.text for sample in pair.plain] == [
        "".join(f"<token {first}.{i}>" for i in range(3)) for first in (1, 4, 7)
    ]
    assert pair.mismatches() == []
    assert pair.ratio == 2.0
    assert [sample.timing for sample in pair.plain] == [Timing(3, 1.0, 8.0)] * 3
    assert [sample.num_draft_tokens for sample in pair.speculative] == [2, 2, 2]
    assert [sample.tokens_per_step for sample in pair.speculative] == [1.5, 1.5, 1.5]


def test_a_text_that_speculation_changed_is_found() -> None:
    (pair,) = Bench(ScriptedServer(changed=4), "demo", quiet).pairs(WORKLOAD, 1)
    assert pair.mismatches() == [1]


def test_warm_runs_share_a_salt_that_has_the_outputs() -> None:
    server = ScriptedServer(cached=2)
    bench = Bench(server, "demo", quiet)
    outputs = bench.outputs(WORKLOAD, "salt")
    assert [body["prompt"][0] for body in server.bodies] == [1, 4, 7]
    bench.warm_pair(WORKLOAD, "salt")
    assert outputs == [(2, 3, 4), (5, 6, 7), (8, 9, 10)]
    assert {body["cache_salt"] for body in server.bodies} == {"salt"}


def test_concurrent_streams_are_plain_and_each_round_goes_on_in_the_prompts() -> None:
    server = ScriptedServer()
    rates = Bench(server, "demo", quiet).concurrent(WORKLOAD, num_streams=2, rounds=2)
    # Two streams, a token each every 4 s.
    assert rates == [0.5, 0.5]
    assert server.num_at_once == [2, 2]
    assert [body["prompt"][0] for body in server.bodies] == [1, 4, 7, 1]
    assert not any(body["speculative"]["enabled"] for body in server.bodies)
    assert len({body["cache_salt"] for body in server.bodies}) == 4


class ScriptedDecoder:
    """Replaces a reference process: scripted tokens, a second a token."""

    def __init__(self, outputs: Sequence[Sequence[int]]) -> None:
        self.prompts: list[tuple[int, ...]] = []
        self._outputs = outputs

    def generate(self, prompt_ids: Sequence[int], num_tokens: int) -> tuple[list[int], Timing]:
        self.prompts.append(tuple(prompt_ids))
        return list(self._outputs[len(self.prompts) - 1]), Timing(num_tokens, 0.01, num_tokens - 1)


OUTPUTS = [(2, 3, 4), (5, 6, 7), (8, 9, 10)]


def test_references_run_every_prompt_and_count_equal_outputs() -> None:
    engine, transformers = ScriptedDecoder(OUTPUTS), ScriptedDecoder([(2, 3, 4), (0, 0, 0), (8, 9, 10)])
    server = ScriptedServer()
    one = Bench(server, "demo", quiet).references(WORKLOAD, OUTPUTS, engine, transformers)
    prompts = [prompt.token_ids for prompt in PROMPTS]
    assert engine.prompts == transformers.prompts == [tuple(body["prompt"]) for body in server.bodies] == prompts
    assert one.num_equal_outputs == 2
    assert one.transformers == [Timing(3, 0.01, 2)] * 3
    # 4 s a token at the client, one second in the engine.
    assert one.added_ms() == [3000.0] * 3


def test_an_engine_with_other_tokens_is_no_reference() -> None:
    bench = Bench(ScriptedServer(), "demo", quiet)
    engine = ScriptedDecoder([(2, 3, 99), *OUTPUTS[1:]])
    with pytest.raises(UnexpectedAnswerError, match="prompt 0"):
        bench.references(WORKLOAD, OUTPUTS, engine, ScriptedDecoder(OUTPUTS))


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (ScriptedServer(drafted=1), "plain request was drafted for"),
        (ScriptedServer(cached=2), "were cached"),
    ],
)
def test_a_run_that_is_not_cold_and_plain_is_refused(server: ScriptedServer, message: str) -> None:
    with pytest.raises(UnexpectedAnswerError, match=message):
        Bench(server, "demo", quiet).warm_up(WORKLOAD)


def test_an_output_of_another_length_is_refused() -> None:
    with pytest.raises(UnexpectedAnswerError, match="3 tokens, not 4"):
        Bench(ScriptedServer(), "demo", quiet).warm_up(PairWorkload("code", PROMPTS, num_tokens=4))
