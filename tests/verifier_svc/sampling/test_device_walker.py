"""The walk on a GPU (or in Triton's interpreter) gives the host's results, row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from foretoken.sampling import SamplingParams, SpeculationOptions
from foretoken.tree import DraftTree
from verifier_svc.messages import SequenceKey, Submit
from verifier_svc.sampling.device_walker import DeviceWalker
from verifier_svc.sampling.verify import WalkResult
from verifier_svc.sampling.walker import HostWalker, Walk
from verifier_svc.scheduling.sequence import Sequence

VOCAB, LIMIT, EOS = 40, 36, 3
MAX_BATCH_SLOTS, MAX_NODES, MAX_ROWS = 4, 6, 32
# Node 3 is a second child of the root with the first one's token; a branch has room for two
# tokens below it.
PARENTS = [-1, 0, 0, 0, 1, 4]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=30, logprobs=2),
    SamplingParams(temperature=0.9, seed=7, max_tokens=9, presence_penalty=0.6, repetition_penalty=1.2),
    SamplingParams(temperature=1.1, seed=2**63 + 5, max_tokens=30, top_k=9, top_p=0.8, min_p=0.02, logprobs=0),
    SamplingParams(temperature=0.0, max_tokens=12, logit_bias={5: 4.0, 39: 9.0}, stop_token_ids=(5,), min_tokens=4),
]


def sequence_of(number: int, params: SamplingParams) -> Sequence:
    key = SequenceKey(1, f"r{number}", number % 2)
    submit = Submit(key, 0, (4, 5, 6 + number), (9,) * (number % 2), params, SpeculationOptions(), None, None)
    made = Sequence(submit, max_model_len=64, eos_ids=frozenset({EOS}), token_limit=LIMIT, now=0.0)
    made.batch_slot, made.generation = number, 1
    return made


def walker(device: str) -> DeviceWalker:
    return DeviceWalker(
        vocab_size=VOCAB,
        token_limit=LIMIT,
        max_batch_slots=MAX_BATCH_SLOTS,
        max_rows=MAX_ROWS,
        max_nodes=MAX_NODES,
        device=torch.device(device),
        graphs=True,
    )


def tree_of(random: np.random.Generator, root: int, logits: np.ndarray) -> DraftTree:
    """Return a tree that often holds the sampled token: the rows' best tokens and some others."""
    size = int(random.integers(1, MAX_NODES + 1))
    parents = PARENTS[:size]
    best = logits.argmax(1)
    tokens = [root] + [int(best[parent]) if random.random() < 0.7 else 8 for parent in parents[1:]]
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32))


def assert_same(found: WalkResult, expected: WalkResult) -> None:
    assert found._replace(logprobs=[]) == expected._replace(logprobs=[])
    assert len(found.logprobs) == len(expected.logprobs)
    for have, want in zip(found.logprobs, expected.logprobs, strict=True):
        assert (have.token_id, have.rank) == (want.token_id, want.rank)
        assert have.logprob == pytest.approx(want.logprob, abs=1e-5)


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_steps_of_a_batch_are_those_of_the_host(count: int, device: str) -> None:
    """Walk step after step, with unused rows between the sequences, until all have ended."""
    random = np.random.default_rng(1)
    on_device, on_host = walker(device), HostWalker()
    # As in a runner: one buffer, whose first rows belong to the step.
    buffer = torch.zeros((MAX_ROWS, VOCAB), device=device)
    pairs = {n: (sequence_of(n, params), sequence_of(n, params)) for n, params in enumerate(PARAMS[:count])}
    num_accepted = 0
    while pairs:
        first_row = 0
        walks: list[tuple[Walk, Walk]] = []
        buffer.copy_(torch.from_numpy(random.standard_normal((MAX_ROWS, VOCAB)).astype(np.float32) * 2))
        for ours, theirs in pairs.values():
            first_row += int(random.integers(0, 3))
            rows = buffer[first_row : first_row + MAX_NODES].cpu().numpy()
            tree = tree_of(random, ours.tokens[-1], rows)
            sources = list(range(tree.num_nodes))
            walks.append((Walk(ours, tree, first_row, sources), Walk(theirs, tree, first_row, sources)))
            first_row += tree.num_nodes
        logits = buffer[:first_row]
        found = on_device.walk([pair[0] for pair in walks], logits)
        expected = on_host.walk([pair[1] for pair in walks], logits)
        for number, got, want in zip(list(pairs), found, expected, strict=True):
            assert_same(got, want)
            num_accepted += len(got.accepted_nodes)
            for sequence in pairs[number]:
                sequence.tokens.extend(got.tokens)
            if got.finish is not None:
                del pairs[number]
    assert num_accepted > 10


def test_a_batch_slot_is_taken_over(device: str) -> None:
    """No rules or counts of the sequence before remain."""
    on_device, on_host = walker(device), HostWalker()
    logits = torch.linspace(0, 1, VOCAB, device=device)[None].clone()
    for generation, params in enumerate((PARAMS[1], PARAMS[0], PARAMS[3], PARAMS[1])):
        ours, theirs = sequence_of(0, params), sequence_of(0, params)
        ours.generation = generation
        tree = DraftTree.root_only(ours.tokens[-1])
        found = on_device.walk([Walk(ours, tree, 0, None)], logits)[0]
        assert_same(found, on_host.walk([Walk(theirs, tree, 0, None)], logits)[0])


def test_sequences_that_only_fill_up_have_no_rows(device: str) -> None:
    """Three roots use a graph of three rows and four sequences: one graph serves both sizes."""
    on_device, on_host = walker(device), HostWalker()
    logits = torch.from_numpy(np.random.default_rng(5).standard_normal((4, VOCAB)).astype(np.float32)).to(device)
    for count in (3, 4):
        ours, theirs = ([sequence_of(n, PARAMS[n]) for n in range(count)] for _ in range(2))
        walks = [
            [Walk(each, DraftTree.root_only(each.tokens[-1]), row, None) for row, each in enumerate(sequences)]
            for sequences in (ours, theirs)
        ]
        found, expected = on_device.walk(walks[0], logits[:count]), on_host.walk(walks[1], logits[:count])
        for got, want in zip(found, expected, strict=True):
            assert_same(got, want)
    assert {tuple(shape) for shape in on_device._stages} == {(3, 4), (4, 4)}


def test_rows_between_two_sequences_are_no_nodes(device: str) -> None:
    """Such rows hold leftovers of an earlier step: here the very token that is sampled."""
    on_device = walker(device)
    logits = torch.zeros((MAX_NODES + 1, VOCAB), device=device)
    logits[:, 8] = 5.0
    first, second = sequence_of(0, PARAMS[0]), sequence_of(1, PARAMS[0])
    chain = DraftTree(np.full(MAX_NODES, 8, np.int32), np.arange(-1, MAX_NODES - 1, dtype=np.int32))
    root = DraftTree.root_only(8)
    before = on_device.walk([Walk(first, chain, 0, None), Walk(second, root, MAX_NODES, None)], logits)
    assert len(before[0].accepted_nodes) == MAX_NODES - 1
    found = on_device.walk([Walk(first, root, 0, None), Walk(second, root, MAX_NODES, None)], logits)
    assert [result.tokens for result in found] == [[8], [8]]
    assert [result.accepted_nodes for result in found] == [[], []]
