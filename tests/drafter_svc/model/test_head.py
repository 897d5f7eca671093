"""EAGLE, EAGLE-3 and MTP drafters over real files draft the trees of independent references."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from drafter_svc.config import DrafterSettings
from drafter_svc.model.head import HeadDrafter
from drafter_svc.server import make_drafter
from drafter_svc.trees.passes import COUPLING_SCALE
from foretoken.drafting import FINAL_NORM, DrafterNeeds, TargetInfo
from foretoken.errors import CheckpointError, ConfigError, PreconditionError
from foretoken.models.config import load_config
from foretoken.models.target_weights import load_target_weights
from tests.references.head_files import (
    HIDDEN,
    NUM_LAYERS,
    VOCAB,
    eagle3_files,
    eagle_files,
    mimo_target,
    random_target,
    write_folder,
)
from tests.references.heads import Entries, ReferenceEagle, ReferenceEagle3, ReferenceHead, ReferenceMimo
from tests.support.paged_draft import Entry, Row, reference_tree, request_of, target_info

BLOCKS = [5, 2, 9, 0, 7, 11, 3, 1]


def info(folder: Path | str, **changes: object) -> TargetInfo:
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_layers": NUM_LAYERS, "checkpoint": str(folder)}
    return target_info(**(sizes | changes))


class Case:
    """A target and a head on disk, their drafter, and the head's reference."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.target = folder / "target"
        head: Path | None = folder / "head"
        self.width = HIDDEN
        self.num_depths = 1
        self.reference: ReferenceHead
        if kind.startswith("MTP"):
            self.num_depths = int(kind.removeprefix("MTP"))
            mimo_target(self.target, self.num_depths)
            head, self.reference = None, ReferenceMimo(self.target, self.target)
        else:
            random_target(self.target)
            files = eagle3_files() if kind == "EAGLE3" else eagle_files()
            write_folder(folder / "head", *files)
            references = {"EAGLE": ReferenceEagle, "EAGLE3": ReferenceEagle3}
            self.reference = references[kind](folder / "head", self.target)
            self.width = 3 * HIDDEN if kind == "EAGLE3" else HIDDEN
        self.head = head
        self.algorithm: Any = kind[:3] if head is None else kind
        ids = self.reference.target_ids.numpy().astype(np.int32)
        self.target_ids = None if len(ids) == VOCAB else ids

    def drafter(self, **options: Any) -> HeadDrafter:
        return HeadDrafter(self.algorithm, self.head, **options)

    def run(self, module: int, entries: Sequence[Entry]) -> tuple[np.ndarray, np.ndarray]:
        states = [torch.from_numpy(np.frombuffer(fed, np.float32).astype(np.float64)) for _, _, fed in entries]
        logits, hidden = self.reference.run(
            Entries(
                tokens=torch.tensor([token for token, _, _ in entries]),
                states=states,
                from_target=[len(state) == self.width for state in states],
                # A pair's position in training is one before its token's.
                positions=torch.tensor([position - 1 for _, position, _ in entries]),
                sees=torch.ones(len(entries), len(entries)).tril().bool(),
            ),
            module,
        )
        return logits[-1].numpy().astype(np.float32), hidden[-1].numpy().astype(np.float32)

    def check(self, drafter: HeadDrafter, row: Row, valid_start: int = 1) -> None:
        tree = drafter.draft(request_of([row])).tree(0)
        expected = reference_tree(
            row,
            valid_start,
            num_depths=self.num_depths,
            scale=COUPLING_SCALE,
            target_ids=self.target_ids,
            model=self.run,
        )
        assert (tree.tokens.tolist(), tree.parents.tolist()) == expected[:2]


def tokens(count: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB, count)]


@pytest.fixture(params=["EAGLE", "EAGLE3", "MTP1", "MTP2"])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    return Case(request.param, tmp_path)


@pytest.fixture
def eagle(tmp_path: Path) -> Case:
    return Case("EAGLE", tmp_path)


