"""STANDALONE: its refusals; a draft model that is the target itself drafts only right tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter_svc.model.standalone import StandaloneDrafter
from foretoken.drafting import DrafterNeeds, TargetInfo
from foretoken.errors import CheckpointError, PreconditionError
from foretoken.kv_cache import KVCache
from foretoken.models.batch import ForwardBatch
from foretoken.models.config import load_config
from foretoken.models.decoder_weights import load_decoder_weights
from foretoken.models.llama import HostLlama
from foretoken.models.weights import Checkpoint
from foretoken.sampling import SamplingParams
from tests.references.logits import sample_reference
from tests.support.paged_draft import Row, request_of, target_info
from tests.support.tiny_checkpoint import save_llama, save_tokenizer

VOCAB = 64


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_llama(tmp_path / "target", vocab_size=VOCAB)


def info(folder: Path | str, **changes: object) -> TargetInfo:
    sizes = {"vocab_size": VOCAB, "max_model_len": 128, "num_blocks": 64, "checkpoint": str(folder)}
    return target_info(**(sizes | changes))


class Target:
    """Plain decode of one sequence at a time."""

    def __init__(self, folder: Path) -> None:
        config = load_config(folder)
        with Checkpoint(folder) as checkpoint:
            weights = load_decoder_weights(config, checkpoint, torch.float32, lambda done, total, what: None)
        cache = KVCache(config.num_layers, 8, 16, config.num_kv_heads, config.head_dim)
        self._llama = HostLlama(config, weights, cache, 256, 1)

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Return float32 [vocab] after all tokens."""
        positions = np.arange(len(tokens), dtype=np.int32)
        batch = ForwardBatch(
            token_ids=np.array(tokens, np.int32),
            positions=positions,
            kv_slots=positions,
            row_seqs=np.zeros(len(tokens), np.int32),
            context_lens=positions + 1,
            masks=np.zeros((len(tokens), 1), np.uint64),
            tree_starts=np.zeros(1, np.int32),
            block_tables=np.arange(8, dtype=np.int32)[None],
            logit_rows=np.array([len(tokens) - 1], np.int32),
        )
        return self._llama.forward(batch)[0].numpy().copy()

    def text(self, prompt: list[int], count: int, params: SamplingParams, choice: int = 0) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            logits = self.logits(tokens)
            sampled = sample_reference(
                logits, params, prompt_ids=prompt, output_ids=tokens[len(prompt) :], choice_index=choice
            )
            tokens.append(sampled)
        return tokens[len(prompt) :]


def test_it_needs_blocks_only(folder: Path) -> None:
    assert StandaloneDrafter(folder).needs(info(folder)) == DrafterNeeds(blocks=True)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=5),
        SamplingParams(temperature=0.6, seed=2**64 - 3, top_k=9, top_p=0.9, min_p=0.02),
        SamplingParams(temperature=1.5, seed=77, top_p=0.5),
    ],
    ids=["greedy", "T=1", "filters", "top-p"],
)
def test_what_the_target_itself_drafts_is_always_accepted(folder: Path, params: SamplingParams) -> None:
    drafter, target = StandaloneDrafter(folder), Target(folder)
    drafter.attach(info(folder), None)
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2]]
    texts = [target.text(prompt, 24, params, choice) for choice, prompt in enumerate(prompts)]
    tables = [[4, 9, 0, 33, 21, 8, 60, 2, 5, 11], [1, 3, 7, 6, 40, 41, 42, 43, 44]]
    done, new = [0, 0], [len(prompt) for prompt in prompts]
    accepted = 0
    for step in range(5):
        rows = [
            Row(
                [*prompt, *text[:count]],
                sent,
                table,
                batch_slot=batch_slot,
                choice=batch_slot,
                max_nodes=4 + batch_slot,
                max_depth=4,
                max_branches=1,
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=params.top_p,
                min_p=params.min_p,
                seed=params.seed,
            )
            for batch_slot, (prompt, text, table, count, sent) in enumerate(
                zip(prompts, texts, tables, done, new, strict=True)
            )
        ]
        batch = drafter.draft(request_of(rows, with_hidden=False, step_id=step + 1))
        for batch_slot, text in enumerate(texts):
            tree = batch.tree(batch_slot)
            assert tree.parents.tolist() == list(range(-1, tree.num_nodes - 1))
            assert tree.tokens[1:].tolist() == text[done[batch_slot] : done[batch_slot] + 3 + batch_slot]
            accepted += 3 + batch_slot
            # The bonus token too, except in a step in which the verifier drops the draft.
            new[batch_slot] = 1 if step == 2 else tree.num_nodes
            done[batch_slot] += new[batch_slot]
    assert accepted == 5 * 7


