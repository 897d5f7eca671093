"""The scheduler where blocks run out."""

from __future__ import annotations

from foretoken.sampling import SamplingParams, SpeculationOptions
from verifier_svc.messages import SequenceKey, Submit
from verifier_svc.scheduling.block_manager import BlockManager
from verifier_svc.scheduling.scheduler import Scheduler
from verifier_svc.scheduling.sequence import NO_SLOT, Sequence


def sequence_of(index: int, length: int) -> Sequence:
    key = SequenceKey(1, f"r{index}", 0)
    params = SamplingParams(max_tokens=4)
    submit = Submit(key, 0, tuple(range(length)), (), params, SpeculationOptions(), None, None)
    return Sequence(submit, max_model_len=64, eos_ids=frozenset(), token_limit=64, now=float(index))


def test_prompts_are_preempted_for_the_oldest_one() -> None:
    """Overlapped steps left all of them within their prompts, and no block is free."""
    scheduler = Scheduler(BlockManager(8, 4, enable_prefix_cache=False), max_running=4, max_waiting=4, chunk_tokens=64)
    sequences = [sequence_of(index, length) for index, length in enumerate((20, 20, 16))]
    for sequence, num_computed in zip(sequences, (4, 8, 12), strict=True):
        scheduler.add(sequence)
        assert scheduler.admit(0.0) is sequence
        assert scheduler.reserve_ahead(sequence, num_computed, num_computed)
        sequence.num_computed = num_computed
    assert scheduler.blocks.num_free_blocks == 2
    (part,) = scheduler.schedule(lambda sequence: 1, 0.0)
    assert part.sequence is sequences[0] and part.num_tokens == 16
    assert scheduler.running == sequences[:2] and scheduler.waiting[0] is sequences[2]
    assert sequences[2].slot == NO_SLOT and scheduler.num_preemptions == 1
