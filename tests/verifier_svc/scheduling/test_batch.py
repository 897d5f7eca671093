"""The rows of a step, by literal tensors: prefill chunk, root-only row, chain and tree."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from foretoken.sampling import SamplingParams, SpeculationOptions
from foretoken.tree import DraftTree
from verifier_svc.messages import SequenceKey, Submit
from verifier_svc.scheduling.batch import Scheduled, build_batch, commit_kv_slots
from verifier_svc.scheduling.draft import Draft
from verifier_svc.scheduling.sequence import Sequence

# The KV slot for KV entries that nobody reads.
SCRATCH = 40


@dataclass
class Table:
    """Block ids as the block manager would give them out."""

    block_ids: list[int] = field(default_factory=list)


def drafted(tree: DraftTree) -> Draft:
    """Return a draft of the first drafter."""
    count = tree.num_nodes
    return Draft(tree, [0] + [1] * (count - 1), [0.0] * count, [1.0] * count)


def sequence(tokens: list[int], num_prompt: int, num_computed: int, blocks: list[int]) -> Sequence:
    submit = Submit(
        key=SequenceKey(1, "r", 0),
        attempt=0,
        prompt_ids=tuple(tokens[:num_prompt]),
        output_ids=(),
        sampling=SamplingParams(),
        speculation=SpeculationOptions(),
        cache_salt=None,
        deadline=None,
    )
    out = Sequence(submit, max_model_len=64, eos_ids=frozenset(), token_limit=100, now=0.0)
    out.tokens = list(tokens)
    out.num_computed = num_computed
    out.table = Table(blocks)  # type: ignore[assignment]
    out.batch_slot = 0
    return out


def test_a_prefill_chunk_has_no_logits_before_the_last_token() -> None:
    part = Scheduled(sequence([10, 11, 12, 13, 14], 5, 1, [7, 3]), 3, 1)
    batch = build_batch([part], block_size=4, scratch_kv_slot=SCRATCH)
    forward = batch.forward
    assert forward.token_ids.tolist() == [11, 12, 13]
    assert forward.positions.tolist() == [1, 2, 3]
    assert forward.context_lens.tolist() == [2, 3, 4]
    assert forward.kv_slots.tolist() == [29, 30, 31]
    assert forward.logit_rows.tolist() == []
    assert batch.logit_starts == [0, 0]


def test_a_chain_needs_no_mask() -> None:
    part = Scheduled(sequence([10, 11, 12], 2, 2, [7, 3]), 1, 4, drafted(DraftTree.chain([12, 13, 14])))
    forward = build_batch([part], block_size=4, scratch_kv_slot=SCRATCH).forward
    assert forward.token_ids.tolist() == [12, 13, 14]
    assert forward.positions.tolist() == [2, 3, 4]
    assert forward.context_lens.tolist() == [3, 4, 5]
    assert forward.kv_slots.tolist() == [30, 31, 12]
    assert not forward.masks.any()
    assert forward.logit_rows.tolist() == [0, 1, 2]


def test_a_tree_row_sees_its_ancestors_and_no_sibling() -> None:
    #        12 (0)
    #       /      \
    #   20 (1)    21 (2)
    #     |
    #   22 (3)
    tree = DraftTree(np.array([12, 20, 21, 22], np.int32), np.array([-1, 0, 0, 1], np.int32))
    part = Scheduled(sequence([10, 11, 12], 2, 2, [7, 3]), 1, 4, drafted(tree))
    forward = build_batch([part], block_size=4, scratch_kv_slot=SCRATCH).forward
    assert forward.positions.tolist() == [2, 3, 3, 4]
    assert forward.context_lens.tolist() == [3, 3, 3, 3]
    assert forward.tree_starts.tolist() == [2]
    assert forward.masks[:, 0].tolist() == [0b0000, 0b0010, 0b0100, 0b1010]
    assert forward.kv_slots.tolist() == [30, 31, 12, 13]


def test_sequences_lie_one_after_the_other() -> None:
    first = Scheduled(sequence([10, 11, 12], 2, 2, [7]), 1, 1)
    second = Scheduled(sequence([20, 21, 22, 23, 24], 5, 0, [1, 2]), 5, 1)
    batch = build_batch([first, second], block_size=4, scratch_kv_slot=SCRATCH)
    assert batch.forward.row_seqs.tolist() == [0, 1, 1, 1, 1, 1]
    assert batch.forward.block_tables.tolist() == [[7, 0], [1, 2]]
    assert batch.forward.logit_rows.tolist() == [0, 5]
    assert batch.logit_starts == [0, 1, 2]


def test_positions_that_run_again_see_their_entries_and_write_to_scratch() -> None:
    again = Scheduled(sequence([10, 11, 12, 13, 14, 15], 6, 4, [7, 3]), 2, 1, num_rerun=2)
    other = Scheduled(sequence([20, 21], 1, 1, [5]), 1, 1)
    batch = build_batch([again, other], block_size=4, scratch_kv_slot=SCRATCH)
    forward = batch.forward
    assert forward.token_ids.tolist() == [12, 13, 14, 15, 21]
    assert forward.positions.tolist() == [2, 3, 4, 5, 1]
    assert forward.context_lens.tolist() == [3, 4, 5, 6, 2]
    assert forward.kv_slots.tolist() == [SCRATCH, SCRATCH, 12, 13, 21]
    assert forward.logit_rows.tolist() == [3, 4]
    assert (batch.logit_starts, batch.row_starts) == ([0, 1, 2], [0, 4])


def test_commit_moves_only_what_lies_wrong() -> None:
    owner = sequence([10, 11, 12], 2, 2, [7, 3])
    assert commit_kv_slots(owner, [1, 2], 4) == ([], [])
    # Node 3 at depth 2: logical KV slot 5 moves to 4.
    assert commit_kv_slots(owner, [1, 3], 4) == ([13], [12])
    assert commit_kv_slots(owner, [2, 4], 4) == ([12, 14], [31, 12])
