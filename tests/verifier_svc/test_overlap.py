"""Overlapped steps write what plain decode writes on the CPU. On a GPU, or Triton's interpreter.

tests/gpu/test_same_text.py covers steps on the GPU that wait for the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from foretoken.drafting import FINAL_NORM
from foretoken.sampling import SamplingParams
from tests.support import on_device
from tests.support.deployments import BLOCK, SeenHarness, Target, Targets
from tests.support.engine_harness import Request, Result
from tests.support.fitted_models import text
from tests.support.grammars import END, VOCAB, ids_of, regex
from tests.support.oracle_drafter import OracleDrafter
from verifier_svc.messages import SequenceKey
from verifier_svc.overlap import blocks as overlap_blocks
from verifier_svc.sampling.grammar import Vocabulary, compile_grammar


def plain_on_cpu(target: Target, requests: list[Request]) -> list[Result]:
    return target.harness({}).run([request.plain() for request in requests])


def num_ahead(harness: SeenHarness) -> int:
    """Return the number of overlapped steps."""
    return harness.engine.counters.num_overlapped_steps


def num_ordinary(harness: SeenHarness) -> int:
    return harness.engine.counters.num_steps - num_ahead(harness)


def facts(results: list[Result]) -> list[object]:
    found: list[object] = []
    for result in results:
        assert result.finished is not None
        stats = result.finished.speculation
        found.append((result.token_ids, result.finished.reason, result.finished.stop_token_id, stats.num_decode_steps))
    return found


PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=9),
    SamplingParams(temperature=0.9, seed=5, max_tokens=5, presence_penalty=0.4, repetition_penalty=1.2),
    SamplingParams(
        temperature=1.0, seed=2**63 + 1, max_tokens=7, top_k=9, top_p=0.9, logit_bias={5: 2.0}, min_tokens=3
    ),
]


@pytest.mark.slow
def test_plain_decode(targets: Targets, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run serves sequences that end at different times and get new blocks meanwhile."""
    monkeypatch.setattr(overlap_blocks, "_TOKENS_AHEAD", 0)
    target = targets["llama"]
    requests = [Request(text(1, 20 + 3 * i), params) for i, params in enumerate(PARAMS)]
    ahead = on_device.harness(target, (), device)
    assert facts(ahead.run(requests)) == facts(plain_on_cpu(target, requests))
    assert num_ahead(ahead) > 8 and num_ordinary(ahead) == 0
    assert ahead.blocks.num_free_blocks == ahead.blocks.num_blocks


def drafted(
    targets: Targets,
    device: str,
    requests: list[Request],
    spoil: Callable[[int], bool] = lambda number: False,
    look: Callable[[SeenHarness], None] = lambda harness: None,
) -> tuple[list[Result], SeenHarness, OracleDrafter]:
    """Run the requests with a drafter that knows plain decode's texts.

    ``look`` is called before each step's events are handed out.
    """
    target = targets["llama"]
    plain = plain_on_cpu(target, requests)
    texts = [[*request.prompt, *result.token_ids, 3] for request, result in zip(requests, plain, strict=True)]
    oracle = OracleDrafter(
        texts,
        device,
        captured_layers=(1, FINAL_NORM),
        width=2 * target.config.hidden_size,
        dtype=torch.float32,
        batch_rows=on_device.MAX_RUNNING,
        nodes=6,
        block_size=BLOCK,
        spoil=spoil,
    )
    harness = on_device.harness(target, (), device, max_nodes=6, num_steps=3, sources=[oracle])
    receive = harness.engine.lifecycle.count_overlapped_step

    def count_step(seconds: float) -> None:
        look(harness)
        receive(seconds)

    harness.engine.lifecycle.count_overlapped_step = count_step  # type: ignore[method-assign]
    results = harness.run(requests)
    for result, expected in zip(results, plain, strict=True):
        assert result.token_ids == expected.token_ids
    harness.drain()
    return results, harness, oracle


@pytest.mark.slow
def test_trees(targets: Targets, device: str) -> None:
    """Nodes are accepted and refused, KV entries move, and sequences end within a run.

    The drafter checks what it is sent.
    """
    requests = [Request(text(1, 20 + 3 * i), params) for i, params in enumerate(PARAMS)]
    results, harness, oracle = drafted(targets, device, requests)
    assert num_ordinary(harness) == 0 and oracle.num_prompt_rows == 3 + 1
    # All is one run, after whose last step nobody drafts.
    assert num_ahead(harness) > 3 and oracle.numbers == list(range(1, num_ahead(harness)))
    # The hidden states of the prompts were in device memory.
    assert list(oracle.num_without_hidden.values()) == [1] * 3
    for result in results:
        assert result.finished is not None
        stats = result.finished.speculation
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
        assert sum(1 for source in result.sources if source == 1) == stats.num_accepted_tokens
    drafter = harness.speculator.drafters[0]
    assert drafter.counters.num_accepted_tokens > 0
    assert drafter.record.watch.num_drafts == drafter.counters.num_drafts > 0


