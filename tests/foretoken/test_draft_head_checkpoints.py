"""Loading draft heads: weights shared with the target, token maps, element types, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter_svc.checkpoint.model_folder import check_head_folder
from foretoken.errors import CheckpointError, ConfigError
from foretoken.models.config import load_config
from foretoken.models.draft_config import head_config
from foretoken.models.draft_weights import head_rows
from foretoken.models.llama import HostLlama
from foretoken.models.target_weights import TargetWeights, load_target_weights
from foretoken.models.weights import Checkpoint
from tests.foretoken.test_draft_heads import PagedHead, load
from tests.foretoken.test_models import Paged, oracle
from tests.foretoken.test_models import load as load_target
from tests.references import head_files
from tests.references.head_files import HIDDEN, VOCAB, Tensors, write_folder

TOKENS = np.arange(20) * 7 % VOCAB


def extended(head: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and hidden states of 19 entries with random inputs."""
    hidden_states = torch.randn(19, head.hidden_width, generator=torch.Generator().manual_seed(4))
    return PagedHead(head).extend(TOKENS[1:], 1, hidden_states, from_target=True)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    head_files.random_target(tmp_path / "target")
    return tmp_path / "target"


@pytest.fixture
def eagle(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "eagle", *head_files.eagle_files())


@pytest.fixture
def eagle3(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "eagle3", *head_files.eagle3_files())


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def reconfigure(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


@pytest.mark.parametrize("tied", [False, True])
def test_target_weights_read_alone_are_those_of_the_loaded_target(tmp_path: Path, tied: bool) -> None:
    head_files.random_target(tmp_path, tied=tied)
    ours: HostLlama = load_target(tmp_path)
    loaded = TargetWeights.of(ours.config, ours._weights)
    alone = load_target_weights(tmp_path, load_config(tmp_path))
    for name in ("vocab_size", "hidden_size", "tied"):
        assert getattr(alone, name) == getattr(loaded, name)
    assert alone.head.dtype == loaded.head.dtype
    assert torch.equal(alone.head, loaded.head)
    assert torch.equal(alone.embedding, loaded.embedding)
    assert (alone.embedding is alone.head) == tied


def test_the_targets_weights_are_not_copied(target: Path, eagle: Path) -> None:
    weights = load_target_weights(target, load_config(target))
    shared = load(eagle, target, weights=weights)
    expected = extended(shared)[0].clone()
    weights.head.mul_(2)
    torch.testing.assert_close(extended(shared)[0], 2 * expected)
    assert shared.num_bytes < sum(file.stat().st_size for file in eagle.glob("*.safetensors"))


@pytest.mark.parametrize("narrow", [False, True])
def test_a_token_map_gives_those_logits_with_the_same_bits(target: Path, eagle: Path, narrow: bool) -> None:
    if narrow:
        rewrite(target, lambda tensors: tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()}))
    chosen = np.random.default_rng(0).permutation(VOCAB)[:45].astype(np.int32)
    full, few = load(eagle, target), load(eagle, target, token_map=chosen)
    assert few.target_ids is not None and few.target_ids.tolist() == chosen.tolist()
    assert few.draft_vocab_size == 45
    assert torch.equal(extended(few)[0], extended(full)[0][:, chosen.tolist()])
    assert few.num_bytes > full.num_bytes


def test_a_token_map_of_a_head_without_its_own_vocabulary(target: Path, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "head", *head_files.eagle3_files(head=False))
    chosen = np.array([5, 3, 100], np.int32)
    assert torch.equal(
        extended(load(folder, target, token_map=chosen))[0], extended(load(folder, target))[0][:, chosen.tolist()]
    )


@pytest.mark.parametrize("ids", [[], [1, 1], [-1], [VOCAB]])
def test_a_token_map_that_is_none(target: Path, ids: list[int]) -> None:
    with pytest.raises(ConfigError, match="token map"):
        head_rows(load_target_weights(target, load_config(target)), np.array(ids, np.int32))


