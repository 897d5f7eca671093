"""Compiled inner loops of the n-gram drafter: the sequences in their slots, and matches in a sequence's own text."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from drafter_svc.ngram_trie import Int64, Trie, compiled, insert_token, mix
from foretoken.tree import Int32

# Earlier places in its own text that a row compares, latest first.
OWN_SCAN = 64
# Stands in a sequence's own text where tokens were missed.
GAP = -1

# Columns of Sequences.state.
GENERATION, SEEN, OWN_LENGTH, SALT, LAST = range(5)
# Columns of a batch.
SLOT_OF, GENERATION_OF, LENGTH_OF, MAX_NODES_OF, SALT_OF = range(5)
# Entries of options.
VOCAB_SIZE, MIN_WINDOW, MAX_WINDOW, MIN_BREADTH, MAX_BREADTH, BY_FREQUENCY = range(6)


class Sequences(NamedTuple):
    """State of each slot, and its own text with a hash chain through the places that end with the same tokens.

    Attributes:
        state: int64 [slots, 5].
        tokens: int32 [slots, max_model_len + 1]; a GAP, then the tokens.
        previous: int32 [slots, max_model_len + 1]; the place before with the same last tokens' hash, or -1.
        heads: int32 [slots, power of 2]; the last place of each hash, or -1.
        ends: int32 [slots, depth + 1]; see ngram_trie.insert_token.
        stamps: int64 [slots, depth + 1].
    """

    state: Int64
    tokens: Int32
    previous: Int32
    heads: Int32
    ends: Int32
    stamps: Int64


def new_sequences(max_slots: int, max_model_len: int, depth: int) -> Sequences:
    """Empty slots. Memory is touched as sequences come and grow, 8 bytes a token."""
    num_heads = 1 << min(max((max_model_len // 2).bit_length(), 8), 15)
    state = np.zeros((max_slots, 5), np.int64)
    state[:, GENERATION] = -1
    return Sequences(
        state=state,
        tokens=np.zeros((max_slots, max_model_len + 1), np.int32),
        previous=np.zeros((max_slots, max_model_len + 1), np.int32),
        heads=np.zeros((max_slots, num_heads), np.int32),
        ends=np.zeros((max_slots, depth + 1), np.int32),
        stamps=np.zeros((max_slots, depth + 1), np.int64),
    )


@compiled
def append_own(sequences: Sequences, slot: int, token: int, window: int) -> None:
    """Append to a slot's own text; ``window`` (1 or 2) tokens are hashed. A text that fills its row starts again."""
    tokens, heads = sequences.tokens[slot], sequences.heads[slot]
    length = sequences.state[slot, OWN_LENGTH]
    if length == 0 or length == len(tokens):
        for head in range(len(heads)):
            heads[head] = -1
        length = 0
    tokens[length] = token
    before = tokens[length - 1] if window == 2 and length > 0 else 0
    bucket = mix(before, token) & (len(heads) - 1)
    sequences.previous[slot, length] = heads[bucket]
    heads[bucket] = length
    sequences.state[slot, OWN_LENGTH] = length + 1


@compiled
def break_off(sequences: Sequences, slot: int, window: int) -> None:
    """Match and learn nothing across this place of a slot's sequence."""
    for d in range(sequences.ends.shape[1]):
        sequences.ends[slot, d] = 0
    append_own(sequences, slot, GAP, window)


@compiled
def learn_row(
    trie: Trie, sequences: Sequences, options: Int64, columns: Int64, new_tokens: Int32, scratch: Int32
) -> None:
    """Take a row's new tokens into its own text and the trie; never link across tokens that were missed.

    A sequence that is new to its slot starts by a break.
    """
    slot = columns[SLOT_OF]
    state = sequences.state[slot]
    window = min(options[MAX_WINDOW], 2)
    told_before = columns[LENGTH_OF] - len(new_tokens)
    other = state[GENERATION] != columns[GENERATION_OF] or state[SALT] != columns[SALT_OF]
    if other or told_before < state[SEEN]:
        state[GENERATION], state[SALT], state[OWN_LENGTH], state[LAST] = columns[GENERATION_OF], columns[SALT_OF], 0, 0
    if other or told_before != state[SEEN]:
        break_off(sequences, slot, window)
    for token in new_tokens:
        if 0 <= token < options[VOCAB_SIZE]:
            append_own(sequences, slot, token, window)
            insert_token(trie, sequences.ends[slot], sequences.stamps[slot], scratch, state[SALT], token)
        else:
            break_off(sequences, slot, window)
        state[LAST] = token
    state[SEEN] = columns[LENGTH_OF]


@compiled
def matched_tokens(tokens: Int32, place: int, last: int, most: int) -> int:
    """How many tokens up to ``place`` equal those up to ``last``, at most ``most``."""
    count = 0
    while count < most and count <= place and tokens[place - count] == tokens[last - count] != GAP:
        count += 1
    return count


@compiled
def find_own(sequences: Sequences, slot: int, options: Int64, places: Int32) -> tuple[int, int]:
    """Where the slot's own text ended as it ends now: (place, matched tokens), or (-1, 0).

    The longest match wins; of equal ones the latest, or in the order of frequency the latest of those that go on
    with the most frequent token.
    """
    tokens, previous = sequences.tokens[slot], sequences.previous[slot]
    last = sequences.state[slot, OWN_LENGTH] - 1
    if last < 1:
        return -1, 0
    shortest = max(options[MIN_WINDOW], min(options[MAX_WINDOW], 2))
    longest, count = shortest - 1, 0
    place = previous[last]
    for _ in range(OWN_SCAN):
        if place < 0:
            break
        window = matched_tokens(tokens, place, last, options[MAX_WINDOW]) if tokens[place + 1] != GAP else 0
        if window > longest:
            longest, count = window, 0
        if window == longest and window >= shortest:
            places[count] = place
            count += 1
            if options[BY_FREQUENCY] == 0 and longest == options[MAX_WINDOW]:
                break
        place = previous[place]
    if count == 0:
        return -1, 0
    best = 0
    if options[BY_FREQUENCY] != 0:
        most = 0
        for i in range(count):
            same = 0
            for j in range(i, count):
                same += tokens[places[i] + 1] == tokens[places[j] + 1]
            if same > most:
                best, most = i, same
    return places[best], longest
