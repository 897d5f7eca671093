"""Chains of draft steps in training equal drafting entry by entry with a plain KV cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from foretoken.errors import ConfigError
from foretoken.train.data import Windows, most_frequent
from foretoken.train.eagle import Eagle2Recipe, Eagle3Recipe, EagleRecipe, captured_layers
from foretoken.train.evaluate import held_out_texts, measure
from foretoken.train.options import TrainOptions
from foretoken.train.target import FrozenTarget
from tests.support.tiny_target import VOCAB_SIZE, repeating_tokens, write_tiny_target

ROWS, DEPTHS = 12, 4
HEADS, KV_HEADS, HEAD_DIM, THETA, EPS = 2, 1, 16, 5000.0, 1e-6
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> FrozenTarget:
    folder = tmp_path_factory.mktemp("target")
    write_tiny_target(folder)
    return FrozenTarget(folder, CPU)


def make_recipe(
    target: FrozenTarget, algorithm: str, draft_vocab_size: int = 40, *, compile: bool | None = None
) -> EagleRecipe:
    options = TrainOptions(
        "eagle3" if algorithm == "eagle3" else "eagle2",
        target.path,
        Path("unused"),
        Path("unused"),
        steps=1,
        context_length=ROWS,
        num_draft_steps=DEPTHS,
        draft_vocab_size=draft_vocab_size,
        compile=compile,
    )
    torch.manual_seed(11)
    tokens = torch.from_numpy(repeating_tokens().astype("int32"))
    is_eagle3 = algorithm == "eagle3"
    recipe = Eagle3Recipe(target, options, CPU, tokens) if is_eagle3 else Eagle2Recipe(target, options, CPU)
    # Far from their small initial values, so that attention weighs and a wrong key shows.
    for parameter in recipe.module.parameters():
        parameter.data = parameter.data + 0.3 * torch.randn_like(parameter)
    return recipe


def rms_norm(row: Tensor, weight: Tensor) -> Tensor:
    return row / (row.square().mean() + EPS).sqrt() * weight


def turned(heads: Tensor, position: int) -> Tensor:
    """Rotate ``heads`` [num_heads, head_dim] to ``position``: pairs (i, i + head_dim / 2)."""
    angles = position / THETA ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    first, second = heads[:, : HEAD_DIM // 2], heads[:, HEAD_DIM // 2 :]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


class PlainHead:
    """Drafts one sequence as a server does: entry by entry, keys and values in lists."""

    def __init__(self, recipe: EagleRecipe) -> None:
        self.weights = {
            name.replace("midlayer.", "layers.0."): each for name, each in recipe.module.state_dict().items()
        }
        self.wide = "norm.weight" in self.weights
        self.embedding = recipe.target.embedding_weight
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def of(self, name: str) -> Tensor:
        return self.weights[name]

    def enter(self, token: int, position: int, state: Tensor, *, from_target: bool) -> Tensor:
        """Add one entry; return its hidden state."""
        embed = self.embedding[token]
        if self.wide:
            hidden = linear(state, self.of("fc.weight")) if from_target else state
            norms = (self.of("layers.0.input_layernorm.weight"), self.of("layers.0.hidden_norm.weight"))
            row = torch.cat([rms_norm(embed, norms[0]), rms_norm(hidden, norms[1])])
        else:
            hidden = row = linear(torch.cat([embed, state]), self.of("fc.weight"), self.of("fc.bias"))
        query, key, value = (linear(row, self.of(f"layers.0.self_attn.{each}_proj.weight")) for each in "qkv")
        query = turned(query.view(HEADS, HEAD_DIM), position)
        self.keys.append(turned(key.view(KV_HEADS, HEAD_DIM), position))
        self.values.append(value.view(KV_HEADS, HEAD_DIM))
        mixed = []
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            scores = torch.stack([query[head] @ each[group] for each in self.keys]) / HEAD_DIM**0.5
            mixed.append(scores.softmax(0) @ torch.stack([each[group] for each in self.values]))
        hidden = hidden + linear(torch.cat(mixed), self.of("layers.0.self_attn.o_proj.weight"))
        normed = rms_norm(hidden, self.of("layers.0.post_attention_layernorm.weight"))
        gate, up = (linear(normed, self.of(f"layers.0.mlp.{each}_proj.weight")) for each in ("gate", "up"))
        return hidden + linear(silu(gate) * up, self.of("layers.0.mlp.down_proj.weight"))


def target_hidden_states(recipe: EagleRecipe, tokens: Tensor) -> Tensor:
    """Return [length, hidden_width] of one sequence, from transformers' own output."""
    output = recipe.target.model.model(tokens[None], output_hidden_states=True)
    if isinstance(recipe, Eagle2Recipe):
        final: Tensor = output.last_hidden_state[0]
        return final
    return torch.cat([output.hidden_states[layer][0] for layer in (2, 2, 1)], dim=-1)


