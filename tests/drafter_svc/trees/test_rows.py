"""Which sequence's KV entries a block holds, if tokens are read after the block was given away."""

from __future__ import annotations

from drafter_svc.trees.rows import DraftRows, sent_rows
from tests.support.paged_draft import BLOCK, Row, request_of, some_tokens, target_info


def test_a_block_that_another_has_claimed_is_not_keyed_for_its_old_owner() -> None:
    """The new owner's tokens are never read; its KV entries still must not count as old text."""
    rows = DraftRows(target_info(), first_position=0, needs_hidden=False)
    tokens = some_tokens(3 * BLOCK, 1)

    def send(row: Row) -> int:
        """Return the end of the valid range."""
        (sent,) = sent_rows(request_of([row], with_hidden=False))
        sequence = rows.learn(sent)
        assert sequence is not None
        rows.extend(sent, sequence, 2 * BLOCK)
        return sequence.valid_end

    assert send(Row(tokens[: BLOCK + 1], BLOCK + 1, [5, 6])) == BLOCK + 1
    assert send(Row([*tokens[:BLOCK], 1], BLOCK + 1, [5, 7], batch_slot=1)) == BLOCK + 1
    (old,), (new,) = rows._sequences[0], rows._sequences[1]
    rows.claim_blocks(old, 1, 2)
    assert rows.append_blocks(new, 2, [6])
    rows.claim_blocks(new, 2, 3)
    assert rows.advance(old, tokens[BLOCK + 1 : 2 * BLOCK], is_written=True)
    heir = Row(tokens[: 2 * BLOCK + 1], 2 * BLOCK + 1, [5, 6, 8], batch_slot=2)
    (sent,) = sent_rows(request_of([heir], with_hidden=False))
    learned = rows.learn(sent)
    assert learned is not None and learned.valid_end == BLOCK


def test_a_sequence_is_dropped_and_its_batch_slots_successor_stays() -> None:
    rows = DraftRows(target_info(), first_position=0, needs_hidden=False)
    for generation in (1, 2):
        (sent,) = sent_rows(request_of([Row([3, 4], 2, [5], generation=generation)], with_hidden=False))
        assert rows.learn(sent) is not None
    old, new = rows.find(0, 1, 0), rows.find(0, 2, 0)
    assert old is not None and new is not None
    rows.drop(old)
    assert rows.find(0, 1, 0) is None and rows.find(0, 2, 0) is new
    rows.drop(new)
    rows.drop(new)
    assert rows.find(0, 2, 0) is None


def test_nobody_goes_on_from_entries_that_were_revoked() -> None:
    rows = DraftRows(target_info(), first_position=0, needs_hidden=False)
    tokens = some_tokens(2 * BLOCK + 1, 2)

    def send(row: Row) -> int:
        """Return where the row's new KV entries begin, and revoke those of the first batch slot."""
        (sent,) = sent_rows(request_of([row], with_hidden=False))
        sequence = rows.learn(sent)
        assert sequence is not None
        extension = rows.extend(sent, sequence, len(tokens))
        assert extension is not None
        if row.batch_slot == 0:
            rows.revoke(extension)
        return extension.start

    assert send(Row(tokens, len(tokens), [5, 6, 7])) == 0
    assert rows.find(0, 1, 0) is None
    assert send(Row(tokens, len(tokens), [5, 6, 8], batch_slot=1)) == 0
    assert send(Row(tokens, len(tokens), [5, 6, 9], batch_slot=2)) == 2 * BLOCK


def test_a_text_of_one_block_is_drafted_for_again_where_a_head_can_write_its_entries() -> None:
    """A block that is given out twice holds them already. But the root needs an output."""
    rows = DraftRows(target_info(), first_position=1, needs_hidden=True)
    tokens = some_tokens(BLOCK, 3)
    for generation in (1, 2):
        (sent,) = sent_rows(request_of([Row(tokens, BLOCK, [5], generation=generation)], with_hidden=True))
        sequence = rows.learn(sent)
        assert sequence is not None
        extension = rows.extend(sent, sequence, BLOCK)
        assert extension is not None and extension.start == 1