def test_wide_trees_hold_the_targets_text_as_well(folder: Path) -> None:
    drafter, target = StandaloneDrafter(folder), Target(folder)
    drafter.attach(info(folder), None)
    prompt = [5, 6, 7, 8, 9]
    text = target.text(prompt, 4, SamplingParams(temperature=0.0))
    row = Row(prompt, 5, [3, 8], max_nodes=16, max_depth=4, max_branches=3)
    tree = drafter.draft(request_of([row], with_hidden=False)).tree(0)
    assert tree.num_nodes == 16
    node, found = 0, []
    while True:
        children = [i for i in range(1, 16) if tree.parents[i] == node and tree.tokens[i] == text[len(found)]]
        if not children:
            break
        found.append(text[len(found)])
        node = children[0]
        if len(found) == 4:
            break
    assert found


def test_another_vocabulary_size_is_refused_with_both(folder: Path) -> None:
    with pytest.raises(PreconditionError, match="vocabulary has 64 tokens, the target's 80"):
        StandaloneDrafter(folder).attach(info(folder, vocab_size=80), None)


def test_another_tokenizer_is_refused_with_its_first_token_that_differs(folder: Path, tmp_path: Path) -> None:
    other = save_llama(tmp_path / "draft", vocab_size=VOCAB)
    words = [f"w{i}" for i in range(VOCAB)]
    words[17], words[30] = "seventeen", "thirty"
    save_tokenizer(other, words)
    with pytest.raises(PreconditionError, match="token 17 is 'seventeen' in the draft model and 'w17' in the target"):
        StandaloneDrafter(other).needs(info(folder))


def test_a_shorter_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    other = save_llama(tmp_path / "draft", vocab_size=VOCAB)
    save_tokenizer(other, [f"w{i}" for i in range(VOCAB - 2)])
    with pytest.raises(PreconditionError, match=r"\(62 tokens\).*\(64 tokens\).*token 62 is missing in the draft"):
        StandaloneDrafter(other).needs(info(folder))


def test_a_target_that_is_not_visible_is_refused_or_named(folder: Path, tmp_path: Path) -> None:
    nowhere = info("/nowhere/target")
    with pytest.raises(PreconditionError, match="/nowhere/target, is not visible here; name a copy with --target"):
        StandaloneDrafter(folder).attach(nowhere, None)
    with pytest.raises(PreconditionError, match="the verifier names none"):
        StandaloneDrafter(folder).attach(info(""), None)
    with pytest.raises(PreconditionError, match=r"there is no config\.json"):
        StandaloneDrafter(folder, target=tmp_path).attach(nowhere, None)
    StandaloneDrafter(folder, target=folder).attach(nowhere, None)


def test_a_missing_tokenizer_is_named(folder: Path, tmp_path: Path) -> None:
    other = save_llama(tmp_path / "draft", vocab_size=VOCAB)
    (other / "tokenizer.json").unlink()
    with pytest.raises(PreconditionError, match=r"draft/tokenizer\.json does not exist"):
        StandaloneDrafter(other).needs(info(folder))
    (other / "tokenizer.json").write_text("{}")
    with pytest.raises(PreconditionError, match=r"draft/tokenizer\.json"):
        StandaloneDrafter(other).needs(info(folder))


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        StandaloneDrafter(tmp_path)


def test_released_and_attached_again(folder: Path) -> None:
    drafter = StandaloneDrafter(folder)
    drafter.release([0])
    assert drafter.gauges() == {}
    drafter.attach(info(folder), None)
    row = Row([1, 2, 3, 4, 5], 5, [3, 8])
    first = drafter.draft(request_of([row], with_hidden=False))
    drafter.release([0, 1])
    drafter.attach(info(folder, max_batch_slots=2), None)
    again = drafter.draft(request_of([row], with_hidden=False))
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert drafter.gauges()["draft_extend_tokens"] == 5


def test_a_model_with_infinity_is_refused(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "draft", vocab_size=VOCAB)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("inf")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor model\.norm\.weight holds NaN or infinity"):
        StandaloneDrafter(folder)
