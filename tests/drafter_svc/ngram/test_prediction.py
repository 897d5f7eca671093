"""A client's prediction is drafted first, found again after a miss, and private to its sequence."""

from __future__ import annotations

import pytest

from tests.drafter_svc.ngram.feed import ROOT, TARGET, Feed, make_drafter

PROMPT = [90, 91]
PREDICTION = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]


def start(prediction: list[int] = PREDICTION, *, output: list[int] | None = None, batch_slot: int = 0) -> Feed:
    """Return a feed with a sequence in ``batch_slot``: prompt, prediction and perhaps output."""
    feed = Feed(make_drafter())
    feed(batch_slot, PROMPT, prompt_lengths=2, prediction=prediction, max_nodes=1)
    if output:
        feed(batch_slot, output, prompt_lengths=2, max_nodes=1)
    return feed


def drafted(feed: Feed, tokens: list[int], *, batch_slot: int = 0, max_nodes: int = 5) -> list[int]:
    """Return the chain drafted after the output's ``tokens``."""
    tree, parents = feed(batch_slot, tokens, prompt_lengths=2, max_nodes=max_nodes)
    assert parents == list(range(-1, len(tree) - 1))
    return tree[1:]


def test_the_output_is_expected_to_begin_as_predicted() -> None:
    feed = Feed(make_drafter())
    assert feed(0, PROMPT, prompt_lengths=2, prediction=PREDICTION, max_nodes=5)[0] == [91, 10, 11, 12, 13]


def test_a_prediction_that_holds_is_followed() -> None:
    feed = start()
    assert drafted(feed, [10, 11, 12]) == [13, 14, 15, 16]
    assert drafted(feed, [13]) == [14, 15, 16, 17]
    assert drafted(feed, [14, 15, 16, 17, 18]) == [19]
    assert drafted(feed, [19]) == []


def test_a_replaced_token_is_passed() -> None:
    assert drafted(start(), [10, 11, 55])[:2] == [13, 14]


def test_a_prediction_that_fails_at_once_is_given_up() -> None:
    assert drafted(start(), [50, 51, 52]) == []


def test_after_an_insertion_the_prediction_goes_on() -> None:
    feed = start(output=[10, 11, 50, 51, 52])
    assert drafted(feed, [12, 13])[:2] == [14, 15]


def test_after_a_deletion_the_prediction_goes_on() -> None:
    assert drafted(start(output=[10, 11]), [15, 16])[:2] == [17, 18]


def test_of_equal_matches_the_nearest_counts() -> None:
    prediction = [1, 2, 3, 7, 8, 20, 4, 5, 7, 8, 30, 6, 7, 8, 40]
    assert drafted(start(prediction), [1, 2, 50, 7, 8])[0] == 20
    feed = start(prediction)
    assert drafted(feed, [4, 5])[0] == 7
    assert drafted(feed, [50, 7, 8])[0] == 30


def test_a_longer_match_counts_more_than_a_nearer_one() -> None:
    prediction = [1, 2, 7, 8, 20, 6, 7, 8, 40, 41]
    assert drafted(start(prediction), [1, 50, 6, 7, 8])[0] == 40


def test_predictions_rank_before_the_own_text_and_the_history() -> None:
    feed = Feed(make_drafter())
    feed.history([1, 2, 70, 71])
    tree = feed(0, [1, 2, 60, 61, 1, 2], prompt_lengths=6, prediction=PREDICTION, max_nodes=3)
    assert tree == ([2, 10, 11], [-1, 0, 1])
    assert feed(1, [1, 2, 60, 61, 1, 2], prompt_lengths=6, max_nodes=3)[0] == [2, 60, 61]


def test_what_prediction_and_own_text_agree_on_is_drafted_once() -> None:
    feed = Feed(make_drafter())
    prompt = [1, 2, 3, 4, 5, 60, 61, 1, 2, 3, 4, 5]
    tokens, parents = feed(0, prompt, prompt_lengths=12, prediction=[60, 77])
    assert tokens[:2] == [5, 60] and parents.count(0) == 1
    assert {tokens[i] for i, parent in enumerate(parents) if parent == 1} == {77, 61}


