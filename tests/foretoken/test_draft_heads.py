"""Draft heads equal independent references: families, dialects, spellings; prompts and trees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from foretoken.drafting import FINAL_NORM
from foretoken.models.batch import ForwardBatch
from foretoken.models.config import load_config
from foretoken.models.draft_head import HeadOutput, HostDraftHead, load_head
from foretoken.models.draft_weights import HeadSource
from foretoken.models.target_weights import load_target_weights
from tests.foretoken.test_models_hidden_states import hidden_states
from tests.references import head_files
from tests.references.head_files import NUM_LAYERS, VOCAB, Tensors, write_folder
from tests.references.heads import (
    Entries,
    ReferenceEagle,
    ReferenceEagle3,
    ReferenceHead,
    ReferenceMimo,
    ReferenceQwen3Next,
)

BLOCK_SIZE = 8
NUM_BLOCKS = 12
PROMPT = 23
# Nodes below the root by step: their parents, -1 for the root itself.
STEPS = ([-1, -1, -1], [0, 2], [3, 3, 4], [6])
USUAL_LAYERS = (2, NUM_LAYERS // 2, NUM_LAYERS - 3)

Files = tuple[dict[str, Any], Tensors]


def load(folder: Path, target: Path, num_threads: int = 1, **options: Any) -> HostDraftHead:
    config = load_config(target)
    options = {"weights": load_target_weights(target, config), "dtype": torch.float32} | options
    head = load_head(HeadSource(folder, config, **options), NUM_BLOCKS, BLOCK_SIZE)
    return HostDraftHead(head, 128, num_threads)


class PagedHead:
    """Our head over shuffled blocks of one sequence: token i's entry is in KV slot i."""

    def __init__(self, head: HostDraftHead) -> None:
        self.head = head
        self.table = np.random.default_rng(3).permutation(NUM_BLOCKS).astype(np.int32)

    def run(
        self, tokens: np.ndarray, kv_slots: np.ndarray, contexts: np.ndarray, masks: np.ndarray, states: torch.Tensor,
        *, from_target: bool, depth: int = 0, **options: Any,
    ) -> HeadOutput:  # fmt: skip
        given = np.ascontiguousarray(states.numpy(), np.float32)
        batch = self.batch(tokens, kv_slots, contexts, masks, **options)
        found = self.head.forward(batch, given, from_target=from_target, depth=depth)
        return HeadOutput(found.logits.clone(), found.hidden.clone())

    def batch(
        self, tokens: np.ndarray, kv_slots: np.ndarray, contexts: np.ndarray, masks: np.ndarray, *,
        positions: np.ndarray | None = None, tree_start: int = 0, start: int = 1, wanted: int | None = None,
    ) -> ForwardBatch:  # fmt: skip
        """Return a batch. ``wanted``: how many last rows want logits; by default all."""
        rows = len(tokens)
        return ForwardBatch(
            token_ids=tokens.astype(np.int32),
            positions=(kv_slots if positions is None else positions).astype(np.int32),
            kv_slots=(self.table[kv_slots // BLOCK_SIZE] * BLOCK_SIZE + kv_slots % BLOCK_SIZE).astype(np.int32),
            row_seqs=np.zeros(rows, np.int32),
            context_lens=contexts.astype(np.int32),
            masks=masks,
            tree_starts=np.array([tree_start], np.int32),
            block_tables=self.table[None],
            logit_rows=np.arange(0 if wanted is None else rows - wanted, rows, dtype=np.int32),
            context_starts=np.array([start], np.int32),
        )

    def extend(
        self, tokens: np.ndarray, first: int, states: torch.Tensor, *,
        start: int = 1, from_target: bool, depth: int = 0, wanted: int | None = None,
    ) -> HeadOutput:  # fmt: skip
        """Write the entries of ``tokens`` from KV slot ``first`` on."""
        kv_slots = np.arange(first, first + len(tokens))
        masks = np.zeros((len(tokens), 1), np.uint64)
        options = {"start": start, "depth": depth, "wanted": wanted}
        return self.run(tokens, kv_slots, kv_slots + 1, masks, states, from_target=from_target, **options)


@dataclass
class Case:
    """A head beside the target that it drafts for."""

    model: PreTrainedModel
    ours: PagedHead
    reference: ReferenceHead
    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.ours.head.captured_layers == self.layers
        self.tokens = np.random.default_rng(1).integers(0, VOCAB, PROMPT)
        states = hidden_states(self.model, self.tokens)
        self.states = torch.cat([states[layer] for layer in self.layers], dim=1)


def check(found: HeadOutput, expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs.abs().max() > 0.05
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=1e-4)


def causal(size: int) -> torch.Tensor:
    return torch.ones(size, size).tril().bool()


def prompt_entries(case: Case) -> Entries:
    """Return pairs of each token from the second on with the state before it."""
    size = PROMPT - 1
    states = list(case.states[:-1].double())
    return Entries(torch.from_numpy(case.tokens[1:]), states, [True] * size, torch.arange(size), causal(size))


def check_tree(case: Case) -> None:
    """Compare a prompt in two chunks, then recurrent steps over a tree, each fed by the last."""
    entries, ours = prompt_entries(case), case.ours
    parts = [
        ours.extend(case.tokens[a:b], a, case.states[a - 1 : b - 1], from_target=True)
        for a, b in ((1, 10), (10, PROMPT))
    ]
    found = HeadOutput(*(torch.cat(part) for part in zip(*parts, strict=True)))
    logits, hidden = case.reference.run(entries)
    check(found, (logits, hidden))
    assert found.logits.shape[1] == ours.head.draft_vocab_size == len(case.reference.target_ids)
    mine = {-1: found.hidden[-1]}
    theirs = {-1: hidden[-1]}
    ancestors: dict[int, list[int]] = {-1: []}
    depths, node = {-1: 0}, 0
    for parents in STEPS:
        nodes = np.arange(node, node + len(parents))
        tokens = (np.arange(len(parents)) * 17 + 5 * node) % VOCAB
        for child, parent in zip(nodes.tolist(), parents, strict=True):
            ancestors[child], depths[child] = [*ancestors[parent], child], depths[parent] + 1
        masks = np.array([[sum(1 << i for i in ancestors[child])] for child in nodes.tolist()], np.uint64)
        found = ours.run(
            tokens, PROMPT + nodes, np.full(len(nodes), PROMPT), masks, torch.stack([mine[p] for p in parents]),
            positions=np.array([PROMPT - 1 + depths[child] for child in nodes.tolist()]), tree_start=PROMPT,
            from_target=False,
        )  # fmt: skip
        entries = grown(entries, tokens, parents, [ancestors[child] for child in nodes.tolist()], theirs)
        logits, hidden = case.reference.run(entries)
        check(found, (logits[-len(parents) :], hidden[-len(parents) :]))
        for row, child in enumerate(nodes.tolist()):
            mine[child], theirs[child] = found.hidden[row], hidden[len(hidden) - len(parents) + row]
        node += len(parents)


def check_entries(case: Case, *, has_several_layers: bool = False) -> None:
    """Assert that entries written alone equal those of a whole pass, bit for bit."""
    head, ours = case.ours.head, case.ours
    head.cache.data.zero_()
    ours.extend(case.tokens[1:], 1, case.states[:-1], from_target=True)
    expected = head.cache.data.clone()
    head.cache.data.zero_()
    write_kv_entries = head.write_kv_entries
    if has_several_layers:
        assert write_kv_entries is None
        return
    assert write_kv_entries is not None
    kv_slots = np.arange(1, PROMPT)
    batch = ours.batch(case.tokens[1:], kv_slots, kv_slots + 1, np.zeros((len(kv_slots), 1), np.uint64), wanted=0)
    write_kv_entries(batch, np.ascontiguousarray(case.states[:-1].numpy(), np.float32))
    assert expected.any() and torch.equal(head.cache.data, expected)


def grown(
    entries: Entries,
    tokens: np.ndarray,
    parents: list[int],
    ancestors: list[list[int]],
    states: dict[int, torch.Tensor],
) -> Entries:
    """Return the entries followed by another step of tree nodes."""
    old, total = len(entries.tokens), len(entries.tokens) + len(parents)
    sees = torch.zeros(total, total, dtype=torch.bool)
    sees[:old, :old] = entries.sees
    for row, path in enumerate(ancestors):
        sees[old + row, : PROMPT - 1] = True
        sees[old + row, [PROMPT - 1 + node for node in path]] = True
    return Entries(
        torch.cat([entries.tokens, torch.from_numpy(tokens)]),
        entries.states + [states[parent] for parent in parents],
        entries.from_target + [False] * len(parents),
        torch.cat([entries.positions, torch.tensor([PROMPT - 2 + len(path) for path in ancestors])]),
        sees,
    )


EAGLE: dict[str, Callable[[], Files]] = {
    "bias": head_files.eagle_files,
    "no bias": lambda: head_files.eagle_files(bias=False),
    "qwen2": lambda: head_files.eagle_files(qkv_bias=True),
    "two layers": lambda: head_files.eagle_files(num_layers=2),
}


@pytest.mark.parametrize("name", EAGLE)
@pytest.mark.parametrize("tied", [False, True])
def test_eagle(tmp_path: Path, name: str, tied: bool) -> None:
    model = head_files.random_target(tmp_path / "target", tied=tied)
    folder = write_folder(tmp_path / "head", *EAGLE[name]())
    ours = PagedHead(load(folder, tmp_path / "target"))
    assert (ours.head.family, ours.head.num_depths) == ("eagle", 1)
    assert ours.head.target_ids is None
    case = Case(model, ours, ReferenceEagle(folder, tmp_path / "target"), (FINAL_NORM,))
    check_tree(case)
    check_entries(case, has_several_layers=name == "two layers")


@pytest.mark.parametrize("sizes", [(1, 2, 5, 8), (3, 6, 2, 8), (4, 8), (9, 13)])
def test_passes_that_grow_by_less_than_a_tile_of_rows(
    tmp_path: Path, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head's first pass has few rows, as after an attachment in the middle of a text."""
    arange = torch.arange

    def followed_by_zeros(*args: Any, **options: Any) -> torch.Tensor:
        """Let reads past the end find definite values."""
        found = arange(*args, **options)
        return torch.cat([found, torch.zeros(64, dtype=found.dtype)])[: len(found)]

    monkeypatch.setattr(torch, "arange", followed_by_zeros)
    model = head_files.random_target(tmp_path / "target")
    folder = write_folder(tmp_path / "head", *head_files.eagle_files())
    case = Case(
        model,
        PagedHead(load(folder, tmp_path / "target")),
        ReferenceEagle(folder, tmp_path / "target"),
        (FINAL_NORM,),
    )
    logits, hidden = case.reference.run(prompt_entries(case))
    first = 1
    for size in sizes:
        states = case.states[first - 1 : first - 1 + size]
        found = case.ours.extend(case.tokens[first : first + size], first, states, from_target=True, wanted=1)
        last = first - 1 + size
        check(found, (logits[last - 1 : last], hidden[first - 1 : last]))
        first += size


def speculators(**options: Any) -> Files:
    fields = options.pop("fields", {})
    config, tensors = head_files.eagle3_files(layer="layers.0", **options)
    return head_files.speculators_config(config, **fields), tensors


EAGLE3: dict[str, tuple[Callable[[], Files], tuple[int, ...]]] = {
    "midlayer": (head_files.eagle3_files, USUAL_LAYERS),
    "layers.0 under model": (lambda: head_files.eagle3_files(layer="layers.0", prefix="model."), USUAL_LAYERS),
    "midlayer under model, fc bias": (lambda: head_files.eagle3_files(prefix="model.", fc_bias=True), USUAL_LAYERS),
    "the target's head": (lambda: head_files.eagle3_files(head=False), USUAL_LAYERS),
    "three layers": (lambda: head_files.eagle3_files(layer="layers.0", num_layers=3), USUAL_LAYERS),
    "norms by layer": (
        lambda: head_files.eagle3_files(extra=("fc_norm.0", "fc_norm.1", "fc_norm.2"), fc_norm=True),
        USUAL_LAYERS,
    ),
    "norms by layer, old names": (
        lambda: head_files.eagle3_files(extra=("aux_norm_low", "aux_norm_mid", "aux_norm_high"), use_aux_norm=True),
        USUAL_LAYERS,
    ),
    "norm over layers": (
        lambda: head_files.eagle3_files(extra=("input_norm",), eagle_config={"norm_before_fc": True}),
        USUAL_LAYERS,
    ),
    "normed output": (lambda: head_files.eagle3_files(norm_output=True), USUAL_LAYERS),
    "narrower than the target": (
        lambda: head_files.eagle3_files(hidden=32, embedding=True, target_hidden_size=head_files.HIDDEN),
        USUAL_LAYERS,
    ),
    "own embedding of the same width": (
        lambda: head_files.eagle3_files(embedding=True, target_hidden_size=head_files.HIDDEN),
        USUAL_LAYERS,
    ),
    "an embedding that means nothing": (lambda: head_files.eagle3_files(embedding=True), USUAL_LAYERS),
    "named layers": (
        lambda: head_files.eagle3_files(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 4, 7]}),
        (1, 5, 8),
    ),
    "speculators": (speculators, USUAL_LAYERS),
    "speculators, residual before the norm": (
        lambda: speculators(fields={"norm_before_residual": False}),
        USUAL_LAYERS,
    ),
    "speculators, named layers": (
        lambda: speculators(fields={"eagle_aux_hidden_state_layer_ids": [1, 4, 7]}),
        (1, 4, 7),
    ),
    "speculators, two layers": (
        lambda: speculators(num_layers=2, later_norm="input_layernorm", fields={"norm_output": True}),
        USUAL_LAYERS,
    ),
}


@pytest.mark.parametrize("name", EAGLE3)
def test_eagle3(tmp_path: Path, name: str) -> None:
    build, layers = EAGLE3[name]
    model = head_files.random_target(tmp_path / "target")
    folder = write_folder(tmp_path / "head", *build())
    ours = PagedHead(load(folder, tmp_path / "target"))
    reference = ReferenceEagle3(folder, tmp_path / "target")
    assert ours.head.family == "eagle3"
    ids = np.arange(VOCAB) if ours.head.target_ids is None else ours.head.target_ids
    assert ids.tolist() == reference.target_ids.tolist()
    case = Case(model, ours, reference, layers)
    check_tree(case)
    check_entries(case, has_several_layers=name.endswith(("two layers", "three layers")))


MTP: dict[str, tuple[Callable[..., PreTrainedModel], type[ReferenceHead]]] = {
    "mimo": (head_files.mimo_target, ReferenceMimo),
    "qwen3 next": (head_files.qwen3_mtp_target, ReferenceQwen3Next),
}


@pytest.mark.parametrize("name", MTP)
def test_mtp_applied_recurrently(tmp_path: Path, name: str) -> None:
    build, reference = MTP[name]
    model = build(tmp_path)
    ours = PagedHead(load(tmp_path, tmp_path, weights=None))
    assert (ours.head.family, ours.head.num_depths) == ("mtp", 1)
    case = Case(model, ours, reference(tmp_path, tmp_path), (FINAL_NORM,))
    check_tree(case)
    check_entries(case)


@pytest.mark.parametrize("name", MTP)
def test_mtp_of_several_layers(tmp_path: Path, name: str) -> None:
    """Layer d takes layer d - 1's output of one position before; token d + 1 is its first entry."""
    build, kind = MTP[name]
    model = build(tmp_path, num_depths=3)
    ours = PagedHead(load(tmp_path, tmp_path))
    assert ours.head.num_depths == 3
    case = Case(model, ours, kind(tmp_path, tmp_path), (FINAL_NORM,))
    mine, theirs = case.states[:-1], list(case.states[:-1].double())
    for depth in range(3):
        first = depth + 1
        size = PROMPT - first
        found = ours.extend(case.tokens[first:], first, mine, start=first, from_target=depth == 0, depth=depth)
        positions = torch.arange(depth, PROMPT - 1)
        entries = Entries(torch.from_numpy(case.tokens[first:]), theirs, [depth == 0] * size, positions, causal(size))
        logits, hidden = case.reference.run(entries, depth)
        check(found, (logits, hidden))
        mine, theirs = found.hidden[:-1], list(hidden[:-1])
