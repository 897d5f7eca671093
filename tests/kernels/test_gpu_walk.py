"""Test that the device's walk commits the same as verifier_svc/sampling/verify.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from foretoken_kernels.gpu.sample import sample_rows, sample_workspace
from foretoken_kernels.gpu.walk import walk
from foretoken_kernels.reference_sampling import sample_rows_reference, walk_reference
from foretoken_kernels.sampler_state import (
    FINISH_BROKEN,
    FINISH_LENGTH,
    FINISH_NONE,
    FINISH_NOT_ALLOWED,
    FINISH_STOP,
    SamplerState,
    WalkTensors,
)

from foretoken.errors import InvalidRequestError
from foretoken.results import FinishReason
from foretoken.sampling import SamplingParams
from foretoken.tree import DraftTree, depths
from tests.kernels.sampling_batches import (
    Sequence,
    new_batch,
    new_state,
    new_walk_result,
    random_logits,
    random_sequence,
    random_tree,
)
from verifier_svc.sampling.allowed_tokens import CLOSED, ENDED, TreeMasks
from verifier_svc.sampling.device_masks import DeviceMasks
from verifier_svc.sampling.verify import SamplingState, sample_and_walk

FINISHES = {None: FINISH_NONE, FinishReason.STOP: FINISH_STOP, FinishReason.LENGTH: FINISH_LENGTH}


def results_equal(left: WalkTensors, right: WalkTensors, num_seqs: int) -> None:
    for name in ("num_walked", "num_tokens", "num_matched", "num_accepted", "finish"):
        assert getattr(left, name)[:num_seqs].tolist() == getattr(right, name)[:num_seqs].tolist(), name
    for name, count in (("tokens", "num_walked"), ("nodes", "num_walked"), ("accepted", "num_matched")):
        for seq in range(num_seqs):
            size = int(getattr(left, count)[seq])
            assert getattr(left, name)[seq, :size].tolist() == getattr(right, name)[seq, :size].tolist(), name


def step(
    sequences: list[Sequence],
    batch_slots: list[int],
    state: SamplerState,
    device: str,
    masks: dict[int, TreeMasks] | None = None,
) -> WalkTensors:
    """Run one step with the kernels, and the same with the reference on a copy.

    ``masks``: by the sequence's index.
    """
    vocab = sequences[0].logits.shape[1]
    batch = new_batch(sequences, batch_slots, vocab, device, padding_rows=1)
    if masks is not None:
        sender, starts = DeviceMasks(len(batch.tokens), vocab, torch.device(device)), batch.row_starts.tolist()
        sent = sender.send(len(batch.tokens), [(starts[index], each) for index, each in masks.items()])
        batch = batch._replace(mask_rows=sent.rows, mask_bits=sent.bits)
    max_tokens = 1 + max(int(depths(s.tree.parents).max()) for s in sequences)
    num_seqs, num_rows = len(batch.batch_slots), len(batch.tokens)
    copy = SamplerState(*(tensor.clone() for tensor in state))
    sampled = torch.full((num_rows,), -77, dtype=torch.int32, device=device)
    expected_sampled = torch.full_like(sampled, -78)
    sample_rows(batch, state, sample_workspace(num_rows, vocab, device, 64), sampled)
    sample_rows_reference(batch, copy, expected_sampled)
    assert sampled.tolist() == expected_sampled.tolist()
    result, expected = new_walk_result(num_seqs, max_tokens, device), new_walk_result(num_seqs, max_tokens, device)
    for unwritten in (*result, *expected):
        unwritten.fill_(-9)
    walk(batch, sampled, state, result, update_state=False)
    assert all((left == right).all() for left, right in zip(state, copy, strict=True)), "nothing is counted yet"
    walk(batch, sampled, state, result)
    walk_reference(batch, sampled, copy, expected)
    results_equal(result, expected, num_seqs)
    assert all((left == right).all() for left, right in zip(state, copy, strict=True))
    # The sequence without rows.
    assert [int(counts[num_seqs - 1]) for counts in (result.num_walked, result.num_tokens, result.finish)] == [0, 0, 0]
    return result


def assert_committed(result: WalkTensors, index: int, sequence: Sequence, state: SamplingState) -> None:
    """Compare with the verifier's own walk over the same tree and logits."""
    expected = sample_and_walk(
        sequence.logits, sequence.tree, state, len(sequence.prompt), len(sequence.output), sequence.max_new
    )
    num_tokens, num_walked = int(result.num_tokens[index]), int(result.num_walked[index])
    assert result.tokens[index, :num_tokens].tolist() == expected.tokens
    assert num_walked == expected.num_walked_tokens
    assert result.accepted[index, : int(result.num_accepted[index])].tolist() == expected.accepted_nodes
    assert result.accepted[index, : int(result.num_matched[index])].tolist() == expected.matched_nodes
    error = FINISH_NOT_ALLOWED if isinstance(expected.error, InvalidRequestError) else FINISH_BROKEN
    assert int(result.finish[index]) == (error if expected.error is not None else FINISHES[expected.finish])
    if expected.stop_token_id is not None:
        assert int(result.tokens[index, num_walked - 1]) == expected.stop_token_id


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_steps_commit_what_the_verifier_commits(seed, device):
    rng = np.random.default_rng(100 + seed)
    vocab = 90
    sequences = [random_sequence(rng, vocab, int(rng.integers(1, 9)), pull=8.0) for _ in range(3)]
    for sequence in sequences:
        sequence.max_new = int(rng.choice([1, 2, 3, 8, 30]))
    batch_slots = [4, 0, 2]
    state = new_state(sequences, batch_slots, vocab, 5, device)
    mirrors = [SamplingState(s.params, s.prompt, s.output, eos_ids=s.eos_ids, choice_index=s.choice) for s in sequences]
    for _ in range(3):
        result = step(sequences, batch_slots, state, device)
        for index, (sequence, mirror) in enumerate(zip(sequences, mirrors, strict=True)):
            assert_committed(result, index, sequence, mirror)
        going = [index for index in range(len(sequences)) if int(result.finish[index]) == FINISH_NONE]
        for index in going:
            sequence = sequences[index]
            committed = result.tokens[index, : int(result.num_tokens[index])].tolist()
            sequence.output = sequence.output + committed
            sequence.max_new -= len(committed)
            nodes = int(rng.integers(1, 7))
            sequence.tree = random_tree(rng, nodes, vocab, sequence.output[-1])
            sequence.logits = random_logits(rng, nodes, vocab)
            sequence.logits[:, :6] += np.float32(8.0)
        sequences, batch_slots = [sequences[i] for i in going], [batch_slots[i] for i in going]
        mirrors = [mirrors[i] for i in going]
        if not sequences:
            break