@pytest.mark.slow
def test_trees_in_blocks_of_one_that_has_ended(targets: Targets, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its step in flight writes nowhere; the blocks hold the new owner's KV entries."""
    monkeypatch.setattr(overlap_blocks, "_TOKENS_AHEAD", 0)
    requests = [
        Request(text(5, 24), SamplingParams(temperature=0.0, max_tokens=7)),
        Request(text(6, 24), SamplingParams(temperature=0.0, max_tokens=40)),
    ]
    tables: dict[SequenceKey, set[int]] = {}

    def look(harness: SeenHarness) -> None:
        for sequence in harness.scheduler.running:
            tables.setdefault(sequence.key, set()).update(sequence.block_ids)

    _, harness, _ = drafted(targets, device, requests, look=look)
    short, long = tables.values()
    assert short & long
    assert num_ordinary(harness) == 0


@pytest.mark.slow
def test_trees_that_never_come(targets: Targets, device: str) -> None:
    requests = [Request(text(2, 24), SamplingParams(temperature=0.0, max_tokens=16))]
    results, harness, _ = drafted(targets, device, requests, spoil=lambda number: number % 2 == 1)
    assert num_ahead(harness) > 3
    assert results[0].finished is not None and results[0].finished.speculation.fallback_steps > 0


@pytest.mark.slow
def test_a_new_request_joins_the_run(targets: Targets, device: str) -> None:
    """It wants logprobs, which come with the steps' results."""
    target = targets["llama"]
    long = Request(text(3, 20), SamplingParams(temperature=0.0, max_tokens=14))
    short = Request(text(4, 20), SamplingParams(temperature=0.0, max_tokens=4, logprobs=1))
    expected = [result.token_ids for result in plain_on_cpu(target, [long, short])]
    harness = on_device.harness(target, (), device)
    first = harness.submit(long)
    receive = harness.engine.lifecycle.count_overlapped_step
    keys = [first]

    def count_step(seconds: float) -> None:
        receive(seconds)
        if len(keys) == 1:
            keys.append(harness.submit(short))

    harness.engine.lifecycle.count_overlapped_step = count_step  # type: ignore[method-assign]
    while not all(harness.results[key].is_done for key in keys):
        harness.step()
    assert [harness.results[key].token_ids for key in keys] == expected
    assert num_ordinary(harness) == 0 and harness.num_steps == 1
    assert len(harness.results[keys[1]].logprobs) == 4


MASKED: dict[str, dict[str, Any]] = {
    "grammar": {"grammar": regex("[abcd0-9]{2,30}x?"), "min_tokens": 3},
    "short": {"grammar": regex("(ab|cd|[0-9]){3}")},
    "allowed": {"allowed_token_ids": tuple(token for token in range(VOCAB) if token not in ids_of("3", "x"))},
    "bad words": {"bad_token_ids": (tuple(ids_of("5")), tuple(ids_of("a", "b")), tuple(ids_of("99", "ab", "cd")))},
}


def masked_requests(target: Target, *, looks_ahead: bool = True, max_tokens: int = 8) -> list[Request]:
    """Return a request of each kind of masks, some with
    other rules beside them, and one without.
    """
    words = Vocabulary(target.folder, vocab_limit=VOCAB, eos_ids=frozenset({END}))
    found = [Request(text(1, 20), SamplingParams(temperature=0.0, max_tokens=max_tokens))]
    for number, (name, fields) in enumerate(MASKED.items()):
        rules = PARAMS[number % len(PARAMS)]
        params = replace(rules, logprobs=2 if number % 2 else None, max_tokens=max_tokens, **fields)
        matcher = compile_grammar(fields["grammar"], words) if "grammar" in fields else None
        if matcher is not None and looks_ahead:
            matcher.look_ahead()
        found.append(Request(text(number, 20 + number), params, matcher=matcher, cache_salt=name))
    return found


def assert_near(found: list[Result], expected: list[Result]) -> None:
    """Assert equal texts and ends, and logprobs that differ by rounding alone."""
    assert facts(found) == facts(expected)
    for have, want in zip(found, expected, strict=True):
        pairs = zip(have.logprobs, want.logprobs, strict=True)
        assert all(each.logprob == pytest.approx(other.logprob, abs=1e-4) for each, other in pairs)


@pytest.mark.slow
def test_masks_in_plain_decode(targets: Targets, device: str) -> None:
    target = targets["llama"]
    requests = masked_requests(target)
    ahead = on_device.harness(target, (), device)
    assert_near(ahead.run(requests), plain_on_cpu(target, requests))
    assert num_ordinary(ahead) == 0


@pytest.mark.slow
@pytest.mark.parametrize("looks_ahead", [True, False])
def test_masks_of_trees(targets: Targets, device: str, looks_ahead: bool) -> None:
    """Drafted tokens are accepted as far as the masks of their nodes are known."""
    target = targets["llama"]
    requests = masked_requests(target, looks_ahead=looks_ahead)
    results, harness, _ = drafted(targets, device, requests)
    for result, want in zip(results, plain_on_cpu(target, requests), strict=True):
        assert result.finished is not None and want.finished is not None
        assert result.finished.reason == want.finished.reason
        assert len(result.logprobs) == len(want.logprobs)
    assert num_ordinary(harness) == 0
    accepted = [result.finished.speculation.num_accepted_tokens for result in results if result.finished]
    assert sum(accepted[1:3]) > 0 if looks_ahead else accepted[1:3] == [0, 0]
    assert sum(accepted[3:]) > 0


@pytest.mark.slow
def test_a_short_tree_with_masks(targets: Targets, device: str) -> None:
    """Both halves of a step, beside a row without masks."""
    target = targets["llama"]
    words = Vocabulary(target.folder, vocab_limit=VOCAB, eos_ids=frozenset({END}))
    matcher = compile_grammar(regex("[abcd0-9]{40}"), words)
    matcher.look_ahead()
    plain = SamplingParams(temperature=0.0, max_tokens=6)
    masked = replace(plain, grammar=regex("[abcd0-9]{40}"))
    requests = [Request(text(1, 20), plain), Request(text(2, 20), masked, matcher=matcher)]
    results, harness, _ = drafted(targets, device, requests)
    assert num_ordinary(harness) == 0
    assert results[1].finished is not None and results[1].finished.speculation.num_accepted_tokens > 0