def test_a_prediction_belongs_to_its_row_alone() -> None:
    feed = start()
    assert feed(1, PROMPT, prompt_lengths=2) == ([91], ROOT)
    assert feed(1, [10, 11, 12], prompt_lengths=2) == ([12], ROOT)
    # Only the prompt came again. The root; 90, 91 and (90, 91); (90, 91, 10), (91, 10), 10, 11, 12.
    assert feed.drafter.gauges()["ngram_nodes"] == 1 + 3 + 5


def test_a_prediction_is_learned_by_others_once_it_is_output() -> None:
    feed = start(output=[10, 11, 12, 13])
    assert feed(1, [10, 11], prompt_lengths=2)[0][:3] == [11, 12, 13]


def test_the_next_sequence_of_a_batch_slot_has_no_prediction() -> None:
    feed = start()
    assert feed(0, [80, 81], generation=2, prompt_lengths=2) == ([81], ROOT)


def test_a_released_batch_slot_has_no_prediction() -> None:
    feed = start()
    feed.drafter.release([0])
    assert feed(0, [], prompt_lengths=2)[1] == ROOT


def test_sent_again_from_the_start_it_is_the_same() -> None:
    # A preempted, resumed or newly attached sequence sends prompt, output and prediction at once.
    expected = drafted(start(output=[10, 11, 50]), [13, 14])
    again = Feed(make_drafter())
    tree, _ = again(0, [*PROMPT, 10, 11, 50, 13, 14], prompt_lengths=2, prediction=PREDICTION, max_nodes=5)
    assert tree[1:] == expected == [15, 16, 17, 18]


def test_a_prediction_in_pieces() -> None:
    feed = Feed(make_drafter())
    feed(0, [], prompt_lengths=2, lengths=0, prediction=PREDICTION[:3], max_nodes=1)
    feed(0, PROMPT, prompt_lengths=2, prediction=PREDICTION[3:], max_nodes=1)
    assert drafted(feed, [10, 11]) == [12, 13, 14, 15]


def test_after_missed_output_the_place_is_found_again() -> None:
    feed = start()
    feed(0, [10], prompt_lengths=2, max_nodes=1)
    tree, _ = feed(0, [14, 15], missed=3, prompt_lengths=2, max_nodes=3)
    assert tree == [15, 16, 17]


def test_a_prediction_beyond_the_context_is_cut() -> None:
    feed = start([*range(90)] * 5)
    assert feed(0, [], prompt_lengths=2)[0][1:4] == [0, 1, 2]
    assert len(feed.drafter._sequences.predictions[0]) == TARGET.max_model_len


def test_depth_and_branches_are_bounded() -> None:
    prompt = [1, 2, 3, 9, 1, 2, 3]
    tree: dict[int, tuple[list[int], list[int]]] = {}
    for branches in (1, 2, 99):
        columns = {"prompt_lengths": 7, "max_depths": 2, "max_branches": branches}
        tree[branches] = Feed(make_drafter())(0, prompt, prediction=PREDICTION, **columns)
    assert tree[1] == ([3, 10, 11], [-1, 0, 1])
    assert tree[2] == tree[99] == ([3, 10, 11, 9], [-1, 0, 1, 0])
    feed = Feed(make_drafter())
    assert feed(0, prompt, prompt_lengths=7, prediction=PREDICTION, max_depths=0) == ([3], ROOT)


def test_scores_are_logs_of_chances() -> None:
    feed = Feed(make_drafter())
    batch = feed.batch(0, PROMPT, prompt_lengths=2, prediction=PREDICTION, max_nodes=4)
    assert batch.scores[0] == 0
    assert (batch.scores[1:] < batch.scores[batch.parents[1:]]).all()
    assert batch.scores[1] == pytest.approx(-0.1985, abs=1e-3)  # log 0.82


def test_rows_without_a_match_cost_one_node() -> None:
    feed = start()
    feed.history([1, 2, 3])
    assert feed(1, [40, 41], prompt_lengths=2) == ([41], ROOT)
    assert drafted(feed, [60, 61, 62]) == []
