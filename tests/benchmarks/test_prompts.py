"""The rules that choose prompts, with a tokenizer trained here."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from benchmarks.prompts import (
    MAX_TOKENS,
    MIN_FILES,
    MIN_TOKENS,
    BenchPrompt,
    code_prompts,
    num_files,
    random_prompts,
)
from models.demo.held_out import HELD_OUT_STANDARD_LIBRARY


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = Tokenizer(BPE())
    made.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(vocab_size=400, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    made.train_from_iterator(["def function(self, value):\n    return self.value\n"] * 4, trainer)
    return made


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[BenchPrompt]:
    return code_prompts(tokenizer, 20)


def test_code_prompts_have_the_promised_lengths_and_files(prompts: list[BenchPrompt]) -> None:
    assert len(prompts) == 20
    assert num_files(prompts) >= MIN_FILES
    assert all(MIN_TOKENS <= len(prompt.token_ids) <= MAX_TOKENS for prompt in prompts)
    packages = {prompt.source.split("/")[0].removesuffix(".py") for prompt in prompts}
    assert packages <= set(HELD_OUT_STANDARD_LIBRARY)


@pytest.mark.slow
def test_code_prompts_follow_from_the_seed(tokenizer: Tokenizer, prompts: list[BenchPrompt]) -> None:
    assert code_prompts(tokenizer, 20) == prompts
    assert code_prompts(tokenizer, 20, seed=1) != prompts


def test_random_prompts_follow_from_the_seed(tokenizer: Tokenizer) -> None:
    prompts = random_prompts(tokenizer, 5, seed=1)
    assert prompts == random_prompts(tokenizer, 5, seed=1)
    assert prompts != random_prompts(tokenizer, 5, seed=2)
    assert all(MIN_TOKENS <= len(prompt.token_ids) <= MAX_TOKENS for prompt in prompts)


def test_random_prompts_repeat_no_identifier(tokenizer: Tokenizer) -> None:
    (prompt,) = random_prompts(tokenizer, 1)
    text = "".join(tokenizer.id_to_token(i) for i in prompt.token_ids).replace("\u0120", " ").replace("\u010a", " ")
    long_names = [name for name in text.split() if len(name) > 4]
    assert len(long_names) > 10
    assert len(set(long_names)) == len(long_names)
