"""Texts that differ: where, by how much, which fail; and the command on a CPU, where none does."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.gpu import near_ties
from benchmarks.gpu.checkpoint import DEMO
from benchmarks.gpu.near_ties import Divergence, TextComparison, compare, complete_all, first_difference, gap_of

ROOT = Path(__file__).parents[3]


def test_the_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 4, 5]) == 1
    with pytest.raises(ValueError, match="longer"):
        first_difference([1, 2], [1, 2, 3])


def test_the_gap_is_that_of_the_two_tokens() -> None:
    best = {7: -0.5, 8: -0.75, 9: -3.0}
    assert gap_of(best, 8, 7) == gap_of(best, 7, 8) == 0.25
    assert gap_of(best, 7, 6) is None


def test_texts_are_compared_up_to_where_they_differ() -> None:
    prompts = [[50], [60]]
    same = [[1, 2, 3, 4], [5, 6, 7, 8]]
    texts = {
        "plain, alone": same,
        "drafted, alone": [[1, 2, 9, 9], [5, 6, 7, 8]],
        "plain, in batches": same,
        "drafted, in batches": [[1, 2, 3, 4], [0, 6, 7, 8]],
    }
    asked = []

    def best(prompt: Sequence[int]) -> dict[int, float]:
        asked.append(list(prompt))
        return {9: -1.0, 3: -1.125, 5: -1.0}

    alone, batched, both = compare(prompts, texts.items(), best)
    assert asked == [[50, 1, 2], [60]]
    assert alone == TextComparison("drafted, alone", "plain, alone", 2, 7, (Divergence(0, 2, (9, 3), 0.125),))
    assert alone.per_1000_tokens == pytest.approx(1000 / 7)
    assert (batched.divergences, batched.num_tokens) == ((), 8)
    assert both.divergences == (Divergence(1, 0, (0, 5), None),) and both.num_tokens == 5
    # A gap at the bound passes; an unknown gap fails, and in strict mode all gaps fail.
    assert alone.failures(0.125) == [] and len(alone.failures(0.12)) == len(alone.failures(None)) == 1
    assert "not both among the 5 best" in both.failures(0.125)[0] and both.failures(math.inf)
    assert "prompt 0, token 2: 9 and 3, 0.1250 nats apart" in alone.failures(None)[0]
    table = near_ties.to_markdown([alone, batched])
    assert "| drafted, alone | plain, alone | 1 of 2 | 142.86 | 0.1250 | 0.1250 |" in table
    assert "| plain, in batches | plain, alone | 0 of 2 | 0.00 | | |" in table


def test_every_prompt_is_completed_alone_and_in_batches() -> None:
    asked: list[tuple[int, bool]] = []

    def complete(prompts: Sequence[Sequence[int]], drafted: bool) -> list[list[int]]:
        asked.append((len(prompts), drafted))
        return [[*prompt, int(drafted)] for prompt in prompts]

    texts = dict(complete_all([[1], [2], [3]], 2, complete))
    assert set(texts) == {name for names in near_ties.COMPARISONS for name in names}
    assert texts["plain, alone"] == texts["plain, in batches"] == [[1, 0], [2, 0], [3, 0]]
    assert texts["drafted, in batches"] == [[1, 1], [2, 1], [3, 1]]
    assert asked == [(1, False)] * 3 + [(1, True)] * 3 + [(2, False), (1, False)] + [(2, True), (1, True)]


def test_texts_are_compared_as_soon_as_possible() -> None:
    """A run that is cut off then leaves its findings."""
    num_asked = 0

    def complete(prompts: Sequence[Sequence[int]], drafted: bool) -> list[list[int]]:
        nonlocal num_asked
        num_asked += 1
        return [[0] for _ in prompts]

    found = []
    for comparison in compare([[1]], complete_all([[1]], 1, complete), lambda prompt: {}):
        found.append(((comparison.texts, comparison.against), num_asked))
    assert found == list(zip(near_ties.COMPARISONS, (2, 3, 4), strict=True))


@pytest.mark.slow
def test_the_whole_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One token is changed after the server has answered, so that there is a difference to find."""

    def spoilt(*arguments: object) -> Iterator[tuple[str, list[list[int]]]]:
        for name, texts in complete_all(*arguments):  # type: ignore[arg-type]
            if name == "drafted, alone":
                texts[1][3] += 1
            yield name, texts

    found: list[dict[int, float]] = []

    def best(client: near_ties.GenerateClient, prompt: Sequence[int]) -> dict[int, float]:
        found.append(real_best(client, prompt))
        return found[-1]

    real_best = near_ties.GenerateClient.best
    monkeypatch.setattr(near_ties, "complete_all", spoilt)
    monkeypatch.setattr(near_ties.GenerateClient, "best", best)
    words = ["--model", str(DEMO / "target"), "--drafter-head", str(DEMO / "eagle3"), "--threads", "1"]
    words += ["--output", str(tmp_path / "ties.json"), "--prompts", "3", "--tokens", "16", "--batch", "2"]
    monkeypatch.setattr(sys, "argv", ["near_ties", *words, "--tree", "4", "2", "8"])
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'kernels'}")
    with pytest.raises(SystemExit, match="1"):
        near_ties.main()
    result = json.loads((tmp_path / "ties.json").read_text())
    assert result["mode"] == "strict" and result["num_accepted"] > 0 and result["bound"] == 1e-3
    alone, *others = result["comparisons"]
    assert [(each["num_texts"], each["num_tokens"], each["divergences"]) for each in others] == [(3, 48, [])] * 2
    (divergence,) = alone["divergences"]
    token, other = divergence["tokens"]
    assert (divergence["prompt"], divergence["at"]) == (1, 3) and token == other + 1
    assert alone["num_tokens"] == 16 + 4 + 16
    # It was looked up where it stands: the server's own token is the best one there.
    (known,) = found
    assert len(known) == 5 and max(known, key=known.__getitem__) == other
    assert divergence["gap"] == near_ties.gap_of(known, token, other)
    assert "no text may differ in strict mode" in capsys.readouterr().out
