from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter_svc.ngram.drafter import NgramDrafter
from drafter_svc.ngram.settings import NgramSettings
from foretoken.drafting import RAGGED_COLUMNS, TargetInfo
from foretoken.errors import PreconditionError
from foretoken.tree import depths
from tests.drafter_svc.ngram.feed import ROOT, TARGET, VOCAB_SIZE, Feed, Tree, make_drafter, ngram_request, trees_of
from tests.drafter_svc.ngram.reference import ReferenceNgram


def test_own_text_is_continued() -> None:
    feed = Feed(make_drafter())
    # 0.6 x 0.62 x 0.63 x 0.64 x 0.66 is above the least weight; x 0.7 is below.
    assert feed(0, [1, 2, 3, 4, 5, 6, 1, 2, 3]) == ([3, 4, 5, 6, 1, 2], [-1, 0, 1, 2, 3, 4])


def test_own_text_that_repeats_is_continued_beyond_its_end() -> None:
    feed = Feed(make_drafter())
    assert feed(0, [1, 2, 1, 2, 1, 2, 1, 2], max_nodes=6) == ([2, 1, 2, 1, 2, 1], [-1, 0, 1, 2, 3, 4])


def test_a_draft_runs_on_past_the_depth_of_the_trie() -> None:
    feed = Feed(make_drafter(max_match_window_size=2, min_match_window_size=2))
    feed.history([1, 2, 3, 4, 5, 6, 7])
    # Depth 3: 3 ends the window (1, 2, 3), then its suffix (2, 3) goes on, and so forth.
    assert feed(0, [1, 2]) == ([2, 3, 4, 5], [-1, 0, 1, 2])


@pytest.mark.parametrize(
    ("order", "max_breadth", "expected"),
    [
        ("recency", 10, ([2, 4, 3], [-1, 0, 0])),
        ("frequency", 10, ([2, 3, 4], [-1, 0, 0])),
        ("recency", 1, ([2, 4], [-1, 0])),
        ("frequency", 1, ([2, 3], [-1, 0])),
    ],
)
def test_order_and_breadth(order: Literal["recency", "frequency"], max_breadth: int, expected: Tree) -> None:
    feed = Feed(make_drafter(order=order, max_bfs_breadth=max_breadth))
    feed.history([1, 2, 3], [1, 2, 3], [1, 2, 4])
    assert feed(0, [1, 2]) == expected


def test_what_is_seen_again_is_the_latest() -> None:
    feed = Feed(make_drafter())
    feed.history([1, 2, 3], [1, 2, 4], [1, 2, 5], [1, 2, 4], [1, 2, 3])
    # Half of 0.45, and a quarter each.
    assert feed(0, [1, 2]) == ([2, 3, 4, 5], [-1, 0, 0, 0])


@pytest.mark.parametrize(("order", "first"), [("recency", 4), ("frequency", 3)])
def test_order_within_the_own_text(order: Literal["recency", "frequency"], first: int) -> None:
    feed = Feed(make_drafter(order=order))
    tokens, _ = feed(0, [1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2])
    assert tokens[1] == first


@pytest.mark.parametrize(
    ("max_breadth", "expected"),
    [(1, ([4, 8], [-1, 0])), (2, ([4, 8, 5, 7, 6], [-1, 0, 0, 2, 2])), (10, ([4, 8, 5, 7, 6], [-1, 0, 0, 2, 2]))],
)
def test_branches_below_the_root(max_breadth: int, expected: Tree) -> None:
    feed = Feed(make_drafter(max_match_window_size=4, max_bfs_breadth=max_breadth))
    feed.history([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7], [1, 2, 3, 4, 8])
    # 8 and 5: half of 0.62 each; 5 7 and 5 6: half of 0.62 x 0.31.
    assert feed(0, [1, 2, 3, 4]) == expected


def test_own_text_ranks_before_later_history() -> None:
    feed = Feed(make_drafter())
    feed(0, [1, 2, 3, 5, 1, 2], max_nodes=1)
    feed.history([8, 1, 2, 3, 9])
    # 5: 0.6; 5 1: 0.372; 5 1 2: 0.234; 5 1 2 3: 0.15; 9: half of 0.4 x 0.6.
    assert feed(0, [3], max_nodes=6) == ([3, 5, 1, 2, 3, 9], [-1, 0, 1, 2, 3, 0])


