"""The state of a row outlives a preemption and ends with its sequence."""

from __future__ import annotations

from foretoken.sampling import SamplingParams
from tests.support.engine_harness import Harness, Request
from tests.support.hash_target import HashTarget
from tests.support.scripted_drafter import ScriptedDrafter
from verifier_svc.drafters.request import TreeBounds
from verifier_svc.messages import SequenceKey
from verifier_svc.scheduling.sequence import NO_BATCH_SLOT, Sequence
from verifier_svc.speculation.row_state import RowState

VOCAB = 12


def harness() -> Harness:
    """Return a harness with blocks for one and a half sequences."""
    return Harness(
        HashTarget(VOCAB, 12, 4), vocab_size=VOCAB, num_blocks=12, block_size=4, drafters={"one": ScriptedDrafter({})}
    )


def preempt(run: Harness) -> Sequence:
    """Run two sequences until the younger one is preempted; return it."""
    for seed in (1, 2):
        run.submit(Request([seed] * 9, SamplingParams(temperature=0.0, max_tokens=30)))
    while not run.scheduler.num_preemptions:
        run.step()
    (sequence,) = run.scheduler.waiting
    assert sequence.batch_slot == NO_BATCH_SLOT
    return sequence


def test_a_preempted_row_keeps_its_gates() -> None:
    run = harness()
    sequence = preempt(run)
    assert run.speculator.rows.has(sequence)
    state = run.speculator.rows.of(sequence)
    while sequence.batch_slot == NO_BATCH_SLOT:
        run.step()
    assert run.speculator.rows.of(sequence) is state
    run.drain()
    assert len(run.speculator.rows) == 0


def test_a_row_that_ends_while_it_is_preempted_is_forgotten() -> None:
    run = harness()
    sequence = preempt(run)
    run.abort(SequenceKey(run.session, sequence.key.request_id, 0))
    run.step()
    assert not run.speculator.rows.has(sequence) and len(run.speculator.rows) == 1


def test_a_row_with_a_prediction_begins_in_earnest() -> None:
    bounds = TreeBounds(8)
    plain, predicted = RowState(bounds, has_prediction=False), RowState(bounds, has_prediction=True)
    assert plain.lookup_gate.is_scouting and not predicted.lookup_gate.is_scouting
    assert predicted.model_gate.is_scouting and predicted.uses_model is None