@pytest.mark.parametrize("algorithm", ["eagle3", "eagle2"])
@torch.no_grad()
def test_unrolled_depths_are_what_drafting_entry_by_entry_gives(target: FrozenTarget, algorithm: str) -> None:
    recipe = make_recipe(target, algorithm)
    tokens = torch.randint(VOCAB_SIZE, (2, ROWS + DEPTHS + 1), generator=torch.Generator().manual_seed(1))
    hidden_states = torch.stack([target_hidden_states(recipe, each) for each in tokens])
    unrolled = torch.stack(list(recipe.depths(tokens, hidden_states[:, :ROWS])))  # [depths, batch, rows, hidden]
    for sequence in range(2):
        for row in range(ROWS):
            head = PlainHead(recipe)
            for entry in range(1, row + 2):
                token = int(tokens[sequence, entry])
                hidden = head.enter(token, entry, hidden_states[sequence, entry - 1], from_target=True)
            torch.testing.assert_close(unrolled[0, sequence, row], hidden, rtol=1e-4, atol=1e-4)
            for depth in range(1, DEPTHS):
                entry = row + 1 + depth
                hidden = head.enter(int(tokens[sequence, entry]), entry, hidden, from_target=False)
                torch.testing.assert_close(unrolled[depth, sequence, row], hidden, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("algorithm", "draft_vocab_size"), [("eagle3", 40), ("eagle3", 0), ("eagle2", 40)])
