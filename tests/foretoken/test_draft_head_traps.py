"""The formats' traps: our head must differ from a reference that falls into one.

A trap raises no error anywhere, and only costs acceptance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foretoken.drafting import FINAL_NORM
from foretoken.errors import ConfigError
from foretoken.models.draft_config import head_captured_layers, head_config
from tests.foretoken.test_draft_heads import USUAL_LAYERS, Case, PagedHead, check_tree, load
from tests.references import head_files
from tests.references.head_files import Tensors, write_folder
from tests.references.heads import (
    Entries,
    Layer,
    ReferenceEagle,
    ReferenceEagle3,
    ReferenceHead,
    ReferenceMimo,
    ReferenceQwen3Next,
    read_folder,
    rms,
)

Fall = Callable[[ReferenceHead], object]


def eagle_case(folder: Path, kind: type[ReferenceEagle] = ReferenceEagle) -> Case:
    model = head_files.random_target(folder / "target")
    head = write_folder(folder / "head", *head_files.eagle_files())
    ours = PagedHead(load(head, folder / "target"))
    return Case(model, ours, kind(head, folder / "target"), (FINAL_NORM,))


def eagle3_case(
    folder: Path,
    files: tuple[dict[str, Any], Tensors],
    layers: tuple[int, ...] = USUAL_LAYERS,
    kind: type[ReferenceEagle3] = ReferenceEagle3,
) -> Case:
    model = head_files.random_target(folder / "target")
    head = write_folder(folder / "head", *files)
    ours = PagedHead(load(head, folder / "target"))
    return Case(model, ours, kind(head, folder / "target"), layers)


def must_differ(case: Case) -> None:
    """Assert that the comparison fails with the trap, by figures and not by shapes."""
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        check_tree(case)


def swap_halves(name: str) -> Fall:
    """Return a trap that swaps both inputs of a joint matrix."""

    def fall(reference: ReferenceHead) -> None:
        reference.tensors[name] = torch.cat(reference.tensors[name].chunk(2, dim=1)[::-1], dim=1)

    return fall


def setting(name: str, value: bool) -> Fall:
    return lambda reference: reference.config.update({name: value})


def test_eagle_takes_the_embedding_first(tmp_path: Path) -> None:
    case = eagle_case(tmp_path)
    check_tree(case)
    swap_halves("fc.weight")(case.reference)
    must_differ(case)


class EagleFromUnnormed(ReferenceEagle):
    """Takes the target's state before its last norm: divided by its weights, up to length."""

    def run(self, entries: Entries, depth: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        weight = self.target_norm
        states = [s / weight if fresh else s for s, fresh in zip(entries.states, entries.from_target, strict=True)]
        return super().run(replace(entries, states=states), depth)

    def prepare(self) -> None:
        super().prepare()
        self.target_norm = read_folder(self.target)[1]["model.norm.weight"]


class EagleFedNormed(ReferenceEagle):
    def run(self, entries: Entries, depth: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        logits, hidden = super().run(entries, depth)
        return logits, rms(hidden, torch.ones(()).double(), 1e-5)


class EagleWithAFirstNorm(ReferenceEagle):
    def entering(self, layer: Layer, index: int, hidden: torch.Tensor) -> torch.Tensor:
        return rms(hidden, torch.ones(()).double(), 1e-5)


@pytest.mark.parametrize("trap", [EagleFromUnnormed, EagleFedNormed, EagleWithAFirstNorm])
def test_the_norms_that_eagle_does_not_have(tmp_path: Path, trap: type[ReferenceEagle]) -> None:
    must_differ(eagle_case(tmp_path, trap))


def test_eagle_uses_the_targets_embedding_and_head_though_its_file_has_others(tmp_path: Path) -> None:
    for name, attribute in (("embed_tokens.weight", "embedding"), ("lm_head.weight", "head")):
        case = eagle_case(tmp_path / attribute)
        setattr(case.reference, attribute, case.reference.tensors[name])
        must_differ(case)


@pytest.mark.parametrize(
    ("files", "fall"),
    [
        (head_files.eagle3_files, setting("norm_before_residual", True)),
        (head_files.eagle3_files, setting("norm_output", True)),
        (lambda: head_files.eagle3_files(norm_before_residual=True), setting("norm_before_residual", False)),
        (lambda: head_files.eagle3_files(norm_output=True), setting("norm_output", False)),
        (head_files.eagle3_files, swap_halves("layers.0.self_attn.q_proj.weight")),
        (
            lambda: head_files.eagle3_files(extra=("input_norm",), norm_before_fc=True),
            lambda reference: reference.tensors.pop("input_norm.weight"),
        ),
        (
            lambda: head_files.eagle3_files(extra=("fc_norm.0", "fc_norm.1", "fc_norm.2"), fc_norm=True),
            lambda reference: reference.tensors.pop("fc_norm.0.weight"),
        ),
        (
            lambda: head_files.eagle3_files(embedding=True),
            lambda reference: setattr(reference, "embedding", reference.tensors["embed_tokens.weight"]),
        ),
        (lambda: head_files.eagle3_files(fc_bias=True), lambda reference: reference.tensors.pop("fc.bias")),
    ],
    ids=[
        "residual is what entered the norm",
        "what goes back is not normed",
        "residual is what left the norm",
        "what goes back is normed",
        "embedding first",
        "norm over the hidden states",
        "norm by layer",
        "the target's embedding",
        "bias",
    ],
)
def test_eagle3(tmp_path: Path, files: Callable[[], tuple[dict[str, Any], Tensors]], fall: Fall) -> None:
    case = eagle3_case(tmp_path, files())
    check_tree(case)
    fall(case.reference)
    must_differ(case)


def test_eagle3_reads_d2t_as_offsets_not_ids(tmp_path: Path) -> None:
    config, tensors = head_files.eagle3_files()
    case = eagle3_case(tmp_path, (config, tensors))
    offsets = tensors["d2t"].tolist()
    found = case.ours.head.target_ids
    assert found is not None and found.dtype == np.int32
    assert found.tolist() == [i + offset for i, offset in enumerate(offsets)]
    assert found.tolist() != offsets
    assert tensors["t2d"][found.tolist()].all()


class AlwaysJoined(ReferenceEagle3):
    def run(self, entries: Entries, depth: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        return super().run(replace(entries, from_target=[True] * len(entries.tokens)), depth)


def test_eagle3_applies_fc_to_hidden_states_alone_though_the_widths_are_equal(tmp_path: Path) -> None:
    """With a single hidden state, fc's output is as wide as the target's state."""
    config, tensors = head_files.eagle3_files(eagle_config={"eagle_aux_hidden_state_layer_ids": [4]})
    tensors["fc.weight"] = tensors["fc.weight"][:, : head_files.HIDDEN].contiguous()
    check_tree(eagle3_case(tmp_path / "right", (config, tensors), (5,)))
    must_differ(eagle3_case(tmp_path / "trap", (config, tensors), (5,), AlwaysJoined))


IDS = [2, 9, 17]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (2, 16, 29)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": IDS}}, (3, 10, 18)),
        ({"eagle_aux_hidden_state_layer_ids": IDS}, (3, 10, 18)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 31, 32]}}, (3, 32, 32)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 2, 3]}}, (0, 3, 4)),
    ],
    ids=["none", "outputs", "outputs at the top", "the last layer's under either number", "the embedding's"],
)
def test_the_layers_of_eagle3(tmp_path: Path, config: dict[str, Any], expected: tuple[int, ...]) -> None:
    """Ids name layers' outputs; the defaults are the inputs of layers 2, N / 2 and N - 3."""
    head = head_config(write_folder(tmp_path, *head_files.eagle3_files(**config)))
    assert head_captured_layers(head, 32) == expected


