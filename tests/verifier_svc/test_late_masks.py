"""Steps with token masks overlap: the masks are bound late, and the text is that of plain decode.

The target costs nothing, and results are read a step late.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.grammars import VOCAB, ids_of
from tests.support.runs import Course, greedy, with_grammar


def masked(kind: str, seed: int, max_tokens: int = 40):
    request = greedy(seed, 6, max_tokens)
    match kind:
        case "grammar":
            return with_grammar(request)
        case "ends":
            return with_grammar(request, "[a-f]{3,9}(x|yz)[0-9]{4}")
        case "allowed":
            fields = {"allowed_token_ids": tuple(range(8, VOCAB, 2))}
        case "bad words":
            fields = {"bad_token_ids": (tuple(ids_of("5")), tuple(ids_of("a", "b")), *((t, t + 1) for t in range(20)))}
    return replace(request, sampling=replace(request.sampling, **fields))


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("kind", ["grammar", "ends", "allowed", "bad words"])
def test_a_masked_request_joins_the_run_of_others(kind: str, drafts: bool) -> None:
    course = Course([greedy(1, 9, 60), masked(kind, 2), greedy(3, 9, 30)], {1: 4, 2: 6}, drafts=drafts)
    course.run()
    assert course.num_runs == 1 and course.runs.num_ordinary == 0
    assert course.step.num_bound > 3
    assert course.num_accepted(1) > 2 or not drafts