@torch.no_grad()
def test_acceptance_is_that_of_drafting_with_the_heads_own_tokens(
    target: FrozenTarget, algorithm: str, draft_vocab_size: int
) -> None:
    """Measuring reads the target's text, serving feeds the head its drafts: both count alike."""
    recipe = make_recipe(target, algorithm, draft_vocab_size)
    texts = held_out_texts(target, torch.from_numpy(repeating_tokens(300).astype("int32")), 6, ROWS + DEPTHS + 1, 4)
    fitted = recipe.module
    optimizer = torch.optim.Adam(fitted.parameters(), lr=1e-2)
    with torch.enable_grad():
        for step in range(30):
            optimizer.zero_grad()
            torch.autograd.backward(recipe.loss(texts[:, : recipe.window], step))  # type: ignore[attr-defined]
            optimizer.step()
    accepted = [0] * (DEPTHS + 1)
    for text in texts:
        hidden_states = target_hidden_states(recipe, text)
        for row in range(len(text) // 2 - 2, ROWS):
            accepted[count_accepted(recipe, text, hidden_states, row)] += 1
    chains = sum(accepted)
    reached = [sum(accepted[depth:]) for depth in range(DEPTHS + 1)]
    figures = measure(recipe, texts, 4)  # type: ignore[arg-type]
    assert figures.num_chains == chains
    assert 0 < accepted[0] < chains
    assert figures.per_step == pytest.approx([reached[d + 1] / max(1, reached[d]) for d in range(DEPTHS)])
    assert figures.tokens_per_step == pytest.approx(1 + sum(reached[1:]) / chains)


def count_accepted(recipe: EagleRecipe, text: Tensor, hidden_states: Tensor, row: int) -> int:
    """Draft a greedy chain from the root at ``row + 1``; return how many tokens are right."""
    head = PlainHead(recipe)
    for entry in range(1, row + 2):
        hidden = head.enter(int(text[entry]), entry, hidden_states[entry - 1], from_target=True)
    for depth in range(DEPTHS):
        drafted = int(recipe._target_ids(recipe.module.logits(hidden).argmax(-1)))
        if drafted != int(text[row + 2 + depth]):
            return depth
        hidden = head.enter(drafted, row + 2 + depth, hidden, from_target=False)
    return DEPTHS


@torch.no_grad()
def test_held_out_texts_go_on_as_the_target_greedily_would(target: FrozenTarget) -> None:
    texts = held_out_texts(target, torch.from_numpy(repeating_tokens(300).astype("int32")), 3, 20, 2)
    assert texts.shape == (3, 20)
    predicted = target.logits(target.run(texts).final).argmax(-1)
    assert torch.equal(texts[:, 10:], predicted[:, 9:-1])


def test_eagle3_labels_leave_out_positions_whose_best_token_cannot_be_drafted(target: FrozenTarget) -> None:
    recipe = make_recipe(target, "eagle3")
    assert isinstance(recipe, Eagle3Recipe)
    tokens = torch.randint(VOCAB_SIZE, (2, recipe.window), generator=torch.Generator().manual_seed(2))
    final = target.run(tokens).final
    probs, is_counted = recipe._labels(final)
    logits = target.logits(final)
    expected = logits.softmax(-1)[..., recipe.draft_ids]
    torch.testing.assert_close(probs, expected / expected.sum(-1, keepdim=True))
    assert torch.equal(is_counted.bool(), torch.isin(logits.argmax(-1), recipe.draft_ids))
    assert 0 < is_counted.sum() < is_counted.numel()


def test_an_eagle3_head_with_the_targets_output_head_can_draft_every_token(target: FrozenTarget) -> None:
    recipe = make_recipe(target, "eagle3", draft_vocab_size=0)
    assert isinstance(recipe, Eagle3Recipe)
    assert recipe.draft_ids.tolist() == list(range(VOCAB_SIZE))
    assert not {"lm_head.weight", "target_head"} & recipe.module.state_dict().keys()
    _, is_counted = recipe._labels(target.run(torch.arange(20)[None]).final)
    assert bool(is_counted.all())


def test_compiled_code_is_given_and_gives_plain_tuples(target: FrozenTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 loses the items of a named tuple that compiled code returns."""
    seen: list[object] = []

    def watched(function: Callable[..., Any], **_: object) -> Callable[..., Any]:
        def call(*arguments: object) -> object:
            result = function(*arguments)
            seen.extend((*arguments, *result))
            return result

        return call

    monkeypatch.setattr(torch, "compile", watched)
    recipe = make_recipe(target, "eagle3", compile=True)
    tokens = torch.randint(VOCAB_SIZE, (2, recipe.window), generator=torch.Generator().manual_seed(2))
    assert isinstance(recipe, Eagle3Recipe)
    recipe.loss(tokens, 0)
    assert len([each for each in seen if type(each) is tuple]) == 2 * DEPTHS
    assert {type(each) for each in seen} <= {tuple, Tensor}


def test_the_captured_layers_are_three() -> None:
    assert captured_layers(32) == (2, 16, 29)
    assert captured_layers(8) == (2, 4, 5)
    assert captured_layers(4) == (2, 2, 1)
    assert captured_layers(4, (1, 3)) == (1, 3)


def test_each_epoch_has_every_window_once_and_a_batch_depends_on_its_number_alone() -> None:
    tokens = torch.arange(103, dtype=torch.int32)
    batches = [Windows(tokens, 13, 10, 3, seed=5).batch(step) for step in range(6)]
    assert torch.equal(batches[4], Windows(tokens, 13, 10, 3, seed=5).batch(4))
    starts = torch.cat(batches)[:, 0].tolist()
    assert all(torch.equal(row, torch.arange(int(row[0]), int(row[0]) + 13)) for row in torch.cat(batches))
    num_windows = Windows(tokens, 13, 10, 3, seed=5).num_windows
    assert num_windows == 9
    first, second = starts[:9], starts[9:18]
    assert len({start // 10 for start in first}) == 9 and len({start // 10 for start in second}) == 9
    assert len({start % 10 for start in first}) == 1 and first != second


def test_the_draft_vocabulary_is_the_most_frequent_ids() -> None:
    tokens = torch.tensor([7, 7, 7, 3, 3, 9, 9, 1], dtype=torch.int32)
    assert most_frequent(tokens, 3, 12).tolist() == [3, 7, 9]
    assert most_frequent(tokens, 5, 12).tolist() == [0, 1, 3, 7, 9]


def test_too_few_tokens_for_a_window_are_refused() -> None:
    with pytest.raises(ConfigError, match="22 training tokens are too few for windows of 13: at least 23 are needed"):
        Windows(torch.arange(22), 13, 10, 3, seed=5)
