"""A target keeps hidden states for draft heads: which ones, which rows, without changing a bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from foretoken.drafting import FINAL_NORM
from foretoken.models.batch import ForwardBatch
from foretoken.models.llama import HostLlama
from foretoken.models.row_check import rows_are_independent
from foretoken.models.target_weights import TargetWeights
from tests.foretoken.test_models import (
    PARENTS,
    Paged,
    load,
    load_with_cache,
    oracle,
    pair,
    paths,
    random_model,
    some_tokens,
)

__all__ = ["pair"]


def hidden_states(model: PreTrainedModel, tokens: np.ndarray) -> dict[int, torch.Tensor]:
    """Return each layer's input, the last one's output, and that after the norm, by number."""
    leaving: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _module, inputs: leaving.append(inputs[0]))
    with torch.inference_mode():
        found = model(torch.from_numpy(tokens.astype(np.int64))[None], output_hidden_states=True).hidden_states
    hook.remove()
    num_layers = model.config.num_hidden_layers
    states = {layer: found[layer][0] for layer in range(num_layers)}
    return {**states, num_layers: leaving[0][0], FINAL_NORM: found[-1][0]}


def test_hidden_states_equal_transformers(pair: tuple[PreTrainedModel, HostLlama]) -> None:
    model, ours = pair
    tokens = some_tokens(50)
    expected = hidden_states(model, tokens)
    asked = (*expected, 1)
    ours.forward(Paged(1).prefill(0, tokens, 0, 50), asked)
    found = ours.hidden_states.unflatten(1, (len(asked), -1))
    assert found.shape[0] == 50
    for i, layer in enumerate(asked):
        torch.testing.assert_close(found[:, i], expected[layer], rtol=0, atol=1e-4)
    # Neighbours differ, so that a mix-up shows.
    assert min((expected[i] - expected[i + 1]).abs().max() for i in range(len(expected) - 2)) > 0.01


def test_hidden_states_of_all_rows_though_logits_of_few(pair: tuple[PreTrainedModel, HostLlama]) -> None:
    model, ours = pair
    prefix, nodes, paged = some_tokens(20, 1), some_tokens(len(PARENTS), 2), Paged(1)
    ours.forward(paged.prefill(0, prefix, 0, 20))
    tree = paged.tree(0, nodes, PARENTS, 20)
    fields = {name: getattr(tree, name) for name in tree.__slots__}
    batch = ForwardBatch(**{**fields, "logit_rows": np.array([4], np.int32)})
    logits = ours.forward(batch, (FINAL_NORM,))
    assert logits.shape[0] == 1
    for node, path in enumerate(paths(PARENTS)):
        text = np.concatenate([prefix, nodes[path]])
        torch.testing.assert_close(
            ours.hidden_states[node], hidden_states(model, text)[FINAL_NORM][-1], rtol=0, atol=1e-4
        )
    torch.testing.assert_close(
        logits[0], oracle(model, np.concatenate([prefix, nodes[paths(PARENTS)[4]]]))[-1], rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("asked", [(), (0, 2), (2, FINAL_NORM), (3,)])
@pytest.mark.parametrize("name", ["llama", "llama, head dimension 80, no groups", "qwen3 tied"])
def test_rows_whose_logits_nobody_wants_change_no_bit(tmp_path: Path, name: str, asked: tuple[int, ...]) -> None:
    """The last layer leaves out what only they would need, unless a hidden state needs it."""
    random_model(name).save_pretrained(tmp_path)
    ours, cache = load_with_cache(tmp_path)
    cache.data.fill_(0)
    tokens, paged = some_tokens(40), Paged(1)
    ours.forward(paged.prefill(0, tokens, 0, 10))
    batch = paged.prefill(0, tokens, 10, 40)
    everything = ours.forward(batch, asked).clone()
    hidden_states, entries = ours.hidden_states.clone(), cache.data.clone()
    for wanted in ([3, 17, 29], [0], []):
        cache.data.fill_(0)
        ours.forward(paged.prefill(0, tokens, 0, 10), asked)
        fields = {name: getattr(batch, name) for name in batch.__slots__}
        found = ours.forward(ForwardBatch(**{**fields, "logit_rows": np.array(wanted, np.int32)}), asked)
        assert torch.equal(found, everything[wanted])
        assert torch.equal(ours.hidden_states, hidden_states)
        assert torch.equal(cache.data, entries)


@pytest.fixture
def llama(tmp_path: Path) -> HostLlama:
    random_model("llama").save_pretrained(tmp_path)
    return load(tmp_path)


def test_the_set_may_change_between_passes_and_none_is_empty(llama: HostLlama) -> None:
    tokens = some_tokens(9)
    batch = Paged(1).prefill(0, tokens, 0, 9)
    plain = llama.forward(batch).clone()
    assert llama.hidden_states.shape == (9, 0)
    size = llama.config.hidden_size
    assert torch.equal(llama.forward(batch, (2, FINAL_NORM)), plain)
    both = llama.hidden_states.clone()
    llama.forward(batch, (FINAL_NORM,))
    assert torch.equal(llama.hidden_states, both[:, size:])
    llama.forward(batch, (2,))
    assert torch.equal(llama.hidden_states, both[:, :size])
    llama.forward(batch)
    assert llama.hidden_states.shape == (9, 0)


def test_rows_stay_independent_with_hidden_states(llama: HostLlama) -> None:
    """A row has the same logits and hidden states in every batch."""
    asked = (0, 1, llama.config.num_layers, FINAL_NORM)
    num_passes = 0

    def forward(batch: ForwardBatch) -> torch.Tensor:
        nonlocal num_passes
        num_passes += 1
        return torch.cat([llama.forward(batch, asked), llama.hidden_states], dim=1)

    seen: list[tuple[int, int]] = []
    assert rows_are_independent(forward, llama.config, 8, 256, lambda done, total, what: seen.append((done, total)))
    assert seen == [(done, num_passes) for done in range(num_passes + 1)]


@pytest.mark.parametrize("layer", [-2, 9])
def test_a_hidden_state_that_is_not_there(llama: HostLlama, layer: int) -> None:
    with pytest.raises(ValueError, match=f"no hidden state {layer}"):
        llama.forward(Paged(1).prefill(0, some_tokens(3), 0, 3), (layer,))


def test_kv_slots_before_the_start_of_a_context_are_not_read(llama: HostLlama) -> None:
    tokens, paged = some_tokens(40), Paged(1)
    batch = paged.prefill(0, tokens, 11, 40)
    fields = {name: getattr(batch, name) for name in batch.__slots__}
    late = ForwardBatch(**{**fields, "context_starts": np.array([11], np.int32)})
    found = llama.forward(late).clone()
    llama.forward(paged.prefill(0, tokens[:11], 0, 11))
    assert torch.equal(llama.forward(late), found)
    assert not torch.equal(llama.forward(batch), found)
    # Rotary positions count alone by their distances: the same text from position 0 on.
    alone = llama.forward(paged.prefill(0, tokens[11:], 0, 29))
    torch.testing.assert_close(found, alone, rtol=0, atol=1e-4)


def test_starts_of_another_length_than_the_sequences_are_refused(llama: HostLlama) -> None:
    batch = Paged(1).prefill(0, some_tokens(3), 0, 3)
    fields = {name: getattr(batch, name) for name in batch.__slots__}
    with pytest.raises(ValueError, match="context_starts"):
        llama.forward(ForwardBatch(**{**fields, "context_starts": np.zeros(2, np.int32)}))


def test_arrays_with_gaps_are_refused(llama: HostLlama) -> None:
    batch = Paged(1).prefill(0, some_tokens(3), 0, 3)
    fields = {name: getattr(batch, name) for name in batch.__slots__}
    gapped = np.repeat(batch.token_ids, 2)[::2]
    with pytest.raises(ValueError, match="contiguous"):
        llama.forward(ForwardBatch(**{**fields, "token_ids": gapped}))


def test_batches_that_outgrow_the_buffers_in_one_way_at_a_time(llama: HostLlama) -> None:
    """More rows, a longer path and more logits, in every order, with and without hidden states."""
    tokens, paged = some_tokens(200), Paged(1)
    expected = llama.forward(paged.prefill(0, tokens, 0, 200)).clone()
    fresh = HostLlama(llama.config, llama._weights, llama._executor._cache, 256, 1)
    for first, end in ((0, 1), (190, 191), (0, 70), (120, 200), (5, 6)):
        for hidden_states in ((), (FINAL_NORM, 1)):
            assert torch.equal(fresh.forward(paged.prefill(0, tokens, first, end), hidden_states), expected[first:end])


def test_weights_for_draft_models_are_no_copy(llama: HostLlama) -> None:
    shared = TargetWeights.of(llama.config, llama._weights)
    assert shared.head is llama._weights.head and shared.embedding is llama._weights.embedding
    assert (shared.vocab_size, shared.hidden_size) == (llama.config.vocab_size, llama.config.hidden_size)
    assert not shared.tied and shared.embedding is not shared.head