def test_a_longer_match_ranks_before_a_shorter_one() -> None:
    feed = Feed(make_drafter())
    feed.history([1, 2, 3, 4], [9, 3, 5])
    # (1, 2, 3) -> 4 with 0.6, though (3,) -> 5 is later; 5 gets 0.4 x 0.45 x ... and falls away.
    assert feed(0, [1, 2, 3]) == ([3, 4], [-1, 0])


def test_one_token_of_context_drafts_little() -> None:
    feed = Feed(make_drafter())
    feed.history([5, 6, 7, 8, 9])
    assert feed(0, [5]) == ([5, 6, 7], [-1, 0, 1])


def test_min_match_window() -> None:
    feed = Feed(make_drafter(min_match_window_size=3))
    feed.history([5, 6, 7, 8])
    assert feed(0, [5, 6]) == ([6], ROOT)
    assert feed(0, [7]) == ([7, 8], [-1, 0])


def test_one_token_windows() -> None:
    feed = Feed(make_drafter(max_match_window_size=1))
    assert feed(0, [5, 6, 5]) == ([5, 6, 5], [-1, 0, 1])


def test_no_match_is_a_root() -> None:
    feed = Feed(make_drafter())
    feed.history([1, 2, 3])
    assert feed(0, [4, 5, 6]) == ([6], ROOT)


def test_a_row_that_wants_one_node_only_learns() -> None:
    feed = Feed(make_drafter())
    assert feed(0, [1, 2, 3, 1, 2], max_nodes=1) == ([2], ROOT)
    assert feed(1, [1, 2])[0][:2] == [2, 3]


def test_no_new_tokens_draft_the_same_again() -> None:
    feed = Feed(make_drafter())
    tree = feed(0, [1, 2, 3, 4, 1, 2])
    assert feed(0, []) == tree != ([2], ROOT)


def test_empty_batch_and_unknown_batch_slot() -> None:
    drafter = make_drafter()
    assert drafter.draft(ngram_request([])).node_starts.tolist() == [0]
    batch = drafter.draft(ngram_request([[], [1, 2, 1], [3]], batch_slots=[0, 99, -5], lengths=[5, 3, 1]))
    assert batch.node_starts.tolist() == [0, 1, 2, 3]
    assert drafter.gauges()["ngram_nodes"] == 0


def test_rows_of_one_batch_learn_from_each_other() -> None:
    drafter = make_drafter()
    batch = drafter.draft(ngram_request([[1, 2], [1, 2, 3]], salts=[7, 7]))
    assert trees_of(batch)[0] == ([2, 3], [-1, 0])


def test_a_salt_sees_nothing_of_another() -> None:
    # Equal halves, and the key of a node ("token 2 below node 2") as a salt.
    salts = [0, 1, 1 << 32, (1 << 32) + 1, (2 << 32) + 2, 2**64 - 1, 2**63]
    feed = Feed(make_drafter())
    for other, salt in enumerate(salts):
        feed.history([1, 2, 3 + other, 20 + other], salt=salt)
    for generation, salt in enumerate(salts):
        expected = [2, 3 + generation, 20 + generation]
        assert feed(0, [1, 2], generation=generation, salt=salt) == (expected, [-1, 0, 1])
    assert feed(1, [1, 2], salt=5) == ([2], ROOT)


def test_a_batch_slot_that_changes_its_salt_forgets() -> None:
    feed = Feed(make_drafter())
    feed(0, [1, 2, 3, 4], salt=7)
    assert feed(0, [1, 2], salt=8) == ([2], ROOT)
    # Nor was (3, 4) -> 1 learned.
    assert feed(1, [3, 4], salt=7) == ([4], ROOT)


def test_a_new_generation_forgets_the_own_text_and_keeps_the_history() -> None:
    feed = Feed(make_drafter(min_match_window_size=2))
    feed(0, [1, 2, 3, 4])
    assert feed(0, [5], generation=2) == ([5], ROOT)
    assert feed(0, [1, 2], generation=2) == ([2, 3, 4], [-1, 0, 1])
    assert feed(1, [4, 5]) == ([5], ROOT)


def test_release_forgets_the_own_text() -> None:
    feed = Feed(make_drafter())
    feed(0, [1, 2, 3, 4])
    feed.drafter.release([0, 99, -1])
    # A release of another batch slot's text would show here too: 4 -> 1 is not learned.
    feed(0, [1])
    assert feed(1, [3, 4]) == ([4], ROOT)


