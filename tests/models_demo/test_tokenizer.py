"""The shipped tokenizer: lossless, reserved ids never produced, readable by both libraries."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from models.demo.chat_samples import ChatSample, chat_samples
from models.demo.held_out import held_out_files
from models.demo.source_rule import read_source
from models.demo.tokenizer import RESERVED, SPECIAL_TOKENS, VOCAB_SIZE, load_for_corpus

TARGET = Path(__file__).parents[2] / "models" / "demo" / "target"
CORPUS_TOKENIZER = load_for_corpus(TARGET / "tokenizer.json")
TEXT_WITH_EVERYTHING = "def f(x):\n        return  x + 1234567\n\n\n\t# \u00e9 \U0001f600 . , a  . b\r\n <|endoftext|> "


@given(st.text())
def test_round_trip_of_any_text(text: str) -> None:
    ids = CORPUS_TOKENIZER.encode(text).ids
    assert CORPUS_TOKENIZER.decode(ids, skip_special_tokens=False) == text
    assert not any(token < len(SPECIAL_TOKENS) for token in ids)


def test_special_names_inside_a_file_are_ordinary_text_for_the_corpus() -> None:
    text = " ".join(SPECIAL_TOKENS)
    ids = CORPUS_TOKENIZER.encode(text).ids
    assert min(ids) >= len(SPECIAL_TOKENS)
    assert CORPUS_TOKENIZER.decode(ids) == text


def test_held_out_files_use_no_reserved_id() -> None:
    path = held_out_files()[0]
    assert min(CORPUS_TOKENIZER.encode(read_source(path)).ids) >= len(SPECIAL_TOKENS)


def test_special_ids_come_first() -> None:
    assert CORPUS_TOKENIZER.get_vocab_size() == VOCAB_SIZE
    assert [CORPUS_TOKENIZER.token_to_id(name) for name in SPECIAL_TOKENS] == list(range(16))
    assert len(RESERVED) >= 8


def test_both_libraries_agree() -> None:
    plain = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    automatic = AutoTokenizer.from_pretrained(TARGET)
    ids = automatic.encode(TEXT_WITH_EVERYTHING)
    assert ids == plain.encode(TEXT_WITH_EVERYTHING).ids
    assert automatic.decode(ids) == TEXT_WITH_EVERYTHING
    assert automatic.eos_token_id == automatic.bos_token_id == 0


def test_indentation_stays_whole_and_apart() -> None:
    tokens = CORPUS_TOKENIZER.encode("if x:\n        return y\n")
    pieces = [CORPUS_TOKENIZER.decode([token]) for token in tokens.ids]
    assert pieces == ["if", " x", ":", "\n", "        ", "return", " y", "\n"]


def test_chat_template() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Return one."},
        {"role": "assistant", "content": "def one():\n    return 1\n"},
        {"role": "user", "content": "Return two."},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|endoftext|><|user|>Be short.<|end|><|user|>Return one.<|end|>"
        "<|assistant|>def one():\n    return 1\n<|end|><|user|>Return two.<|end|><|assistant|>"
    )
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"][:2] == [0, 1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            'def double(x):\n    """Return twice the given number."""\n    y = x + x\n    return y\n',
            [
                ChatSample(
                    "Return twice the given number.",
                    'def double(x):\n    """Return twice the given number."""\n    y = x + x\n    return y\n',
                )
            ],
        ),
        ('def short(x):\n    """Too short."""\n    return x\n', []),
        ("def bare(x):\n    y = x\n    z = y\n    return z\n", []),
    ],
)
def test_chat_samples(text: str, expected: list[ChatSample]) -> None:
    assert list(chat_samples(text)) == expected
