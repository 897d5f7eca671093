"""A new attachment inherits nothing from the last one."""

from __future__ import annotations

from foretoken.sampling import SamplingParams
from tests.support.engine_harness import Harness, Request
from tests.support.hash_target import HashTarget
from tests.support.scripted_drafter import ScriptedDrafter

VOCAB = 12


def run_once() -> Harness:
    """Return a harness with a sequence in mid-output and an unanswered scouting request."""
    run = Harness(
        HashTarget(VOCAB, 50, 4), vocab_size=VOCAB, num_blocks=50, block_size=4, drafters={"one": ScriptedDrafter({})}
    )
    run.submit(Request([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=40)))
    handle = run.speculator.drafters[0]
    while handle.attachment is None or handle.attachment._scout is None:
        run.step()
    return run


def test_a_new_attachment_was_sent_nothing_and_answers_for_nothing() -> None:
    """The answer to the last attachment's scouting request is not read from the new one."""
    run = run_once()
    handle, source, (sequence,) = run.speculator.drafters[0], run.sources[0], run.scheduler.running
    old = handle.attachment
    assert old is not None and old.sent.length(sequence) > 3
    source.kill()
    source.start()
    new = handle.attachment
    assert new is not None and new is not old
    assert new.sent.length(sequence) == 0 and new.read_scout() == []
    assert handle.num_attaches == 2 and not source.failures


def test_what_was_learned_of_a_source_outlives_the_attachment_and_not_the_source() -> None:
    run = run_once()
    handle, source = run.speculator.drafters[0], run.sources[0]
    record = handle.record
    source.kill()
    source.start()
    assert handle.record is record
    handle.detach()
    assert handle.attachment is None
    handle.replace_source(source)
    assert handle.record is not record and handle.num_attaches == 4, "the counts of both"


def test_a_batch_slots_next_sequence_was_sent_nothing() -> None:
    run = run_once()
    attachment, (sequence,) = run.speculator.drafters[0].attachment, run.scheduler.running
    assert attachment is not None
    sequence.generation += 1
    assert attachment.sent.length(sequence) == 0


def test_the_answer_to_a_later_request_is_not_taken_for_a_scouts() -> None:
    run = run_once()
    attachment, (sequence,) = run.speculator.drafters[0].attachment, run.scheduler.running
    assert attachment is not None and attachment._scout is not None and len(attachment._scout.rows) == 1
    row = attachment.sent.final_row(sequence, ())
    assert row is not None
    attachment.post([row])
    assert attachment.read_scout() == []
