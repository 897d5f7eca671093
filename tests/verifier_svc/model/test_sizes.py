"""Sizes that the settings leave to the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken.models.backend import CPU, Backend
from verifier_svc.config import DEFAULT_NODES, VerifierSettings
from verifier_svc.model import sizes
from verifier_svc.model.sizes import GPU_NODES, GPU_RUNNING, TOKENS_OF_ONE, with_sizes
from verifier_svc.model.target import memory_plan

DEMO = Path(__file__).parents[3] / "models" / "demo" / "target"
GPU = Backend("gpu", torch.device("cuda"))
GIB = 2**30


def settings(**fields: Any) -> VerifierSettings:
    return VerifierSettings(model=DEMO, served_model_name="demo", address="unix:/none", **fields)


def on_gpu(monkeypatch: pytest.MonkeyPatch, free_bytes: int, **fields: Any) -> VerifierSettings:
    """Return the sizes for a GPU with so much free memory."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free_bytes, free_bytes))
    return with_sizes(settings(attention_backend="triton", **fields), GPU)


def test_a_cpu_has_its_own_sizes() -> None:
    sized = with_sizes(settings(), CPU)
    assert (sized.max_running_requests, sized.chunked_prefill_size) == (64, 512)


@pytest.mark.parametrize("backend", [CPU, GPU])
def test_what_is_set_stays(monkeypatch: pytest.MonkeyPatch, backend: Backend) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (GIB, GIB))
    given = settings(max_running_requests=3, chunked_prefill_size=70, speculative_num_draft_tokens=5)
    assert with_sizes(given, backend) == given


def test_a_gpu_drafts_large_trees_where_their_shape_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    for fields, nodes in (({}, GPU_NODES), ({"speculative_num_steps": 5}, DEFAULT_NODES)):
        assert on_gpu(monkeypatch, 80 * GIB, **fields).speculative_num_draft_tokens == nodes
        assert with_sizes(settings(**fields), CPU).speculative_num_draft_tokens == DEFAULT_NODES


def test_a_large_gpu_runs_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    sized = on_gpu(monkeypatch, 80 * GIB)
    assert (sized.max_running_requests, sized.chunked_prefill_size) == (512, 2048)


def test_the_number_follows_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number is the largest whose sequences have room in the cache, beside its buffers."""
    seen = set()
    for tenths in range(30, 90):
        sized = on_gpu(monkeypatch, tenths * GIB // 10)
        count = sized.max_running_requests
        seen.add(count)
        if count > GPU_RUNNING[-1]:
            assert memory_plan(sized, GPU).num_tokens >= count * TOKENS_OF_ONE
        if count < GPU_RUNNING[0]:
            larger = GPU_RUNNING[GPU_RUNNING.index(count) - 1]
            assert not sizes._fits(sized, GPU, larger)
    assert seen == set(GPU_RUNNING)


def test_a_cache_of_a_given_size_bounds_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_gpu(monkeypatch, 80 * GIB, max_total_tokens=300 * TOKENS_OF_ONE).max_running_requests == 256
    assert on_gpu(monkeypatch, 80 * GIB, max_total_tokens=4096).max_running_requests == 64


def test_short_contexts_need_less(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_gpu(monkeypatch, 80 * GIB, max_total_tokens=512 * 128, context_length=128).max_running_requests == 512
