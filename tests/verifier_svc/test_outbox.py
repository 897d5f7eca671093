"""The outbox: events in order, merged while untaken, bounded by the sequences submitted."""

from __future__ import annotations

from foretoken.errors import QueueFullError
from foretoken.results import FinishReason, SpeculationStats, VerifiedTree
from verifier_svc.messages import ErrorEvent, FinishedEvent, SequenceKey, TokensEvent
from verifier_svc.outbox import MAX_PENDING_SEQUENCES, Outbox

KEY = SequenceKey(1, "r", 0)


def tokens(offset: int, *ids: int, key: SequenceKey = KEY) -> TokensEvent:
    return TokensEvent(key, 0, offset, ids, tuple(0 for _ in ids))


def finished(key: SequenceKey = KEY) -> FinishedEvent:
    return FinishedEvent(key, 0, FinishReason.STOP, 3, 0, 3, SpeculationStats(), None, 0.0, 0.0)


def test_steps_that_were_not_taken_are_merged() -> None:
    wakes = []
    outbox = Outbox(lambda: wakes.append(1))
    outbox.put([tokens(0, 5)])
    outbox.put([tokens(1, 6, 7)])
    outbox.put([finished()])
    assert outbox.take() == [tokens(0, 5, 6, 7), finished()]
    assert len(wakes) == 1, "one wake for what is taken in one piece"
    assert outbox.take() == []


def test_of_merged_steps_the_newest_tree_is_kept() -> None:
    trees = [VerifiedTree((token, 6), (-1, 0), (0, 1), (1,)) for token in (5, 7)]
    outbox = Outbox(lambda: None)
    for offset, tree in enumerate([*trees, None]):
        outbox.put([tokens(offset, 9)._replace(tree=tree)])
    assert outbox.take() == [tokens(0, 9, 9, 9)._replace(tree=trees[1])]


def test_taken_events_are_not_repeated_and_wake_again() -> None:
    wakes = []
    outbox = Outbox(lambda: wakes.append(1))
    outbox.put([tokens(0, 5)])
    outbox.take()
    outbox.put([tokens(1, 6)])
    assert outbox.take() == [tokens(1, 6)]
    assert len(wakes) == 2


def test_a_reader_that_reads_nothing_is_full_at_the_bound() -> None:
    outbox = Outbox(lambda: None)
    for index in range(MAX_PENDING_SEQUENCES):
        assert not outbox.is_full
        key = SequenceKey(1, str(index), 0)
        outbox.put([ErrorEvent(key, 0, QueueFullError("x").code, "x", "")])
    assert outbox.is_full
    outbox.take()
    assert not outbox.is_full