def chain_of(tokens: list[int], max_new: int, stop: int | None, **params) -> Sequence:
    """Return a chain whose rows' best tokens are ``tokens[1:]`` and then 9."""
    logits = np.zeros((len(tokens), 80), np.float32)
    logits[np.arange(len(tokens)), [*tokens[1:], 9]] = 5.0
    eos = frozenset() if stop is None else frozenset({stop})
    options = SamplingParams(temperature=0.0, **params)
    return Sequence(options, [tokens[0]], [], DraftTree.chain(tokens), logits, eos_ids=eos, max_new=max_new)


@pytest.mark.parametrize(
    "max_new, stop, tokens, walked, accepted, finish",
    [
        (10, None, [3, 4, 5, 9], 4, [1, 2, 3], FINISH_NONE),
        (10, 9, [3, 4, 5], 4, [1, 2, 3], FINISH_STOP),
        (10, 4, [3], 2, [1], FINISH_STOP),
        (10, 3, [], 1, [], FINISH_STOP),
        (2, 4, [3], 2, [1], FINISH_STOP),
        (1, 4, [3], 2, [1], FINISH_LENGTH),
        (2, None, [3, 4], 4, [1, 2], FINISH_LENGTH),
        (3, 9, [3, 4, 5], 4, [1, 2, 3], FINISH_LENGTH),
        (4, None, [3, 4, 5, 9], 4, [1, 2, 3], FINISH_LENGTH),
    ],
)
def test_stops_and_lengths(max_new, stop, tokens, walked, accepted, finish, device):
    sequence = chain_of([7, 3, 4, 5], max_new, stop)
    result = step([sequence], [0], new_state([sequence], [0], 80, 1, device), device)
    assert_committed(result, 0, sequence, SamplingState(sequence.params, [7], eos_ids=sequence.eos_ids, choice_index=0))
    assert result.tokens[0, : int(result.num_tokens[0])].tolist() == tokens
    assert int(result.num_walked[0]) == walked
    assert result.accepted[0, : int(result.num_accepted[0])].tolist() == accepted
    assert int(result.finish[0]) == finish


