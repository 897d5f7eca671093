"""A verifier dies in the middle of overlapped steps, and another one continues its requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.runs import Course, greedy, plain, with_grammar


class KilledError(Exception):
    """Ends an engine between the launch of a step and the reading of the one before."""


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("killed_at", [3, 4, 7, 8, 13])
def test_another_verifier_continues_from_what_the_dead_one_published(killed_at: int, drafts: bool) -> None:
    """Tokens of the step in flight are lost. They come again, the same, and none comes twice."""
    requests = [greedy(1, 6, 90), greedy(2, 9, 80), greedy(3, 30, 85), with_grammar(greedy(4, 8, 70)), greedy(5, 7, 60)]
    whole = plain(requests)

    def die(number: int) -> None:
        if number == killed_at:
            raise KilledError

    dead = Course(requests, {2: 2, 3: 3, 4: killed_at - 1}, drafts=drafts, look=die)
    with pytest.raises(KilledError):
        dead.run()
    assert dead.step.in_flight
    dead.harness.take_events()
    heard = [tuple(dead.result(index).token_ids) if dead.has_come(index) else () for index in range(len(requests))]
    assert any(heard) and not any(dead.result(index).is_done for index in range(len(requests)) if dead.has_come(index))

    resumed = [replace(request, output=output, attempt=1) for request, output in zip(requests, heard, strict=True)]
    other = Course(resumed, drafts=drafts)
    other.run()
    for index, (output, expected) in enumerate(zip(heard, whole, strict=True)):
        assert list(output) == expected.token_ids[: len(output)]
        assert other.result(index).token_ids[len(output) :] == expected.token_ids[len(output) :]
    assert other.runs.num_ahead > 0