def test_speculators_ids_count_entries(tmp_path: Path) -> None:
    """vLLM records id j when layer j begins."""
    config, tensors = head_files.eagle3_files(layer="layers.0")
    config = head_files.speculators_config(config, eagle_aux_hidden_state_layer_ids=[2, 9, 32])
    assert head_captured_layers(head_config(write_folder(tmp_path, config, tensors)), 32) == (2, 9, 32)


@pytest.mark.parametrize(("ids", "num_layers"), [(None, 2), ([1, 2, 9], 8), ([-2, 2, 3], 8)])
def test_layers_that_the_target_does_not_have(tmp_path: Path, ids: list[int] | None, num_layers: int) -> None:
    nested = {} if ids is None else {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}
    head = head_config(write_folder(tmp_path, *head_files.eagle3_files(**nested)))
    with pytest.raises(ConfigError, match=f"the target has {num_layers} layers"):
        head_captured_layers(head, num_layers)


class MimoWithFirstEmbedding(ReferenceMimo):
    """Keeps the first pair's embedding, as if it were one further on; only distances count."""

    def run(self, entries: Entries, depth: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        return super().run(replace(entries, positions=entries.positions + 1), depth)


class MimoFedBeforeItsNorm(ReferenceMimo):
    def run(self, entries: Entries, depth: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        logits, hidden = super().run(entries, depth)
        return logits, hidden / self.tensors["model.mtp_layers.0.final_layernorm.weight"]


@pytest.mark.parametrize("trap", [MimoWithFirstEmbedding, MimoFedBeforeItsNorm, ReferenceMimo])
def test_mimo(tmp_path: Path, trap: type[ReferenceMimo]) -> None:
    model = head_files.mimo_target(tmp_path)
    ours = PagedHead(load(tmp_path, tmp_path))
    case = Case(model, ours, trap(tmp_path, tmp_path), (FINAL_NORM,))
    if trap is ReferenceMimo:
        check_tree(case)
        swap_halves("model.mtp_layers.0.input_proj.weight")(case.reference)
    must_differ(case)


def test_qwen3_next_takes_the_embedding_first_and_zeroes_none(tmp_path: Path) -> None:
    model = head_files.qwen3_mtp_target(tmp_path)
    case = Case(model, PagedHead(load(tmp_path, tmp_path)), ReferenceQwen3Next(tmp_path, tmp_path), (FINAL_NORM,))
    check_tree(case)
    swap_halves("mtp.fc.weight")(case.reference)
    must_differ(case)
