"""Prompts from files in each layout, and prompts of random words."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from foretoken.bench.prompts import (
    WORDS,
    Lengths,
    LoadPrompt,
    random_prompts,
    read_prompts,
    repeated,
    text_by_count,
    text_by_rate,
)
from foretoken.errors import ConfigError


def count_words(text: str) -> int:
    return len(text.split())


def read(layout: str, path: Path, content: str, count: Any = None) -> list[LoadPrompt]:
    path.write_text(content, encoding="utf-8")
    return read_prompts(layout, path, count)


def test_a_text_file_has_a_prompt_a_line(tmp_path: Path) -> None:
    found = read("file", tmp_path / "a.txt", "one two\n\nthree [\n")
    assert [prompt.text for prompt in found] == ["one two", "three ["]
    assert all(prompt.output_len is None and prompt.group == "" for prompt in found)


def test_json_lines_have_prompts_or_messages(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    rows = [{"prompt": "a", "output_len": 7, "category": "x"}, {"messages": messages}]
    found = read("file", tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    assert (found[0].text, found[0].output_len, found[0].group) == ("a", 7, "x")
    assert found[1].turns == (tuple(messages),) and found[1].text is None
    assert [prompt.text for prompt in read("file", tmp_path / "b.json", '["p", {"prompt": "q"}]')] == ["p", "q"]


def test_sharegpt_gives_the_first_question_and_the_replys_length(tmp_path: Path) -> None:
    def turns(*texts: str, first: str = "human") -> dict[str, Any]:
        names = itertools.cycle((first, "gpt"))
        return {"id": "1", "conversations": [{"from": next(names), "value": text} for text in texts]}

    rows = [
        turns("what is it", "one two three", "and now"),
        turns("alone"),
        turns("x", "y", first="gpt"),
        turns(" ", "y"),
    ]
    rows.append(turns("say nothing", ""))
    found = read("sharegpt", tmp_path / "a.json", json.dumps(rows), count_words)
    assert [(prompt.text, prompt.output_len) for prompt in found] == [("what is it", 3), ("say nothing", 1)]
    assert read("sharegpt", tmp_path / "a.json", json.dumps(rows))[0].output_len is None


def test_speed_bench_gives_all_turns_and_the_category(tmp_path: Path) -> None:
    rows = [
        {"question_id": "1", "category": "math", "sub_category": "", "turns": ["a", "b"], "multiturn": True},
        {"question_id": "2", "category": "coding", "turns": ["c"], "multiturn": False},
    ]
    for content in (json.dumps(rows), "\n".join(map(json.dumps, rows))):
        found = read("speed-bench", tmp_path / "a.jsonl", content)
        assert [prompt.group for prompt in found] == ["math", "coding"]
        assert found[0].turns == (({"role": "user", "content": "a"},), ({"role": "user", "content": "b"},))
        assert (found[0].text, found[1].text) == (None, "c")


@pytest.mark.parametrize(
    ("layout", "content", "message"),
    [
        ("file", '{"prompt": 1}', "entry 1: no prompt of the layout file"),
        ("file", '{"prompt": "a", "output_len": 0}', "output_len: expected a whole number of at least 1"),
        ("file", '{"messages": []}', "no messages"),
        ("file", "{", "neither a JSON list nor JSON lines"),
        ("sharegpt", '[{"prompt": "a"}]', "holds no prompts"),
        ("sharegpt", '[{"conversations": [{"value": "a"}, {"value": "b"}]}]', "entry 1"),
        ("speed-bench", '{"turns": []}', "no turns"),
        ("speed-bench", '{"turns": ["a"]}\n{"prompt": "a"}', "entry 2: no prompt of the layout speed-bench"),
    ],
)
def test_another_layout_is_refused(layout: str, content: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--dataset-path: ") as caught:
        read(layout, tmp_path / "a.json", content)
    assert message in caught.value.message


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--dataset-path: cannot read"):
        read_prompts("file", tmp_path / "none.txt", None)


def test_random_prompts_have_their_lengths_and_follow_the_seed() -> None:
    def texts(lengths: Lengths, seed: str) -> list[LoadPrompt]:
        return list(itertools.islice(random_prompts(lengths, text_by_rate(1.0), seed), 200))

    exact = texts(Lengths(20, 9), "a")
    assert {(count_words(str(prompt.text)), prompt.output_len) for prompt in exact} == {(20, 9)}
    assert exact == texts(Lengths(20, 9), "a") and exact != texts(Lengths(20, 9), "b")
    assert len({prompt.text for prompt in exact}) == 200
    spread = texts(Lengths(20, 10, ratio=0.5), "a")
    assert {count_words(str(prompt.text)) for prompt in spread} == set(range(10, 21))
    assert {prompt.output_len for prompt in spread} == set(range(5, 11))


def test_random_prompts_share_prefixes_and_nothing_else() -> None:
    lengths = Lengths(5, 1, prefix_len=30, num_prefixes=3)
    prefixes = set()
    for seed in ("a", "b"):
        found = [str(p.text).split() for p in itertools.islice(random_prompts(lengths, text_by_rate(1.0), seed), 100)]
        assert {len(words) for words in found} == {35}
        assert len({tuple(words[30:]) for words in found}) == 100
        prefixes |= {tuple(words[:30]) for words in found}
    # The second round has the same ones.
    assert len(prefixes) == 3


def test_texts_have_the_counted_length() -> None:
    def count(text: str) -> int:
        # Two tokens for a word of more than four letters.
        return sum(1 + (len(word) > 4) for word in text.split())

    make = text_by_count(count)
    generator = random.Random(0)
    for wanted in (1, 2, 50, 301):
        assert max(1, wanted - 1) <= count(make(generator, wanted)) <= max(2, wanted)
    assert all(word in WORDS for word in make(generator, 50).split())


def test_a_files_prompts_come_again_only_after_all_others() -> None:
    prompts = [LoadPrompt.of_text(str(number)) for number in range(5)]
    found = list(itertools.islice(repeated(prompts, "a"), 15))
    for first in (0, 5, 10):
        assert {prompt.text for prompt in found[first : first + 5]} == set("01234")
    assert found == list(itertools.islice(repeated(prompts, "a"), 15))
    assert found[:5] != found[5:10] or found[5:10] != found[10:]
