"""Plans for FlashInfer, evaluated in plain PyTorch, describe the defined attention.

FlashInfer itself: tests/gpu/test_flashinfer.py.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch

from foretoken.kv_cache import KVCache
from foretoken.models.attention_plan import planned_rows
from foretoken.models.backend import CPU, Backend
from foretoken.models.batch import ForwardBatch, chain_batch
from foretoken.models.config import load_config
from foretoken.models.decoder_weights import load_decoder_weights
from foretoken.models.device_batch import runs_of
from foretoken.models.device_llama import DeviceLlama
from foretoken.models.device_sizes import PassSizes
from foretoken.models.flashinfer_attention import FlashInferAttention, compile_kernels, obstacle
from foretoken.models.llama import HostLlama
from foretoken.models.weights import Checkpoint
from foretoken.sampling import SamplingParams, SpeculationOptions
from tests.foretoken import test_device_pass
from tests.kernels.attention_cases import Rows, case, prefill, rooted, tree
from tests.support import on_device, plain_flashinfer
from tests.support.deployments import KINDS, Targets
from tests.support.engine_harness import Request
from tests.support.fitted_models import text
from tests.support.planned_case import attend, config_of, forward_batch
from tests.support.tiny_checkpoint import save_llama

HEADS = (4, 2, 16)


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", plain_flashinfer)


def ragged(seed: int) -> list[Rows]:
    """Return prompt chunks, roots, chains and trees, some without context, in random order."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(0, 90, 9).tolist()
    chain = Rows([(lengths[0] + 1, (1 << i) - 1 & ~1) for i in range(1, 7)], lengths[0])
    made = [
        prefill(lengths[1], 9),
        prefill(lengths[2], 70),
        prefill(0, 66),
        prefill(lengths[3], 1),
        chain,
        tree(lengths[4], 13, generator),
        tree(0, 5, generator),
        rooted(tree(lengths[5], 8, generator)),
        rooted(tree(lengths[6], 100, generator)),
        # Rows that are run again, a chunk, and a tree after it.
        Rows([*prefill(lengths[7], 4).rows, *rooted(tree(lengths[7] + 3, 20, generator)).rows[1:]], lengths[7] + 3),
        # Stretches that do not grow by one KV slot at a time.
        Rows([(lengths[8] + 1, 0), (lengths[8] + 4, 0), (lengths[8] + 4, 0)]),
        # Bits that go on where the context ends, and bits after a gap.
        Rows([(lengths[8] + 4, 48), (lengths[8] + 4, 32), (lengths[8] + 6, 64)], lengths[8]),
    ]
    return [made[i] for i in generator.permutation(len(made))]


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(3))
def test_plans_describe_the_defined_attention(seed: int, block_size: int, tmp_path: Path, device: str) -> None:
    batch = case(ragged(seed), HEADS, block_size, device, words=2, seed=seed)
    found = attend(batch, config_of(HEADS, tmp_path))
    torch.testing.assert_close(found.double(), batch.defined().to(found.device), rtol=0, atol=1e-5)


