"""Compiled loops of the n-gram drafter: sequences in batch slots, and matches in their own text."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from foretoken_kernels.cpu.compile import inlined_uncounted

from drafter_svc.ngram.trie import GAP, NO_STAMP, Int64, Trie, mix
from drafter_svc.ngram.trie_growth import end_text, insert_token, take_place
from foretoken.tree import Int32

# Earlier places in its own text that a row is compared with, latest first.
OWN_SCAN = 64
# Places on either side of the cursor that are searched for the output's last tokens.
PREDICTION_SCAN = 2048
# After so many predicted tokens in a row came true, the cursor is not searched for.
SURE_RUN = 4

# Columns of Sequences.state. CURSOR and RUN: see follow_prediction. PLACE: where the last
# token is in the trie's text.
GENERATION, SEEN, OWN_LENGTH, SALT, LAST, PREDICTED_LENGTH, CURSOR, RUN, PLACE = range(9)
# Columns of a batch.
BATCH_SLOT_OF, GENERATION_OF, LENGTH_OF, MAX_NODES_OF, SALT_OF, PROMPT_LENGTH_OF, MAX_DEPTH_OF, MAX_BRANCH_OF = range(8)
NUM_COLUMNS = 8
# Entries of options.
VOCAB_SIZE, MIN_WINDOW, MAX_WINDOW, MIN_BREADTH, MAX_BREADTH, BY_FREQUENCY = range(6)
# RUN at the start of an output: the client's prediction counts as so many matched tokens.
START_RUN = 12


class Sequences(NamedTuple):
    """State and text of each batch slot; a hash chain links places that end with the same tokens.

    Attributes:
        state: int64 [batch_slots, 9].
        tokens: int32 [batch_slots, max_model_len + 1]; a GAP, then the tokens. Where tokens were
            missed, there is another.
        previous: int32 [batch_slots, max_model_len + 1]; the previous place with the same hash, or
            -1.
        heads: int32 [batch_slots, power of 2]; the last place of each hash, or -1.
        stamps: int64 [batch_slots, depth + 1]; of the paths that end at the last token; see
            insert_token.
        predictions: int32 [batch_slots, max_model_len]; the output that the client predicts.
    """

    state: Int64
    tokens: Int32
    previous: Int32
    heads: Int32
    stamps: Int64
    predictions: Int32


def new_sequences(max_batch_slots: int, max_model_len: int, depth: int) -> Sequences:
    """Make empty batch slots.

    Memory is touched as sequences grow: 8 bytes a token, and 4 a predicted one.
    """
    num_heads = 1 << min(max((max_model_len // 2).bit_length(), 8), 15)
    state = np.zeros((max_batch_slots, 9), np.int64)
    state[:, GENERATION] = -1
    return Sequences(
        state=state,
        tokens=np.zeros((max_batch_slots, max_model_len + 1), np.int32),
        previous=np.zeros((max_batch_slots, max_model_len + 1), np.int32),
        heads=np.zeros((max_batch_slots, num_heads), np.int32),
        stamps=np.full((max_batch_slots, depth + 1), NO_STAMP, np.int64),
        predictions=np.zeros((max_batch_slots, max_model_len), np.int32),
    )


@inlined_uncounted
def append_own(sequences: Sequences, batch_slot: int, token: int, window: int) -> None:
    """Append to a batch slot's text; ``window`` (1 or 2) tokens are hashed.

    A text that fills its row starts anew.
    """
    tokens, heads = sequences.tokens[batch_slot], sequences.heads[batch_slot]
    length = sequences.state[batch_slot, OWN_LENGTH]
    if length == 0 or length == len(tokens):
        for head in range(len(heads)):
            heads[head] = -1
        length = 0
    tokens[length] = token
    before = tokens[length - 1] if window == 2 and length > 0 else 0
    bucket = mix(before, token) & (len(heads) - 1)
    sequences.previous[batch_slot, length] = heads[bucket]
    heads[bucket] = length
    sequences.state[batch_slot, OWN_LENGTH] = length + 1


@inlined_uncounted
def break_off(sequences: Sequences, batch_slot: int, window: int) -> None:
    """Mark a break in a batch slot's sequence: nothing is matched or learned across it."""
    for d in range(sequences.stamps.shape[1]):
        sequences.stamps[batch_slot, d] = NO_STAMP
    sequences.state[batch_slot, PLACE] = end_text(sequences.state[batch_slot, PLACE])
    append_own(sequences, batch_slot, GAP, window)


@inlined_uncounted
def append_prediction(sequences: Sequences, batch_slot: int, tokens: Int32) -> None:
    """Append to a batch slot's prediction, as far as the context reaches."""
    state, predicted = sequences.state[batch_slot], sequences.predictions[batch_slot]
    start = state[PREDICTED_LENGTH]
    count = min(len(tokens), len(predicted) - start)
    for i in range(count):
        predicted[start + i] = tokens[i]
    state[PREDICTED_LENGTH] = start + count


