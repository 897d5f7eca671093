"""The row gate opens for rows with accepted drafts, shuts for others, probes ever more rarely."""

from __future__ import annotations

import pytest

from verifier_svc.speculation.gate import FIRST_PROBE_AFTER, LONGEST_PAUSE, PATIENT_MISSES, RAREST_PROBE_AFTER, Gate

CHEAP = [1.0 + 0.05 * k for k in range(16)]
DEAR = [1.0 + 0.95 * k for k in range(16)]
HOPELESS = [1.0 + 1.0 * k for k in range(16)]


def shut(gate: Gate) -> None:
    gate.observe(1, 3)  # not scouted
    for _ in range(120):
        gate.observe(0, 3)


def test_a_new_row_drafts_where_nodes_are_cheap() -> None:
    assert Gate().num_tokens(7, CHEAP) > 1


def test_never_more_than_asked_for() -> None:
    assert Gate().num_tokens(2, CHEAP) <= 2
    assert Gate().num_tokens(0, CHEAP) == 0


def test_plain_decode_where_a_node_costs_as_much_as_a_step() -> None:
    assert Gate().num_tokens(7, DEAR) == 0


def test_accepted_drafts_widen_and_refused_ones_shut() -> None:
    gate = Gate()
    before = gate.num_tokens(15, CHEAP)
    for _ in range(10):
        gate.observe(7, 7)
    assert gate.num_tokens(15, CHEAP) > before
    shut(gate)
    assert gate.num_tokens(15, CHEAP) == 0


def test_a_shut_gate_probes_ever_more_rarely_and_opens_again() -> None:
    gate = Gate()
    shut(gate)
    gaps = []
    gap = 0
    while len(gaps) < 8:
        gap += 1
        if gate.num_tokens(15, CHEAP):
            gaps.append(gap)
            gap = 0
            gate.observe(0, 3)
    assert gaps[0] == FIRST_PROBE_AFTER
    assert gaps == sorted(gaps)
    assert gaps[-1] == RAREST_PROBE_AFTER
    for _ in range(RAREST_PROBE_AFTER):
        if gate.num_tokens(15, CHEAP):
            gate.observe(3, 3)
    for _ in range(6):
        gate.observe(3, 3)
    assert gate.num_tokens(15, CHEAP) > 0


def test_drafts_that_could_not_pay_if_they_were_always_right_are_probed_most_rarely() -> None:
    gate = Gate()
    shut(gate)
    assert not any(gate.num_tokens(7, HOPELESS) for _ in range(RAREST_PROBE_AFTER - 1))
    assert gate.num_tokens(7, HOPELESS)
    # Once they can, the next probe is one that was due.
    assert not any(gate.num_tokens(7, HOPELESS) for _ in range(FIRST_PROBE_AFTER))
    assert gate.num_tokens(7, DEAR)


def test_acceptance_counts_the_first_refused_token_as_a_trial() -> None:
    gate = Gate()
    for _ in range(200):
        gate.observe(1, 3)  # one accepted, the next refused, the third never tried
    assert 0.45 < gate.acceptance < 0.55


def asks(gate: Gate, steps: int) -> int:
    """Return how often the gate asks, in so many steps, a drafter that proposes nothing."""
    count = 0
    for _ in range(steps):
        if gate.num_tokens(7, CHEAP):
            count += 1
            gate.observe_miss()
    return count


def test_a_drafter_with_nothing_to_propose_is_scouted_ever_more_rarely() -> None:
    gate = Gate()
    assert gate.is_scouting
    asks(gate, 50)
    cycle = LONGEST_PAUSE + 1
    assert asks(gate, 4 * cycle) == 4, "one ask in a pause and a step"


def test_pauses_and_probes_are_counted_in_steps() -> None:
    """Steps in which the gate was not asked to choose count too."""
    gate = Gate()
    asks(gate, 50)
    while not gate.num_tokens(7, CHEAP):
        pass
    gate.observe_miss()
    gate.pass_steps(LONGEST_PAUSE - 1)
    assert not gate.num_tokens(7, CHEAP) and gate.num_tokens(7, CHEAP)
    gate = Gate()
    shut(gate)
    assert not gate.num_tokens(15, DEAR)
    gate.pass_steps(FIRST_PROBE_AFTER - 2)
    assert gate.num_tokens(15, DEAR)


def test_what_a_scout_finds_is_asked_for_in_earnest_at_once_and_once() -> None:
    gate = Gate()
    asks(gate, 50)
    gate.observe_find()
    assert not gate.is_scouting and gate.num_tokens(7, CHEAP)
    gate.observe(0, 3)
    assert gate.is_scouting and not gate.num_tokens(7, CHEAP)


def test_an_accepted_draft_ends_scouting_until_misses_gather() -> None:
    gate = Gate()
    gate.observe_find()
    gate.observe(3, 3)
    assert asks(gate, PATIENT_MISSES) == PATIENT_MISSES and not gate.is_scouting
    assert asks(gate, 1) == 1 and gate.is_scouting


def test_a_row_of_a_model_begins_with_what_its_drafts_came_to_elsewhere() -> None:
    gate = Gate()
    gate.expect_drafts(0.9)
    assert not gate.is_scouting and gate.acceptance == pytest.approx(0.9)
    gate.observe(0, 3)
    known = gate.acceptance
    gate.expect_drafts(0.9)
    assert gate.acceptance == known < 0.9, "its own drafts count from then on"