def test_long_stretches_are_planned_apart_and_without_masks(device: str) -> None:
    generator = np.random.default_rng(0)
    seqs = [
        rooted(tree(20, 8, generator)),
        Rows([(41, 0)], 40),
        prefill(14336, 2048),
        prefill(0, 65),
        prefill(5, 64),
        Rows([(9, (2 << i) - 1) for i in range(30)], 9),
    ]
    batch = forward_batch(case(seqs, (1, 1, 16), 16, device))
    nodes, prompts, few = planned_rows(batch, runs_of(batch), 16, 4)
    assert [(part.first, part.end, part.is_prompt) for part in (nodes, prompts, few)] == [
        (0, 9, False),
        (9, 2122, True),
        (2122, 2216, False),
    ]
    assert nodes.masks is not None and prompts.masks is None and few.masks is None
    assert prompts.lengths.tolist() == [16384, 65] and few.lengths.tolist() == [69, 39]
    assert prompts.block_starts.tolist() == [0, 1024, 1029] and prompts.last_block_lens.tolist() == [16, 1]
    # A root alone needs no mask, but one plan has masks for all.
    assert len(nodes.masks.bits) == -(-8 * 28 // 8) + -(-41 // 8) and nodes.masks.bits[-6:].tolist() == [255] * 6


def test_prompts_and_others_in_turns_are_one_plan(device: str) -> None:
    """Each plan takes memory, so there are no more plans than expected."""
    some_tree = rooted(tree(20, 8, np.random.default_rng(0)))
    seqs = [prefill(0, 65), prefill(32, 1), prefill(7, 66), some_tree, prefill(0, 70)]
    batch = forward_batch(case(seqs, HEADS, 4, device))
    assert len(planned_rows(batch, runs_of(batch), 4, 5)) == 5
    (only,) = planned_rows(batch, runs_of(batch), 4, 4)
    assert (only.first, only.end, only.is_prompt) == (0, batch.num_rows, False) and only.masks is not None
    assert only.lengths.tolist() == [65, 33, 73, 28, 70]


def test_a_context_that_begins_late_is_refused(device: str) -> None:
    batch = forward_batch(case([prefill(8, 3, context_start=2)], HEADS, 4, device))
    with pytest.raises(ValueError, match="first KV slot"):
        planned_rows(batch, runs_of(batch), 4, 4)


def test_a_pass_with_trees_is_that_of_the_cpu(tmp_path: Path, device: str) -> None:
    save_llama(tmp_path)
    ours, theirs = test_device_pass.run_both(tmp_path, device, strict=False, planned=True)
    for expected, found in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


class Counted(FlashInferAttention):
    rows: tuple[int, ...] = ()

    def plan(self, batch: ForwardBatch, *others: object) -> None:
        self.rows += (batch.num_rows,)
        super().plan(batch, *others)  # type: ignore[arg-type]


def test_long_prompts_alone_are_planned_and_their_passes_are_the_cpus(tmp_path: Path, device: str) -> None:
    folder = save_llama(tmp_path, num_hidden_layers=1)
    config = load_config(folder)
    tokens = (np.arange(140) * 7 % 60).astype(np.int32)
    chunks = [
        chain_batch(tokens[:132], 0, 4, np.array([131], np.int32)),
        chain_batch(tokens[132:], 132, 4),
    ]
    found = []
    for backend, sizes in ((CPU, None), (Backend("gpu", torch.device(device)), PassSizes(160, 8, 1, 48))):
        with Checkpoint(folder) as checkpoint:
            weights = load_decoder_weights(config, checkpoint, torch.float32, lambda *_: None, backend)
        heads = config.num_kv_heads, config.head_dim
        cache = KVCache(config.num_layers, 40, 4, *heads, torch.float32, backend.device)
        # As on a used GPU: unwritten memory holds anything.
        cache.data.fill_(torch.nan)
        model: HostLlama | DeviceLlama
        if sizes is None:
            model = HostLlama(config, weights, cache, 256, 1)
        else:
            planned = Counted(config, cache)
            model = DeviceLlama(config, weights, cache, 256, sizes, flashinfer=planned)
        found.append(torch.cat([model.forward(chunk).cpu().clone() for chunk in chunks]))
    assert planned.rows == (132,)
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_text_with_every_pass_planned_is_that_of_the_cpu(targets: Targets, device: str) -> None:
    target = targets[KINDS["NGRAM"][0]]
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=6)
    requests = [Request(text(1 + i, 20), params, speculation=SpeculationOptions(drafter="ngram")) for i in range(2)]
    plain = target.harness({}, prefix_cache=False)
    expected = [result.token_ids for result in plain.run([request.plain() for request in requests])]
    plain.drain()
    harness = on_device.harness(target, KINDS["NGRAM"][1], device, flashinfer="all", overlap=False)
    assert [result.token_ids for result in harness.run(requests)] == expected
    assert sum(drafter.counters.num_accepted_tokens for drafter in harness.speculator.drafters) > 0


def test_both_kinds_of_kernel_are_compiled(
    tmp_path: Path, device: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    run = plain_flashinfer.BatchPrefillWithPagedKVCacheWrapper.run

    def seen_run(self: plain_flashinfer.BatchPrefillWithPagedKVCacheWrapper, *args: object, **options: object) -> None:
        seen.append((self.backend, self._mask is not None))
        run(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(plain_flashinfer.BatchPrefillWithPagedKVCacheWrapper, "run", seen_run)
    caplog.set_level("INFO")
    compile_kernels(config_of(HEADS, tmp_path), torch.float32, torch.device(device))
    assert seen == [("auto", False), ("fa2", True)]
    assert "FlashInfer's kernels ready" in caplog.text


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "version", "expected"),
    [
        ("cpu", torch.bfloat16, 128, "0.6.12", "needs an NVIDIA GPU"),
        ("cuda", torch.float32, 128, "0.6.12", "has no float32"),
        ("cuda", torch.bfloat16, 80, "0.6.12", "head size of 80"),
        ("cuda", torch.bfloat16, 128, None, "is not installed: pip install 'flashinfer-python>=0.6.12,<0.7'"),
        ("cuda", torch.bfloat16, 128, "0.6.9", "FlashInfer 0.6.9 is installed"),
        ("cuda", torch.bfloat16, 128, "0.7.0rc1", "FlashInfer 0.7.0rc1 is installed"),
        ("cuda", torch.bfloat16, 128, "0.6.12", None),
        ("cuda", torch.bfloat16, 64, "0.6.13.post1", None),
    ],
)
def test_what_speaks_against_it_is_said(
    device: str,
    dtype: torch.dtype,
    head_dim: int,
    version: str | None,
    expected: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def installed(name: str) -> str:
        assert name == "flashinfer-python"
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", installed)
    problem = obstacle(config_of((2, 1, head_dim), tmp_path), dtype, torch.device(device))
    assert problem is None if expected is None else expected in str(problem)
