"""Accepted drafts prove that speculation has come back after a death."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from tests.chaos.watcher import Sample, Watcher


def sample(epoch: int, attaches: int, accepted: int, *, attached: bool = True) -> Sample:
    return Sample(0.0, epoch, 10, 10, 0, 0, 0, attached, attaches, 2 * accepted, accepted)


@pytest.mark.parametrize(
    ("after", "proved"),
    [
        # The drafter that still seems to be there, and its accepted tokens.
        ([sample(1, 1, 60), sample(1, 1, 70)], False),
        # Attached again, and nothing accepted since.
        ([None, sample(1, 2, 60), sample(1, 2, 60)], False),
        ([sample(1, 1, 60, attached=False), sample(1, 2, 60), sample(1, 2, 61)], True),
        # A new verifier counts from 0.
        ([None, sample(2, 1, 0), sample(2, 1, 1)], True),
        ([None, sample(2, 0, 0, attached=False), sample(2, 0, 5, attached=False)], False),
        # It died as well, before anything was proved.
        ([sample(2, 1, 5), sample(3, 1, 9)], False),
    ],
)
def test_proof(after: Sequence[Sample | None], proved: bool) -> None:
    watcher = Watcher("unix:/none")
    watcher.take(sample(1, 1, 50))
    watcher.struck()
    for item in after:
        watcher.take(item)
    assert (watcher.owes_proof, watcher.num_proofs) == (not proved, int(proved))


def test_a_second_death_asks_for_a_proof_of_its_own() -> None:
    watcher = Watcher("unix:/none")
    for item in (sample(1, 1, 50), sample(1, 2, 50)):
        watcher.take(item)
        watcher.struck()
    watcher.take(sample(1, 2, 60))
    assert watcher.owes_proof
    watcher.take(sample(1, 3, 60))
    watcher.take(sample(1, 3, 70))
    assert (watcher.owes_proof, watcher.num_proofs) == (False, 1)


def test_acceptance_adds_up_all_verifiers() -> None:
    watcher = Watcher("unix:/none")
    watcher.take(sample(1, 1, 50))
    before = dict(watcher.epochs)
    for item in (sample(1, 1, 60), None, sample(2, 1, 7)):
        watcher.take(item)
    assert (watcher.acceptance(), watcher.acceptance(before)) == ((134, 67), (34, 17))


def test_steps_add_up_all_verifiers() -> None:
    watcher = Watcher("unix:/none")
    watcher.take(dataclasses.replace(sample(1, 1, 0), num_steps=100, num_overlapped_steps=90))
    before = dict(watcher.epochs)
    watcher.take(dataclasses.replace(sample(1, 1, 0), num_steps=110, num_overlapped_steps=95))
    watcher.take(dataclasses.replace(sample(2, 1, 0), num_steps=7, num_overlapped_steps=6))
    assert watcher.steps(before) == (17, 11)


def test_idle_means_no_sequence_and_every_block_free() -> None:
    assert sample(1, 1, 0).is_idle
    assert not Sample(0.0, 1, 10, 9, 0, 0, 0, True, 1, 0, 0).is_idle
    assert not Sample(0.0, 1, 10, 10, 1, 0, 0, True, 1, 0, 0).is_idle
    assert not Sample(0.0, 1, 10, 10, 0, 1, 0, True, 1, 0, 0).is_idle
