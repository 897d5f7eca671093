from __future__ import annotations

import pytest

from foretoken.sampling import SamplingParams, SpeculationOptions
from verifier_svc.drafters.request import NO_DRAFT, DraftRow, RequestKind, Shape, TreeBounds
from verifier_svc.messages import SequenceKey, Submit
from verifier_svc.scheduling.sequence import Sequence

CHAIN = Shape(4, 3, 1)


def row(shape: Shape, sampling: SamplingParams, new_tokens: int = 2) -> DraftRow:
    submit = Submit(SequenceKey(1, "r", 0), 0, (1, 2), (), sampling, SpeculationOptions(), None, None)
    sequence = Sequence(submit, max_model_len=64, eos_ids=frozenset(), token_limit=8, now=0.0)
    return DraftRow(sequence, 0, 0, 2, [1] * new_tokens, [], [], (), shape, True)


@pytest.mark.parametrize(
    ("sampling", "is_filtered"),
    [
        (SamplingParams(temperature=0.7), False),
        (SamplingParams(temperature=0.7, top_k=-1), False),
        (SamplingParams(temperature=0.7, top_k=3), True),
        (SamplingParams(temperature=0.7, top_p=0.9), True),
        (SamplingParams(temperature=0.7, min_p=0.1), True),
        # Greedy rows need no cut.
        (SamplingParams(temperature=0.0, top_k=3), False),
    ],
)
def test_trees_with_cuts_are_a_kind_of_their_own(sampling: SamplingParams, is_filtered: bool) -> None:
    """Graphs of trees with cuts have other kernels."""
    plain = row(CHAIN, SamplingParams(temperature=0.0))
    for in_device_memory in (False, True):
        kind = RequestKind.of([plain, row(CHAIN, sampling)], in_device_memory=in_device_memory)
        assert kind.is_filtered == is_filtered
        assert (kind == RequestKind.of([plain, plain], in_device_memory=in_device_memory)) == (not is_filtered)
        assert not RequestKind.of([plain, row(NO_DRAFT, sampling)], in_device_memory=in_device_memory).is_filtered


def test_new_tokens_count_where_the_host_sends_them() -> None:
    few, many = ([row(CHAIN, SamplingParams(), count)] for count in (1, 9))
    assert RequestKind.of(few, in_device_memory=False) != RequestKind.of(many, in_device_memory=False)
    assert RequestKind.of(few, in_device_memory=True) == RequestKind.of(many, in_device_memory=True)


@pytest.mark.parametrize(
    ("bounds", "has_model", "text"),
    [
        (TreeBounds(8), False, "nodes: up to 8, with the root"),
        (TreeBounds(8), True, "levels: up to 7; children of a node: up to 4; nodes: up to 8, with the root"),
        (TreeBounds(64, 5, 8), True, "levels: 5; children of a node: up to 8; nodes: up to 64, with the root"),
        # A tree has no more levels than nodes below its root.
        (TreeBounds(8, 20, 1), True, "levels: 7; children of a node: up to 1; nodes: up to 8, with the root"),
    ],
)
def test_the_plan_shows_bounds_as_drafting_applies_them(bounds: TreeBounds, has_model: bool, text: str) -> None:
    assert bounds.describe(has_model) == text