@pytest.mark.parametrize("fault", [np.nan, np.inf])
@pytest.mark.parametrize(
    "node, max_new, tokens, accepted, finish",
    [
        (0, 10, [], [], FINISH_BROKEN),
        (2, 10, [3, 4], [1, 2], FINISH_BROKEN),
        (3, 10, [3, 4, 5], [1, 2, 3], FINISH_BROKEN),
        # The output was full before the broken row.
        (2, 2, [3, 4], [1, 2], FINISH_LENGTH),
    ],
)
def test_a_row_that_gives_no_token_ends_its_walk_and_no_other(node, max_new, tokens, accepted, finish, fault, device):
    broken, sound = chain_of([7, 3, 4, 5], max_new, None), chain_of([7, 3, 4, 5], 10, None)
    broken.logits[node, 77] = fault
    state = new_state([broken, sound], [1, 0], 80, 2, device)
    result = step([broken, sound], [1, 0], state, device)
    for index, sequence in enumerate((broken, sound)):
        assert_committed(
            result, index, sequence, SamplingState(sequence.params, [7], eos_ids=frozenset(), choice_index=0)
        )
    assert result.tokens[0, : int(result.num_tokens[0])].tolist() == tokens
    assert int(result.num_walked[0]) == len(tokens)
    assert result.accepted[0, : int(result.num_accepted[0])].tolist() == accepted
    assert int(result.finish[0]) == finish
    assert (result.tokens[1, :4].tolist(), int(result.finish[1])) == ([3, 4, 5, 9], FINISH_NONE)


def test_of_siblings_with_one_token_the_first_is_taken(device):
    tree = DraftTree(np.array([7, 3, 3, 5, 5], np.int32), np.array([-1, 0, 0, 2, 1], np.int32))
    logits = np.zeros((5, 80), np.float32)
    logits[[0, 1, 4], [3, 5, 8]] = 5.0
    sequence = Sequence(SamplingParams(temperature=0.0), [7], [], tree, logits)
    result = step([sequence], [0], new_state([sequence], [0], 80, 1, device), device)
    assert result.tokens[0].tolist() == [3, 5, 8]
    assert result.nodes[0].tolist() == [0, 1, 4]
    assert result.accepted[0, : int(result.num_accepted[0])].tolist() == [1, 4]


def test_penalties_count_the_path_and_what_was_emitted_before(device):
    # Every row prefers token 3 by 3; each time that it stands in the output it costs 2.
    sequence = chain_of([7, 3, 3], 50, None, frequency_penalty=2.0)
    sequence.logits[:] = 0.0
    sequence.logits[:, [3, 4]] = 10.0, 7.0
    state = new_state([sequence], [0], 80, 1, device)
    result = step([sequence], [0], state, device)
    assert result.tokens[0].tolist() == [3, 3, 4]
    assert state.counts[0, :6].tolist() == [0, 0, 0, 2, 1, 0] and state.seen[0, [3, 4, 5, 7]].tolist() == [1, 1, 0, 1]


def test_a_tree_of_more_nodes_than_are_searched_at_once(device):
    # 200 leaves of the root; the last holds the sampled token.
    tokens = [7, *([1] * 199), 3]
    tree = DraftTree(np.array(tokens, np.int32), np.array([-1] + [0] * 200, np.int32))
    logits = np.zeros((201, 80), np.float32)
    logits[0, 3], logits[200, 6] = 5.0, 5.0
    sequence = Sequence(SamplingParams(temperature=0.0), [7], [], tree, logits)
    state = new_state([sequence], [0], 80, 1, device)
    batch = new_batch([sequence], [0], 80, device)
    sampled = torch.from_numpy(logits.argmax(1).astype(np.int32)).to(device)
    result = new_walk_result(2, 2, device)
    walk(batch, sampled, state, result)
    assert result.tokens[0].tolist() == [3, 6] and result.nodes[0].tolist() == [0, 200]