def test_a_token_map_beside_d2t_is_refused(target: Path, eagle3: Path) -> None:
    with pytest.raises(ConfigError, match="token map is for heads that use the target's output head"):
        load(eagle3, target, token_map=np.array([1], np.int32))


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, torch.uint16), (torch.float16, torch.int16)])
@pytest.mark.parametrize("which", ["head", "target", "both"])
def test_16_bit_files_give_the_bits_of_their_wide_copies(
    target: Path, eagle3: Path, which: str, dtype: torch.dtype, bits: torch.dtype
) -> None:
    """Head and target have different element types."""
    narrow = {"head": [eagle3], "target": [target], "both": [eagle3, target]}[which]
    for folder in narrow:
        rewrite(folder, lambda t: t.update({k: v.to(dtype) for k, v in t.items() if v.is_floating_point()}))
    found = extended(load(eagle3, target))
    # Panels of 16 bits are bits.
    shared = load_target_weights(target, load_config(target))
    assert (shared.head.dtype == bits) == (target in narrow)
    bytes_narrow = load(eagle3, target).num_bytes
    for folder in narrow:
        rewrite(folder, lambda t: t.update({k: v.float() for k, v in t.items() if v.is_floating_point()}))
    expected = extended(load(eagle3, target))
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert (bytes_narrow < load(eagle3, target).num_bytes) == (which != "target")


@pytest.mark.parametrize(
    ("dtype", "share"), [pytest.param(torch.bfloat16, 0.05, marks=pytest.mark.slow), (torch.float16, 0.002)]
)
def test_a_16_bit_head_is_near_its_float32_self(target: Path, eagle3: Path, dtype: torch.dtype, share: float) -> None:
    expected = extended(load(eagle3, target))[1]
    found = extended(load(eagle3, target, dtype=dtype))[1]
    assert 0 < (found - expected).abs().max() < share * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["layers.0.mlp.down_proj.weight", "lm_head.weight"])
def test_a_number_too_large_for_float16_is_refused_by_name(
    target: Path, eagle3: Path, name: str, dtype: torch.dtype
) -> None:
    """The head serves as it is otherwise."""

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        stored = next(key for key in tensors if key.endswith(name.removeprefix("layers.0.")))
        tensors[stored] = tensors[stored].to(dtype)
        tensors[stored].view(-1)[3] = -98304.0

    rewrite(eagle3, spoil)
    load(eagle3, target)
    message = rf"model.*{name.removeprefix('layers.0.')} holds 98304, which is too large for float16; choose another"
    with pytest.raises(CheckpointError, match=message):
        load(eagle3, target, dtype=torch.float16)


def test_a_row_has_the_same_bits_in_any_chunk_and_on_two_threads(target: Path, eagle3: Path) -> None:
    hidden_states = torch.randn(19, 3 * HIDDEN, generator=torch.Generator().manual_seed(4))
    expected = extended(load(eagle3, target))
    ours = PagedHead(load(eagle3, target, num_threads=2))
    parts = [
        ours.extend(TOKENS[a:b], a, hidden_states[a - 1 : b - 1], from_target=True)
        for a, b in ((1, 2), (2, 7), (7, 20))
    ]
    for i in range(2):
        assert torch.equal(torch.cat([part[i] for part in parts]), expected[i])


def test_a_state_of_another_shape_or_a_module_that_is_not_there(target: Path, eagle3: Path) -> None:
    head = PagedHead(load(eagle3, target))
    with pytest.raises(ValueError, match="hidden must be"):
        head.extend(TOKENS[1:3], 1, torch.zeros(2, HIDDEN), from_target=True)
    with pytest.raises(ValueError, match="no module 1"):
        head.extend(TOKENS[1:3], 1, torch.zeros(2, HIDDEN), from_target=False, depth=1)


def test_mimo_with_layers_of_its_own_is_a_target_like_qwen2(tmp_path: Path) -> None:
    model = head_files.mimo_target(tmp_path)
    ours = load_target(tmp_path)
    torch.testing.assert_close(
        ours.forward(Paged(1).prefill(0, TOKENS, 0, 20)), oracle(model, TOKENS), rtol=0, atol=1e-4
    )


