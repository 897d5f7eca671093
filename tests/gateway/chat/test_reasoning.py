"""Reasoning between marks, whole and streamed with any split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.chat.reasoning import FORMATS, NAMES, ReasoningReader, Thinking, reasoning_format

QWEN3, DEEPSEEK_R1, MISTRAL = FORMATS
# How the reply begins, its text, the reasoning and the answer.
CASES = {
    "marks": (Thinking.OPTIONAL, "<think>\nA < b.\n\n</think>\n\nSo: 1\n", "A < b.", "So: 1\n"),
    "no marks": (Thinking.OPTIONAL, " So <think> 1", "", " So <think> 1"),
    "opened": (Thinking.OPEN, "A </b>.\n</think>\nSo", "A </b>.", "So"),
    "opened twice": (Thinking.OPEN, "\n<think>\nA</think>So", "A", "So"),
    "never closed": (Thinking.OPEN, "A \n</thi", "A \n</thi", ""),
    "empty": (Thinking.OPTIONAL, "<think>\n\n</think>\n\nSo", "", "So"),
    "half a mark": (Thinking.OPTIONAL, "<thin", "", "<thin"),
    "a second thought is text": (Thinking.OPEN, "A</think>B</think>C", "A", "B</think>C"),
    "nothing": (Thinking.OPEN, "", "", ""),
}  # fmt: skip


def read(thinking: Thinking, pieces: list[str]) -> tuple[str, str]:
    reader = ReasoningReader(QWEN3, thinking)
    reasoning = answer = ""
    for number, piece in enumerate(pieces):
        new, text = reader.feed(piece, finished=number == len(pieces) - 1)
        reasoning, answer = reasoning + new, answer + text
    return reasoning, answer


@pytest.mark.parametrize("case", CASES)
def test_whole_and_character_by_character(case: str) -> None:
    thinking, text, *wanted = CASES[case]
    assert read(thinking, [text]) == tuple(wanted)
    assert read(thinking, [*text, ""]) == tuple(wanted)


@given(
    parts=st.lists(st.sampled_from(["<think>", "</think>", "<", "/", "think>", "a", " ", "\n", "é"]), max_size=20),
    cuts=st.lists(st.integers(0, 100), max_size=10),
    thinking=st.sampled_from([Thinking.OPTIONAL, Thinking.OPEN]),
)
def test_a_split_never_matters(parts: list[str], cuts: list[int], thinking: Thinking) -> None:
    text = "".join(parts)
    places = sorted(min(cut, len(text)) for cut in cuts)
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    assert read(thinking, pieces) == read(thinking, [text])


def test_the_prompt_says_how_a_reply_begins() -> None:
    assert QWEN3.thinking("<|im_start|>assistant\n") is Thinking.OPTIONAL
    assert QWEN3.thinking("<|im_start|>assistant\n<think>\n") is Thinking.OPEN
    assert QWEN3.thinking("assistant\n<think>\n\n</think>\n\n") is Thinking.NONE
    assert DEEPSEEK_R1.thinking("<|Assistant|>") is Thinking.OPEN
    # Who continues an answer has reasoned.
    assert DEEPSEEK_R1.thinking("<|Assistant|>So it", continues=True) is Thinking.NONE
    assert DEEPSEEK_R1.thinking("<|Assistant|><think>", continues=True) is Thinking.OPEN
    assert MISTRAL.thinking("[/INST]") is Thinking.OPTIONAL


def test_a_template_or_a_name_chooses_the_format() -> None:
    assert reasoning_format("auto", "{{ '<think>' }}{{ '</think>' }}") is QWEN3
    assert reasoning_format("auto", "content.split('</think>')") is DEEPSEEK_R1
    assert reasoning_format("auto", "[THINK][/THINK]") is MISTRAL
    assert reasoning_format("auto", "{{ messages }}") is None
    assert reasoning_format("none", "<think></think>") is None
    assert all(name in reasoning_format(name, "").names for name in NAMES)  # type: ignore[union-attr]
