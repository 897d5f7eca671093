"""The memory plan names the flag at fault before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foretoken.drafting import FINAL_NORM
from foretoken.errors import ConfigError
from foretoken.models.backend import CPU, Backend
from foretoken.models.device_llama import DeviceLlama
from tests.foretoken.test_device_pass import SIZES, loaded
from tests.foretoken.test_models import random_model
from verifier_svc.config import VerifierSettings
from verifier_svc.model.memory_plan import make_plan
from verifier_svc.model.sizes import with_sizes
from verifier_svc.model.target import memory_plan, pass_row_bytes
from verifier_svc.progress_lines import ProgressLines

DEMO = Path(__file__).parents[3] / "models" / "demo" / "target"


def settings(**fields: int) -> VerifierSettings:
    return VerifierSettings(model=DEMO, served_model_name="demo", address="unix:/none", **fields)


def test_the_demo_fits_and_says_where_memory_goes() -> None:
    plan = memory_plan(with_sizes(settings(), CPU), CPU)
    assert plan.max_model_len == 2048
    assert plan.num_blocks * plan.block_size >= 2048
    text = str(plan)
    assert "weights" in text and "KV cache" in text and f"{plan.num_blocks} blocks of 16 tokens" in text


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"context_length": 4096}, "--context-length"),
        ({"max_total_tokens": 999_999_999_999}, "--max-total-tokens"),
        ({"max_total_tokens": 100}, "--max-total-tokens"),
    ],
)
def test_what_cannot_start_is_refused_by_flag(fields: dict[str, int], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        memory_plan(settings(**fields), CPU)


def test_the_least_cache_is_named_and_is_enough() -> None:
    """A context of 100 tokens and a tree of 8 are 108, in blocks of 16: seven."""
    with pytest.raises(ConfigError, match=r"--max-total-tokens: expected at least 112 \(.*\), got 1;"):
        memory_plan(settings(max_total_tokens=1, context_length=100), CPU)
    with pytest.raises(ConfigError, match="expected at least 112"):
        memory_plan(settings(max_total_tokens=111, context_length=100), CPU)
    assert memory_plan(settings(max_total_tokens=112, context_length=100), CPU).num_blocks == 7


def test_weights_that_leave_no_room_name_the_way_out() -> None:
    with pytest.raises(ConfigError, match="--context-length"):
        make_plan(settings(), weights_bytes=10**15, bytes_per_token=8192, max_model_len=2048)


def test_a_gpu_plan_is_of_its_own_memory_and_names_its_buffers() -> None:
    room, buffers = 2**30, 2**20
    sizes = {"weights_bytes": 2**28, "bytes_per_token": 8192, "max_model_len": 2048}
    plan = make_plan(settings(max_running_requests=1024), **sizes, available=room, buffers_bytes=buffers)
    left = room - 2**28 - buffers
    assert left - plan.block_size * 8192 < plan.cache_bytes <= left
    assert "buffers" in str(plan) and "1.0 MiB" in str(plan)
    with pytest.raises(ConfigError, match="--max-total-tokens"):
        make_plan(settings(), **sizes, available=room, buffers_bytes=room)


@pytest.mark.parametrize("name", ["llama", "llama, head dimension 80, no groups"])
def test_the_plan_has_all_buffers_of_a_pass(name: str, tmp_path: Path, device: str) -> None:
    """Those of passes that want few logits, too, and hidden
    states of as many layers as may be kept.
    """
    random_model(name).save_pretrained(tmp_path)
    config, weights, cache = loaded(tmp_path, Backend("gpu", torch.device(device)), torch.float32)
    model = DeviceLlama(config, weights, cache, 64, SIZES)
    model._loaded((0, 1, config.num_layers, FINAL_NORM))
    model._loaded((), wants_few=True)
    buffers = model._passes._buffers._buffers.values()
    assert sum(each.nbytes for each in buffers) == SIZES.rows * pass_row_bytes(config, torch.float32)


def test_progress_is_shown_for_what_takes_long_only(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    show = ProgressLines(clock=lambda: now)
    for done in range(5):
        now += 0.1
        show(done, 5, "loading")
    assert capsys.readouterr().err == ""
    now += 1.0
    show(5, 10, "checking")
    show(6, 10, "checking")
    assert capsys.readouterr().err == "verifier: checking 50%\n"


def test_progress_that_was_shown_is_shown_to_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    show = ProgressLines(clock=lambda: now)
    now = 1.0
    show(2, 3, "checking")
    show(3, 3, "checking")
    show(3, 3, "checking")
    show(1, 1, "loading")
    assert capsys.readouterr().err == "verifier: checking 66%\nverifier: checking 100%\n"
    # Nothing is known between beginning and end.
    now = 2.0
    show(0, 1, "timing")
    show(1, 1, "timing")
    assert capsys.readouterr().err == "verifier: timing\nverifier: timing 100%\n"


@pytest.mark.parametrize(
    ("field", "value"),
    [("mem_fraction_static", 0.5), ("disable_cuda_graph", True), ("attention_backend", "triton"), ("numerics", "fast")],
)
def test_flags_of_a_gpu_are_refused_on_a_cpu(field: str, value: float | str) -> None:
    with pytest.raises(ConfigError, match=f"--{field.replace('_', '-')}( fast)? has an effect on a GPU only"):
        memory_plan(settings(**{field: value}), CPU)