def test_garbage_stays_inside_its_tensors(device):
    """Invalid rows, parents, tokens, batch slots and starts give tokens and touch nothing else."""
    rng = np.random.default_rng(2)
    sequences = [random_sequence(rng, 70, 3) for _ in range(2)]
    state = new_state(sequences, [0, 1], 70, 2, device)
    state.repetition.fill_(1.5)
    batch = new_batch(sequences, [0, 1], 70, device)
    garbage = torch.from_numpy(rng.integers(-(2**31), 2**31 - 1, 64).astype(np.int32)).to(device)
    batch = batch._replace(
        row_seqs=torch.tensor([0, 1, 2, 7, 0, 1], dtype=torch.int32, device=device),
        row_starts=garbage[:4],
        tokens=garbage[4:10],
        parents=garbage[10:16],
        batch_slots=garbage[16:19],
        num_outputs=garbage[19:22],
        max_new=garbage[22:25],
    )
    sampled = torch.zeros(6, dtype=torch.int32, device=device)
    sample_rows(batch, state, sample_workspace(6, 70, device, 64), sampled)
    assert ((sampled >= -1) & (sampled < 70)).all() and int(sampled[3]) == -1
    result = new_walk_result(3, 2, device)
    walk(batch, garbage[30:36], state, result)
    assert ((result.num_walked >= 0) & (result.num_walked <= 2)).all()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_masked_rows_commit_what_the_verifier_commits(seed: int, device: str) -> None:
    """Some sequences have masks, some none; logits are broken, or -inf where tokens are allowed."""
    rng = np.random.default_rng(400 + seed)
    vocab = 70
    sequences = [random_sequence(rng, vocab, int(rng.integers(1, 9)), pull=8.0) for _ in range(5)]
    masks: dict[int, TreeMasks] = {}
    mirrors = []
    for index, sequence in enumerate(sequences):
        fields: dict[str, Any] = {}
        if index % 2 == 0:
            pairs = {(int(a), int(b)) for a, b in rng.integers(8, size=(12, 2))}
            count = int(rng.choice([1, 5, vocab - 1]))
            fields["bad_token_ids"] = ((int(rng.integers(6)),), *pairs)
            fields["allowed_token_ids"] = tuple(rng.choice(vocab, count, replace=False).tolist())
        rules = {"eos_ids": sequence.eos_ids, "choice_index": sequence.choice, "vocab_limit": vocab}
        sequence.params = replace(sequence.params, **fields)
        mirrors.append(SamplingState(sequence.params, sequence.prompt, sequence.output, **rules))
        if fields:
            masks[index] = mirrors[-1].tree_masks(sequence.tree.tokens, sequence.tree.parents)
    batch_slots = [4, 0, 2, 6, 5]
    result = step(sequences, batch_slots, new_state(sequences, batch_slots, vocab, 7, device), device, masks)
    for index, (sequence, mirror) in enumerate(zip(sequences, mirrors, strict=True)):
        assert_committed(result, index, sequence, mirror)


def test_no_walk_enters_a_closed_node(device: str) -> None:
    """A closed root ends its sequence without a token; a closed node ends the walk before it."""
    logits = np.zeros((3, 40), np.float32)
    logits[:, 5] = 9.0
    chain = DraftTree(np.full(3, 5, np.int32), np.array([-1, 0, 1], np.int32))
    sequences = [Sequence(SamplingParams(temperature=0.0), [5], [], chain, logits) for _ in range(3)]
    every = np.full((1, 5), 255, np.uint8)
    masks = {0: ENDED, 1: TreeMasks(every, np.array([0, 0, CLOSED], np.int32))}
    result = step(sequences, [0, 1, 2], new_state(sequences, [0, 1, 2], 40, 3, device), device, masks)
    assert result.num_tokens[:3].tolist() == [0, 2, 3]
    assert result.num_accepted[:3].tolist() == [0, 1, 2]
    assert result.finish[:3].tolist() == [FINISH_STOP, FINISH_NONE, FINISH_NONE]