@inlined_uncounted
def follow_prediction(sequences: Sequences, batch_slot: int, token: int) -> None:
    """Move the cursor past one output token.

    CURSOR is the place in the prediction where the output goes on; RUN is the number of tokens in a
    row before it that came true. A token that breaks a run is first taken for a replaced one: the
    cursor moves on.
    """
    state = sequences.state[batch_slot]
    cursor, run = state[CURSOR], state[RUN]
    if cursor < state[PREDICTED_LENGTH] and sequences.predictions[batch_slot, cursor] == token:
        state[CURSOR], state[RUN] = cursor + 1, run + 1
    elif run > 1:
        state[CURSOR], state[RUN] = cursor + 1, 1
    else:
        state[RUN] = 0


@inlined_uncounted
def start_sequence(state: Int64, columns: Int64) -> None:
    """Reset a batch slot for a new sequence."""
    state[GENERATION], state[SALT] = columns[GENERATION_OF], columns[SALT_OF]
    state[OWN_LENGTH], state[LAST] = 0, 0
    state[PREDICTED_LENGTH], state[CURSOR], state[RUN] = 0, 0, START_RUN


@inlined_uncounted
def learn_row(
    trie: Trie,
    sequences: Sequences,
    options: Int64,
    columns: Int64,
    new_tokens: Int32,
    prediction: Int32,
    scratch: Int32,
) -> None:
    """Append a row's new tokens to its text and the trie, but not across missed tokens.

    A sequence that is new to its batch slot starts with a break. Predictions are not learned.
    """
    batch_slot = columns[BATCH_SLOT_OF]
    state = sequences.state[batch_slot]
    window = min(options[MAX_WINDOW], 2)
    known_before = columns[LENGTH_OF] - len(new_tokens)
    other = state[GENERATION] != columns[GENERATION_OF] or state[SALT] != columns[SALT_OF]
    if other or known_before < state[SEEN]:
        start_sequence(state, columns)
        state[SEEN] = 0
    if known_before != state[SEEN] or state[OWN_LENGTH] == 0:
        break_off(sequences, batch_slot, window)
        missed = known_before - max(state[SEEN], columns[PROMPT_LENGTH_OF])
        if missed > 0:
            # Output was missed: the next tokens show where the prediction goes on.
            state[CURSOR], state[RUN] = state[CURSOR] + missed, 0
    if len(prediction) > 0:
        append_prediction(sequences, batch_slot, prediction)
    for i in range(len(new_tokens)):
        token = new_tokens[i]
        if 0 <= token < options[VOCAB_SIZE]:
            append_own(sequences, batch_slot, token, window)
            state[PLACE] = take_place(trie, state[PLACE], batch_slot)
            insert_token(trie, state[PLACE], sequences.stamps[batch_slot], scratch, state[SALT], token)
        else:
            break_off(sequences, batch_slot, window)
        if state[PREDICTED_LENGTH] > 0 and known_before + i >= columns[PROMPT_LENGTH_OF]:
            follow_prediction(sequences, batch_slot, token)
        state[LAST] = token
    state[SEEN] = columns[LENGTH_OF]


@inlined_uncounted
def matched_tokens(text: Int32, place: int, own: Int32, last: int, most: int) -> int:
    """Count the tokens of ``text`` up to ``place`` that equal ``own`` up to ``last``."""
    count = 0
    while count < most and count <= place and count <= last and text[place - count] == own[last - count] != GAP:
        count += 1
    return count


@inlined_uncounted
def align_prediction(sequences: Sequences, batch_slot: int) -> tuple[int, int]:
    """Find where the output goes on in the batch slot's prediction.

    Return (place before, matched tokens), or (-1, 0).

    While a run is shorter than SURE_RUN, the prediction is searched for the longest match of the
    output's last tokens, two at least; of equal matches the one nearest to the cursor wins.
    """
    state = sequences.state[batch_slot]
    predicted, length = sequences.predictions[batch_slot], state[PREDICTED_LENGTH]
    if length == 0:
        return -1, 0
    if state[RUN] < SURE_RUN:
        own, last = sequences.tokens[batch_slot], state[OWN_LENGTH] - 1
        near, longest = state[CURSOR] - 1, max(state[RUN], 1)
        for distance in range(PREDICTION_SCAN):
            for place in (near + distance, near - distance):
                if 0 <= place < length and predicted[place] == own[last]:
                    matched = matched_tokens(predicted, place, own, last, START_RUN)
                    if matched > longest:
                        state[CURSOR], longest = place + 1, matched
                        state[RUN] = matched
            if longest == START_RUN:
                break
    if state[RUN] == 0 or state[CURSOR] >= length:
        return -1, 0
    return state[CURSOR] - 1, state[RUN]


@inlined_uncounted
def find_own(sequences: Sequences, batch_slot: int, options: Int64, places: Int32) -> tuple[int, int]:
    """Find an earlier place in the batch slot's text that matches its end.

    Return (place, matched tokens), or (-1, 0).

    The longest match wins, and of equal matches the latest; with the order of frequency, the latest
    whose next token is the most frequent.
    """
    tokens, previous = sequences.tokens[batch_slot], sequences.previous[batch_slot]
    last = sequences.state[batch_slot, OWN_LENGTH] - 1
    if last < 1:
        return -1, 0
    shortest = max(options[MIN_WINDOW], min(options[MAX_WINDOW], 2))
    longest, count = shortest - 1, 0
    place = previous[last]
    for _ in range(OWN_SCAN):
        if place < 0:
            break
        window = matched_tokens(tokens, place, tokens, last, options[MAX_WINDOW]) if tokens[place + 1] != GAP else 0
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
