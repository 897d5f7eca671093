"""The scheduler where blocks run out."""

from __future__ import annotations

from foretoken.sampling import SamplingParams, SpeculationOptions
from verifier_svc.messages import SequenceKey, Submit
from verifier_svc.scheduling.block_manager import BlockManager
from verifier_svc.scheduling.prefill_budget import PrefillBudget
from verifier_svc.scheduling.scheduler import Scheduler
from verifier_svc.scheduling.sequence import NO_BATCH_SLOT, Sequence


def sequence_of(index: int, length: int, *, priority: int = 0, attempt: int = 0) -> Sequence:
    key = SequenceKey(1, f"r{index}", 0)
    params = SamplingParams(max_tokens=4)
    submit = Submit(key, attempt, tuple(range(length)), (), params, SpeculationOptions(), None, None, priority=priority)
    return Sequence(submit, max_model_len=64, eos_ids=frozenset(), token_limit=64, now=float(index))


def test_prompts_are_preempted_for_the_oldest_one() -> None:
    """Overlapped steps left all of them within their prompts, and no block is free."""
    scheduler = Scheduler(
        BlockManager(8, 4, enable_prefix_cache=False), max_running=4, max_waiting=4, prefill=PrefillBudget(64)
    )
    sequences = [sequence_of(index, length) for index, length in enumerate((20, 20, 16))]
    for sequence, num_computed in zip(sequences, (4, 8, 12), strict=True):
        scheduler.add(sequence)
        assert scheduler.admit(0.0) is sequence
        assert scheduler.reserve_ahead(sequence, num_computed, num_computed)
        sequence.num_computed = num_computed
    assert scheduler.blocks.num_free_blocks == 2
    (part,) = scheduler.schedule(lambda sequence: 1, lambda rows: 1.0, 0.0)
    assert part.sequence is sequences[0] and part.num_tokens == 16
    assert scheduler.running == sequences[:2] and scheduler.waiting[0] is sequences[2]
    assert sequences[2].batch_slot == NO_BATCH_SLOT and scheduler.num_preemptions == 1


def test_waiting_sequences_start_by_priority_then_resumed_first_then_in_order() -> None:
    scheduler = Scheduler(
        BlockManager(99, 4, enable_prefix_cache=False), max_running=9, max_waiting=9, prefill=PrefillBudget(64)
    )
    low, first, urgent, second = (sequence_of(i, 4, priority=p) for i, p in enumerate((7, 0, -3, 0)))
    resumed, low_resumed = sequence_of(4, 4, attempt=1), sequence_of(5, 4, priority=7, attempt=1)
    for sequence in (low, first, urgent, second, resumed, low_resumed):
        scheduler.add(sequence)
    expected = [urgent, resumed, first, second, low_resumed, low]
    assert list(scheduler.waiting) == expected
    assert [scheduler.admit(0.0) for _ in expected] == expected


def test_the_youngest_of_the_lowest_priority_is_preempted() -> None:
    scheduler = Scheduler(
        BlockManager(8, 4, enable_prefix_cache=False), max_running=4, max_waiting=4, prefill=PrefillBudget(64)
    )
    old_low, urgent, usual = (sequence_of(i, 8, priority=p) for i, p in enumerate((5, -1, 0)))
    for sequence in (old_low, urgent, usual):
        scheduler.add(sequence)
        scheduler.admit(0.0)
        assert scheduler.reserve_ahead(sequence, 8, 8)
        sequence.num_computed = 8
        sequence.tokens.append(1)
    assert scheduler.running == [urgent, usual, old_low] and scheduler.blocks.num_free_blocks == 2
    parts = scheduler.schedule(lambda sequence: 1, lambda rows: 1.0, 0.0)
    assert [part.sequence for part in parts] == [urgent, usual]
    assert list(scheduler.waiting) == [old_low] and scheduler.num_preemptions == 1
    # It comes back before new ones of its priority, but after those of a higher one.
    new_low, new = sequence_of(6, 4, priority=5), sequence_of(7, 4)
    scheduler.add(new_low)
    scheduler.add(new)
    assert list(scheduler.waiting) == [new, old_low, new_low]