def test_qwen3_with_mtp_layers_is_still_a_target(tmp_path: Path) -> None:
    head_files.qwen3_mtp_target(tmp_path)
    load_target(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"mtpx.fc.weight": torch.zeros(2, 2)}))
    with pytest.raises(CheckpointError, match=r"mtpx\.fc\.weight is not part"):
        load_target(tmp_path)


@pytest.mark.parametrize("suffix", ["bin", "pt"])
def test_a_folder_of_pickles_names_the_converter(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / f"pytorch_model.{suffix}").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match=rf"pytorch_model\.{suffix}.*foretoken convert"):
        head_config(tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.update({"midlayer.self_attn.kv_a_proj_with_mqa.weight": torch.zeros(4, 4)}), "MLA"),
        (lambda t: t.update({"midlayer.self_attn.o_proj.bias": torch.zeros(HIDDEN)}), r"o_proj\.bias is not part"),
        (lambda t: t.pop("midlayer.mlp.up_proj.weight"), r"midlayer\.mlp\.up_proj\.weight|layers\.0\.mlp\.up_proj"),
        (lambda t: t.pop("d2t"), "d2t is missing"),
        (lambda t: t.update({"d2t": t["d2t"] + 80}), "d2t does not lead"),
        (lambda t: t.update({"d2t": t["d2t"].float()}), "tensor d2t is F32"),
        (lambda t: t.update({"fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN)}), r"fc\.weight has shape"),
        (lambda t: t.pop("fc.weight"), "no draft head"),
        (lambda t: t.update({"layers.0.hidden_norm.weight": torch.zeros(HIDDEN)}), "are the same tensor"),
    ],
)
def test_tensors_that_are_refused(target: Path, eagle3: Path, change: Callable[[Tensors], object], named: str) -> None:
    rewrite(eagle3, change)
    with pytest.raises(ConfigError, match=named):
        load(eagle3, target)


@pytest.mark.parametrize("layer", ["midlayer", "layers.0"])
@pytest.mark.parametrize("norm", ["hidden_norm", "input_layernorm"])
@pytest.mark.parametrize("has_vocab", [True, False])
def test_a_missing_norm_of_eagle3_is_named(
    target: Path, tmp_path: Path, layer: str, norm: str, has_vocab: bool
) -> None:
    """Without it, and without a vocabulary of its own, the head is still none of EAGLE."""
    config, tensors = head_files.eagle3_files(layer=layer, head=has_vocab)
    del tensors[f"{layer}.{norm}.weight"]
    head = write_folder(tmp_path / "head", config, tensors)
    assert head_config(head).family == "eagle3"
    with pytest.raises(CheckpointError, match=rf"tensor layers\.0\.{norm}\.weight is missing"):
        check_head_folder("EAGLE3", head, target)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"auto_map": {"AutoModel": "code.Head"}}, "auto_map"),
        ({"model_type": "deepseek_v3"}, "model_type 'deepseek_v3'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"num_aux_hidden_states": 4}, "num_aux_hidden_states 4"),
        ({"eagle_aux_hidden_state_layer_ids": "2"}, "eagle_aux_hidden_state_layer_ids"),
        ({"aux_hidden_state_layer_ids": [1, 2, 3]}, "aux_hidden_state_layer_ids"),
        ({"eagle_config": "x"}, "eagle_config: not an object"),
        ({"transformer_layer_config": [1]}, "transformer_layer_config: not an object"),
        ({"norm_before_fc": True}, "norm_before_fc is set, but tensor input_norm"),
        ({"fc_norm": True}, "fc_norm is set"),
        ({"speculators_model_type": "mlp_speculator"}, "speculators_model_type 'mlp_speculator'"),
        ({"target_hidden_size": 128}, "target_hidden_size 128"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"draft_vocab_size": None, "tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"hidden_size": 32}, "shape"),
    ],
)
def test_configs_that_are_refused(target: Path, eagle3: Path, fields: dict[str, Any], named: str) -> None:
    reconfigure(eagle3, **fields)
    with pytest.raises(ConfigError, match=named):
        load(eagle3, target)


