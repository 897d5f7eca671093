"""Speculative text = plain text: demo model, n-gram drafter, strict float32, no tolerance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from drafter_svc.ngram.drafter import NgramDrafter
from drafter_svc.ngram.settings import NgramSettings
from foretoken.sampling import SamplingParams
from tests.support.engine_harness import Harness, Request, Result
from verifier_svc.model.runner import ModelRunner

DEMO = Path(__file__).parents[2] / "models" / "demo" / "target"
BLOCK = 16
NUM_BLOCKS = 256
# Repetitive on purpose: drafts are accepted, and refused where the text goes on differently.
PROMPTS = (
    "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\n    def __repr__(self):\n",
    "def test_add():\n    assert add(1, 2) == 3\n    assert add(2, 2) == 4\n    assert add(3, 2) == 5\n",
    "import os\n\nENCODINGS = {\n    'ascii': 'ascii',\n    'latin_1': 'latin_1',\n    'utf_8': 'utf_8',\n",
    "for i in range(10):\n    print(i)\nfor j in range(10):\n    print(j)\nfor k in range(10):\n",
)
TEMPERATURES = {"greedy": 0.0, "seeded 0.7": 0.7, "seeded 1.0": 1.0}


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    runner = ModelRunner(DEMO, threads=1, num_blocks=NUM_BLOCKS, block_size=BLOCK)
    runner.warm_up()
    assert runner.mode == "strict"
    return runner


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in PROMPTS]


def harness(runner: ModelRunner, *, drafter: bool, num_blocks: int = NUM_BLOCKS, chunk_tokens: int = 512) -> Harness:
    return Harness(
        runner,
        vocab_size=runner.config.vocab_size,
        num_blocks=num_blocks,
        block_size=BLOCK,
        max_model_len=320,
        eos_ids=frozenset(runner.config.eos_token_ids),
        drafters={"ngram": NgramDrafter(NgramSettings(capacity=100_000))} if drafter else None,
        chunk_tokens=chunk_tokens,
    )


def requests(prompts: Sequence[list[int]], temperature: float) -> list[Request]:
    params = SamplingParams(temperature=temperature, seed=11, max_tokens=90, ignore_eos=True, logprobs=2)
    out = [Request(prompt, params) for prompt in prompts]
    out.append(replace(out[0], choice_index=1))
    out.append(replace(out[1], sampling=replace(params, frequency_penalty=0.4, repetition_penalty=1.1, top_k=20)))
    out.append(replace(out[2], sampling=replace(params, prompt_logprobs=1, min_p=0.05, logit_bias={300: 1.5})))
    return out


def assert_same(expected: Sequence[Result], got: Sequence[Result]) -> None:
    for want, have in zip(expected, got, strict=True):
        assert have.token_ids == want.token_ids
        # Bit for bit: strict mode.
        assert have.logprobs == want.logprobs
        assert have.prompt_logprobs == want.prompt_logprobs


def assert_speculated(results: Sequence[Result]) -> None:
    stats = [result.finished.speculation for result in results if result.finished]
    longest = max(max((k for k, n in enumerate(s.acceptance_histogram) if n), default=0) for s in stats)
    assert longest >= 2, "no run of two drafted tokens was accepted"
    assert any(s.num_accepted_tokens < s.num_draft_tokens for s in stats), "no drafted token was refused"


@pytest.mark.parametrize(
    "temperature",
    [pytest.param(t, id=name, marks=[pytest.mark.slow] if t else []) for name, t in TEMPERATURES.items()],
)
def test_alone_and_in_mixed_batches_with_preemption(
    runner: ModelRunner, prompts: list[list[int]], temperature: float
) -> None:
    wanted = requests(prompts, temperature)
    expected = [harness(runner, drafter=False).run([request.plain()])[0] for request in wanted]
    alone = []
    for request in wanted:
        run = harness(runner, drafter=True)
        alone += run.run([request])
        run.drain()
    assert_same(expected, alone)
    assert_speculated(alone)
    mixed = harness(runner, drafter=True, num_blocks=36, chunk_tokens=48)
    got = mixed.run(wanted)
    mixed.drain()
    assert_same(expected, got)
    assert_speculated(got)
    assert mixed.scheduler.num_preemptions > 0


def test_prefix_hits_and_drafter_deaths(runner: ModelRunner, prompts: list[list[int]]) -> None:
    wanted = requests([prompt * 3 for prompt in prompts], 0.0)
    expected = [harness(runner, drafter=False).run([request.plain()])[0] for request in wanted]
    run = harness(runner, drafter=True)
    source = run.sources[0]
    kill_and_restart = source.dies_and_returns(every=20, dies_at=10, returns_at=15)
    first = run.run(wanted, every_step=kill_and_restart)
    again = run.run(wanted, every_step=kill_and_restart)
    run.drain()
    assert_same(expected, first)
    assert_same(expected, again)
    assert_speculated(again)
    assert source.num_attaches > 3
    assert all(r.finished is not None for r in again)
    hits = [r.finished.num_cached_tokens for r in again[:-1] if r.finished]
    assert min(hits) > 0, "the second round found nothing in the prefix cache"