def test_missed_tokens_are_not_linked_across() -> None:
    feed = Feed(make_drafter())
    feed(0, [1, 2, 3])
    # The own text goes on with 3 after (1, 2), and ends there.
    assert feed(0, [1, 2], missed=5) == ([2, 3], [-1, 0])
    assert feed(1, [2, 3]) == ([3], ROOT)


def test_attached_in_the_middle_of_a_sequence() -> None:
    feed = Feed(make_drafter())
    assert feed(0, [1, 2, 3, 1, 2], missed=50)[0][:2] == [2, 3]


def test_tokens_outside_of_the_vocabulary_are_not_learned() -> None:
    feed = Feed(make_drafter())
    assert feed(0, [1, 2, VOCAB_SIZE, 3, 1, 2]) == ([2], ROOT)
    assert feed(0, [-7]) == ([-7], ROOT)
    assert feed(1, [2]) == ([2], ROOT)


def test_sequences_longer_than_announced_start_again() -> None:
    feed = Feed(make_drafter())
    tokens = [i % 90 for i in range(3 * TARGET.max_model_len)]
    assert feed(0, tokens)[0][1] == (tokens[-1] + 1) % 90


def test_attach_keeps_the_history_of_the_same_target_only() -> None:
    drafter = make_drafter()
    Feed(drafter)(0, [1, 2, 3, 4])
    drafter.attach(TARGET, None)
    assert Feed(drafter)(0, [1, 2]) == ([2, 3, 4], [-1, 0, 1])
    drafter.attach(TargetInfo("other", VOCAB_SIZE, 200, 4, 32), None)
    assert drafter.gauges()["ngram_nodes"] == 0
    assert Feed(drafter)(0, [1, 2]) == ([2], ROOT)


def test_attach_refuses_a_target_without_batch_slots() -> None:
    with pytest.raises(PreconditionError):
        make_drafter().attach(TargetInfo("m", VOCAB_SIZE, 200, 0, 32), None)


def test_read_only_columns() -> None:
    request = ngram_request([[1, 2, 3, 1, 2]])
    for name in ("rows", "starts", *RAGGED_COLUMNS):
        getattr(request, name).setflags(write=False)
    assert trees_of(make_drafter().draft(request))[0][0][:2] == [2, 3]


def test_gauges() -> None:
    feed = Feed(make_drafter(capacity=2000))
    feed(0, [1, 2, 3, 1, 2])
    # The root; 1, 2 and 3; and what follows where a path came again: (1, 2), (2, 3) and (1, 2, 3).
    expected = {"ngram_nodes": 7, "ngram_capacity": 2000, "ngram_evictions": 0, "ngram_rows": 1}
    assert feed.drafter.gauges() == expected | {"ngram_drafted_rows": 1, "ngram_external_tokens": 0}


def test_a_full_trie_forgets_the_oldest() -> None:
    feed = Feed(make_drafter(capacity=1024, max_match_window_size=3))
    random = np.random.default_rng(0)
    feed.history([1, 2, 3, 4])
    for _ in range(80):
        feed.history([*random.integers(10, VOCAB_SIZE, 40).tolist()])
    feed.history([5, 6, 7, 8])
    gauges = feed.drafter.gauges()
    assert gauges["ngram_evictions"] > 1000 and 1000 < gauges["ngram_nodes"] <= 1024
    assert feed(0, [5, 6, 7]) == ([7, 8], [-1, 0])
    assert feed(1, [1, 2, 3]) == ([3], ROOT)


def test_what_is_used_again_is_not_evicted() -> None:
    feed = Feed(make_drafter(capacity=1024, max_match_window_size=3))
    random = np.random.default_rng(0)
    for _ in range(60):
        feed.history([1, 2, 3, 4], [*random.integers(10, VOCAB_SIZE, 40).tolist()])
    assert feed.drafter.gauges()["ngram_evictions"] > 1000
    assert feed(0, [1, 2, 3]) == ([3, 4], [-1, 0])


NGRAM_SETTINGS = st.builds(
    lambda windows, breadths, order: NgramSettings(
        capacity=20_000,
        min_match_window_size=min(windows),
        max_match_window_size=max(windows),
        min_bfs_breadth=min(breadths),
        max_bfs_breadth=max(breadths),
        order=order,
    ),
    st.tuples(st.integers(1, 6), st.integers(1, 12)),
    st.tuples(st.integers(1, 3), st.integers(1, 10)),
    st.sampled_from(["recency", "frequency"]),
)