def test_other_heads_of_speculators_are_refused_by_name(target: Path, eagle: Path) -> None:
    """Their EAGLE-1 head has its layer's fields one level down, and norms that ours lacks."""
    reconfigure(eagle, speculators_model_type="eagle", auto_map={"": "eagle.EagleSpeculatorConfig"})
    with pytest.raises(ConfigError, match="speculators_model_type 'eagle' is not supported"):
        load(eagle, target)


def test_three_axes_of_positions_are_one_for_text(target: Path, eagle3: Path) -> None:
    expected = extended(load(eagle3, target))
    reconfigure(eagle3, rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]})
    assert torch.equal(extended(load(eagle3, target))[0], expected[0])


def test_llama4_names_its_width_otherwise(target: Path, eagle3: Path) -> None:
    expected = extended(load(eagle3, target))
    middle = head_files.MIDDLE
    reconfigure(eagle3, model_type="llama4_text", intermediate_size=7, intermediate_size_mlp=middle)
    assert torch.equal(extended(load(eagle3, target))[0], expected[0])


def test_a_head_without_the_targets_weights(target: Path, eagle: Path) -> None:
    with pytest.raises(ConfigError, match="needs the target's embedding or output head"):
        load(eagle, target, weights=None)


def test_a_head_with_all_of_its_own_needs_no_target(target: Path, tmp_path: Path) -> None:
    files = head_files.eagle3_files(hidden=32, embedding=True, target_hidden_size=HIDDEN)
    folder = write_folder(tmp_path / "head", *files)
    assert torch.equal(extended(load(folder, target, weights=None))[0], extended(load(folder, target))[0])


def test_an_eagle_head_of_another_width(target: Path, eagle: Path) -> None:
    reconfigure(eagle, hidden_size=32, head_dim=16)
    with pytest.raises(ConfigError, match="hidden size 32 does not match a target of 64"):
        load(eagle, target)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2, but there are 1"),
        ({"model_type": "qwen2", "auto_map": None}, "not supported for model_type 'qwen2'"),
    ],
)
def test_mtp_configs_that_are_refused(tmp_path: Path, fields: dict[str, Any], named: str) -> None:
    head_files.mimo_target(tmp_path)
    reconfigure(tmp_path, **fields)
    with pytest.raises(ConfigError, match=named):
        head_config(tmp_path)


def test_mtp_layers_with_a_gap_or_a_tensor_too_many(tmp_path: Path) -> None:
    head_files.qwen3_mtp_target(tmp_path, num_depths=2)
    rewrite(tmp_path, lambda tensors: tensors.update({"mtp.head.weight": torch.zeros(2, 2)}))
    with pytest.raises(CheckpointError, match=r"mtp\.head\.weight is not part of this draft head"):
        load(tmp_path, tmp_path)
    rewrite(tmp_path, lambda t: [t.pop(name) for name in list(t) if name.startswith("mtp.layers.0.")])
    with pytest.raises(CheckpointError, match="not counted from 0"):
        head_config(tmp_path)


def test_a_plain_target_is_no_draft_head(target: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no draft head"):
        head_config(target)
    with Checkpoint(target) as checkpoint:
        assert checkpoint.shape("model.norm.weight") == (HIDDEN,)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("eagle", "fc.weight"),
        ("eagle", "layers.0.mlp.down_proj.weight"),
        ("eagle3", "norm.weight"),
        ("eagle3", "lm_head.weight"),
        ("eagle3", "midlayer.hidden_norm.weight"),
    ],
)
def test_nan_and_infinity_are_refused_by_name(
    kind: str, name: str, value: float, target: Path, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(kind)
    weights = load_target_weights(target, load_config(target))
    load(folder, target, weights=weights)
    rewrite(folder, lambda tensors: tensors[name].view(-1)[-1:].fill_(value))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor {name} holds NaN or infinity"):
        load(folder, target, weights=weights)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_nan_in_what_is_read_of_the_target_is_refused_by_name(name: str, target: Path) -> None:
    rewrite(target, lambda tensors: tensors[name].view(-1)[-1:].fill_(float("nan")))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor {name} holds NaN or infinity"):
        load_target_weights(target, load_config(target))
