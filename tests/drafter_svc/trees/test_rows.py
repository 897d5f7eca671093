"""Which sequence's KV entries a block holds, if tokens are read after the block was given away."""

from __future__ import annotations

from drafter_svc.trees.rows import DraftRows, sent_rows
from tests.support.paged_draft import BLOCK, Row, request_of, some_tokens, target_info


def test_a_block_that_another_has_claimed_is_not_keyed_for_its_old_owner() -> None:
    """The new owner's tokens are never read; its KV entries still must not count as old text."""
    rows = DraftRows(target_info(), first_position=0, needs_features=False)
    tokens = some_tokens(3 * BLOCK, 1)

    def send(row: Row) -> int:
        """Return the end of the valid range."""
        (sent,) = sent_rows(request_of([row], with_features=False))
        sequence = rows.learn(sent)
        assert sequence is not None
        rows.extend(sent, sequence, 2 * BLOCK)
        return sequence.valid_end

    assert send(Row(tokens[: BLOCK + 1], BLOCK + 1, [5, 6])) == BLOCK + 1
    assert send(Row([*tokens[:BLOCK], 1], BLOCK + 1, [5, 7], slot=1)) == BLOCK + 1
    (old,), (new,) = rows._sequences[0], rows._sequences[1]
    rows.claim_blocks(old, 1, 2)
    assert rows.append_blocks(new, 2, [6])
    rows.claim_blocks(new, 2, 3)
    assert rows.advance(old, tokens[BLOCK + 1 : 2 * BLOCK], is_written=True)
    heir = Row(tokens[: 2 * BLOCK + 1], 2 * BLOCK + 1, [5, 6, 8], slot=2)
    (sent,) = sent_rows(request_of([heir], with_features=False))
    learnt = rows.learn(sent)
    assert learnt is not None and learnt.valid_end == BLOCK