def random_rows(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Yield the columns of one row after another, over so few tokens that most windows come again.

    Now and then a sequence ends or is sent anew, tokens are missed, or a token is outside the vocabulary of 8. Some
    sequences have a prediction, sent in one piece or more.
    """
    random = np.random.default_rng(seed)
    alphabet = int(random.integers(2, 8))
    state = dict.fromkeys(range(3), (0, 1, 0, 0))
    for _ in range(count):
        batch_slot = int(random.integers(3))
        generation, salt, length, prompt_length = state[batch_slot]
        if random.random() < 0.15 or not generation:
            generation, salt, length, prompt_length = (
                generation + 1,
                int(random.integers(1, 3)),
                0,
                int(random.integers(9)),
            )
        if random.random() < 0.03:
            # It is sent anew.
            length = 0
        tokens = random.integers(alphabet, size=random.integers(0, 9)).tolist()
        is_predicted = random.random() < (0.5 if length == 0 else 0.05)
        prediction = random.integers(alphabet, size=random.integers(1, 60)).tolist() if is_predicted else []
        if tokens and random.random() < 0.05:
            tokens[int(random.integers(len(tokens)))] = int(random.choice([-1, 8]))
        length += len(tokens) + int(random.random() < 0.05)
        state[batch_slot] = generation, salt, length, prompt_length
        yield {
            "batch_slot": batch_slot,
            "generation": generation,
            "salt": salt,
            "length": length,
            "new_tokens": tokens,
            "prompt_length": prompt_length,
            "prediction": prediction,
            "max_nodes": int(random.integers(1, 33)),
            "max_depth": int(random.choice([1, 2, 5, 99])),
            "max_branch": int(random.choice([1, 2, 99])),
        }


@given(NGRAM_SETTINGS, st.integers(0, 2**32), st.integers(1, 60))
@settings(max_examples=150)
def test_trees_equal_those_of_the_reference(config: NgramSettings, seed: int, count: int) -> None:
    vocab_size = 8
    drafter, reference = NgramDrafter(config), ReferenceNgram(config, vocab_size)
    drafter.attach(TargetInfo("m", vocab_size, 600, 3, 32), None)
    for row in random_rows(seed, count):
        shape = {name: row.pop(name) for name in ("max_nodes", "max_depth", "max_branch")}
        columns = {"batch_slots": [row["batch_slot"]], "generations": [row["generation"]], "salts": [row["salt"]]}
        columns |= {"lengths": [row["length"]], "prompt_lengths": [row["prompt_length"]]}
        columns |= {
            "max_nodes": [shape["max_nodes"]],
            "max_depths": [shape["max_depth"]],
            "max_branches": [shape["max_branch"]],
        }
        batch = drafter.draft(ngram_request([row["new_tokens"]], [row["prediction"]], **columns))
        reference.learn(**row)
        tokens, parents, weights = reference.draft(row["batch_slot"], **shape)
        assert trees_of(batch) == [(tokens, parents)]
        np.testing.assert_allclose(batch.scores, np.log(weights), atol=1e-5)
        last = reference.sequences[row["batch_slot"]].last
        if 0 <= last < vocab_size:
            assert batch.are_sound(np.array([last], np.int32), vocab_size).all()
            assert len(batch.tokens) <= shape["max_nodes"]
            assert depths(batch.parents).max() <= shape["max_depth"]
            assert np.bincount(batch.parents[1:] + 1).max(initial=0) <= shape["max_branch"]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.lists(st.integers(1, 8), max_size=40), st.data())
@settings(max_examples=100)
def test_tokens_in_pieces_are_learned_as_in_one(tokens: list[int], pieces: list[int], data: st.DataObject) -> None:
    whole, parts = Feed(make_drafter()), Feed(make_drafter())
    tree = whole(0, tokens)
    left = tokens
    for piece in pieces:
        if piece < len(left):
            parts(0, left[:piece])
            left = left[piece:]
    assert parts(0, left) == tree
    assert parts.drafter.gauges()["ngram_nodes"] == whole.drafter.gauges()["ngram_nodes"]
    probe = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    assert parts(1, probe) == whole(1, probe)