def test_needs(case: Case) -> None:
    drafter = case.drafter()
    layers = (2, NUM_LAYERS // 2, NUM_LAYERS - 3) if case.algorithm == "EAGLE3" else (FINAL_NORM,)
    assert drafter.needs(info(case.target)) == DrafterNeeds(layers, num_rerun=1, blocks=True, weights=True)
    assert drafter.algorithm == case.algorithm


def test_trees_are_those_of_the_reference(case: Case) -> None:
    drafter = case.drafter()
    drafter.attach(info(case.target), None)
    text, length = tokens(30), 0
    for new in (9, 1, 3, 2):
        length += new
        case.check(drafter, Row(text[:length], new, BLOCKS, width=case.width, max_nodes=12, max_depth=4))
    row = Row(text[:16], 1, BLOCKS, width=case.width, temperature=0.8, seed=9, max_nodes=12, max_depth=4)
    case.check(drafter, row)


def test_a_prefix_and_a_window(case: Case) -> None:
    drafter = case.drafter()
    drafter.attach(info(case.target), None)
    text = tokens(20)
    case.check(drafter, Row(text[:11], 11, [5, 2, 9], width=case.width))
    second = Row([*text[:8], *tokens(4, 1)], 12, [5, 2, 4], batch_slot=1, hidden=4, width=case.width)
    case.check(drafter, second)
    drafter.release([1])
    if case.num_depths == 1:
        case.check(drafter, Row([*second.tokens, 3, 4], 2, [5, 2, 4, 6], batch_slot=1, width=case.width), 12)


def test_the_targets_weights_may_be_given(case: Case) -> None:
    drafter = case.drafter()
    drafter.attach(info(case.target), load_target_weights(case.target, load_config(case.target)))
    case.check(drafter, Row(tokens(9), 9, BLOCKS, width=case.width))


def test_a_token_map_limits_what_is_drafted(eagle: Case, tmp_path: Path) -> None:
    ids = np.random.default_rng(1).permutation(VOCAB)[:30]
    save_file({"ids": ids}, tmp_path / "map.safetensors")
    drafter = eagle.drafter(token_map=tmp_path / "map.safetensors")
    drafter.attach(info(eagle.target), None)
    row = Row(tokens(9), 9, BLOCKS, width=eagle.width, max_nodes=16, max_branches=5)
    tree = drafter.draft(request_of([row])).tree(0)
    assert set(tree.tokens[1:].tolist()) <= set(ids.tolist())
    expected = reference_tree(row, 1, target_ids=ids, model=lambda m, e: (eagle.run(m, e)[0][ids], eagle.run(m, e)[1]))
    assert tree.tokens.tolist() == expected[0]
    save_file({"ids": np.array([1, VOCAB])}, tmp_path / "map.safetensors")
    with pytest.raises(PreconditionError, match=f"token {VOCAB} is not in the target's vocabulary"):
        eagle.drafter(token_map=tmp_path / "map.safetensors").attach(info(eagle.target), None)


def test_a_head_of_another_algorithm_is_refused(eagle: Case) -> None:
    with pytest.raises(ConfigError, match=r"^--speculative-draft-model-path: .* holds a head of algorithm EAGLE, not"):
        HeadDrafter("EAGLE3", eagle.head)


def test_a_target_without_mtp_layers_is_refused(eagle: Case) -> None:
    with pytest.raises(PreconditionError, match="has no MTP layers"):
        HeadDrafter("MTP", None).needs(info(eagle.target))


def test_a_folder_without_a_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        HeadDrafter("EAGLE", tmp_path)


def test_another_target_than_the_folder_says_is_refused(eagle: Case) -> None:
    with pytest.raises(PreconditionError, match="is not the verifier's target"):
        eagle.drafter().attach(info(eagle.target, num_layers=3), None)
    with pytest.raises(PreconditionError, match="name a copy with --target"):
        eagle.drafter().attach(info("/nowhere"), None)
    eagle.drafter(target=eagle.target).attach(info("/nowhere"), None)


def test_hidden_states_of_another_width_are_an_error(eagle: Case) -> None:
    drafter = eagle.drafter()
    drafter.attach(info(eagle.target), None)
    with pytest.raises(ValueError, match="expected 64 wide"):
        drafter.draft(request_of([Row(tokens(9), 9, BLOCKS, width=7)]))


def test_gauges_and_release_before_an_attachment(eagle: Case) -> None:
    drafter = eagle.drafter()
    drafter.release(range(4))
    assert drafter.gauges() == {}
    drafter.attach(info(eagle.target), None)
    drafter.draft(request_of([Row(tokens(9), 9, BLOCKS, width=eagle.width)]))
    assert drafter.gauges()["draft_extend_tokens"] == 8


@pytest.mark.parametrize("kind", ["EAGLE", "EAGLE3", "MTP1"])
def test_settings_make_the_drafter(kind: str, tmp_path: Path) -> None:
    case = Case(kind, tmp_path)
    drafter = make_drafter(
        DrafterSettings(
            name="d",
            address="unix:/d",
            algorithm=case.algorithm,
            speculative_draft_model_path=case.head,
            target=case.target,
        )
    )
    drafter.attach(info("/elsewhere"), None)
    assert drafter.algorithm == case.algorithm
    assert drafter.draft(request_of([Row(tokens(9), 9, BLOCKS, width=case.width)])).tree(0).num_nodes > 1


def test_a_head_with_nan_is_refused_and_the_verifier_reads_why(eagle: Case) -> None:
    assert eagle.head is not None
    file = eagle.head / "model.safetensors"
    tensors = load_file(file)
    tensors["fc.weight"][0, 0] = float("nan")
    save_file(tensors, file)
    with pytest.raises(PreconditionError, match=r"model\.safetensors: tensor fc\.weight holds NaN or infinity"):
        eagle.drafter().attach(info(eagle.target), None)
