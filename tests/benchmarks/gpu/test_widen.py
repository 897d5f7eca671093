"""A widened model has the small one's logits, greedy text and drafts, with every size larger."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from benchmarks.gpu.checkpoint import DEMO, ModelSizes
from benchmarks.gpu.widen import (
    COPIES,
    RESERVED_ID,
    LayerSizes,
    WidenError,
    Widening,
    place_layers,
    split,
    widen,
)
from benchmarks.gpu.widen_check import compare, reserved_margins
from foretoken.models.config import load_config
from foretoken.models.draft_config import head_captured_layers, head_config
from foretoken.models.weights import Checkpoint
from models.demo.held_out import held_out_prompts
from tests.foretoken.test_models import Paged
from tests.foretoken.test_models import load as load_target

# Odd sizes where possible: none is a multiple of the small model's.
SHAPE = ModelSizes(
    hidden_size=1200,
    intermediate_size=1040,
    num_layers=11,
    num_heads=12,
    num_kv_heads=3,
    head_dim=128,
    vocab_size=8448,
)
SMALL, SMALL_HEAD = DEMO / "target", DEMO / "eagle3"
PROMPTS = [
    prompt.token_ids for prompt in held_out_prompts(Tokenizer.from_file(str(SMALL / "tokenizer.json")), 2, 40, 80)
]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    widen(SMALL, SMALL_HEAD, folder, SHAPE, draft_vocab_size=8320)
    return folder


@pytest.mark.slow
def test_the_function_is_the_same(wide: Path) -> None:
    found = compare(SMALL, SMALL_HEAD, wide, PROMPTS, 24)
    assert found.failures() == []
    assert found.logit_error < 2e-5 and found.draft_error < 2e-5
    assert found.num_other_tokens == 0 and found.num_other_drafts == 0
    assert found.num_positions == sum(len(prompt) + 24 for prompt in PROMPTS)


@pytest.mark.slow
def test_another_function_is_found_out(wide: Path, tmp_path: Path) -> None:
    shutil.copytree(wide, tmp_path / "wrong")
    file = tmp_path / "wrong" / "target" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_theta": 500_000.0}))
    assert compare(SMALL, SMALL_HEAD, tmp_path / "wrong", PROMPTS[:1], 4).failures()


def test_our_own_forward_pass_agrees(wide: Path) -> None:
    tokens = np.array(PROMPTS[0], np.int32)
    batch = Paged(1).prefill(0, tokens, 0, len(tokens))
    small = load_target(SMALL).forward(batch).clone()
    found = load_target(wide / "target").forward(batch)
    assert float((found[:, :8192] - small).norm() / small.norm()) < 2e-5
    assert torch.equal(found.argmax(dim=1), small.argmax(dim=1))


def test_every_part_is_larger_and_stored_as_bfloat16(wide: Path) -> None:
    target, head = load_config(wide / "target"), head_config(wide / "eagle3")
    for config in (target, head.body):
        assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (1200, 1040, 8448)
        assert (config.num_heads, config.num_kv_heads, config.head_dim) == (12, 3, 128)
    assert target.num_layers == 11 and head.draft_vocab_size == 8320
    # The layers that engines take if a config names none.
    assert head_captured_layers(head, 11) == (2, 5, 8)
    for folder, integers in ((wide / "target", set()), (wide / "eagle3", {"d2t", "t2d"})):
        with Checkpoint(folder) as checkpoint:
            assert {checkpoint.dtype(name) for name in checkpoint.names - integers} == {torch.bfloat16}


def test_added_rows_of_the_vocabulary(wide: Path) -> None:
    with Checkpoint(wide / "target") as checkpoint:
        head = checkpoint.read("lm_head.weight", (8448, 1200))
        assert (head[8192:] == head[RESERVED_ID]).all()
        assert not checkpoint.read("model.embed_tokens.weight", (8448, 1200))[8192:].any()


def test_added_layers_cost_as_much_and_write_nothing(wide: Path) -> None:
    with Checkpoint(wide / "target") as checkpoint:
        for layer in (7, 9, 10):
            prefix = f"model.layers.{layer}"
            assert not checkpoint.read(f"{prefix}.self_attn.o_proj.weight", (1200, 1536)).any()
            assert not checkpoint.read(f"{prefix}.mlp.down_proj.weight", (1200, 1040)).any()
            assert checkpoint.read(f"{prefix}.self_attn.q_proj.weight", (1536, 1200)).float().std() > 0.01


def test_the_reserved_id_is_the_farthest_from_being_sampled() -> None:
    assert reserved_margins(SMALL, PROMPTS, [RESERVED_ID])[RESERVED_ID] < -8


def test_layers_stand_between_the_captured_layers() -> None:
    assert place_layers(8, 32, (2, 5, 7), (2, 16, 29)) == [0, 1, 2, 3, 4, 16, 17, 29]
    with pytest.raises(WidenError, match="do not fit"):
        place_layers(8, 10, (2, 5, 7), (2, 4, 8))


def test_a_split_number_is_nearly_itself() -> None:
    values = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    terms = split(values)
    assert {term.dtype for term in terms} == {torch.bfloat16} and len(terms) == COPIES
    assert ((sum(term.double() for term in terms) - values).abs() <= values.abs() * 2.0**-24).all()


@pytest.mark.parametrize("field", ["hidden", "middle", "kv_heads", "head_dim"])
def test_a_shape_that_is_too_small_is_refused(field: str) -> None:
    small = LayerSizes(hidden=32, middle=64, heads=6, kv_heads=2, head_dim=16)
    wide = {"hidden": 96, "middle": 64, "heads": 6, "kv_heads": 2, "head_dim": 16}
    Widening(small, LayerSizes(**wide))
    with pytest.raises(WidenError):
        Widening(small, LayerSizes(**(wide | {field: wide[field] - 1})))
