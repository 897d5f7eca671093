"""Choose the benchmark's prompts from a seed: held-out code, and unpredictable text."""

from __future__ import annotations

import random
import string
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from models.demo.held_out import TextEncoder, held_out_prompts, token_ids

MIN_TOKENS = 200
MAX_TOKENS = 400
MIN_FILES = 10
IDENTIFIERS_PER_LINE = 6


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """Token ids and their source: a file in the standard library's folder, or the rule's name."""

    token_ids: tuple[int, ...]
    source: str


def code_prompts(tokenizer: TextEncoder, count: int, seed: int = 0) -> list[BenchPrompt]:
    """Return ``count`` prompts of 200 to 400 tokens from held-out files (models/demo/held_out.py).

    Raises:
        ValueError: the prompts come from fewer than ``min(count, MIN_FILES)`` files.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    found = held_out_prompts(tokenizer, count, min_tokens=MIN_TOKENS, max_tokens=MAX_TOKENS, seed=seed)
    prompts = [BenchPrompt(prompt.token_ids, prompt.file.relative_to(library).as_posix()) for prompt in found]
    if num_files(prompts) < min(count, MIN_FILES):
        raise ValueError(f"{count} prompts come from only {num_files(prompts)} held-out files")
    return prompts


def random_prompts(tokenizer: TextEncoder, count: int, seed: int = 0) -> list[BenchPrompt]:
    """Return ``count`` prompts of 200 to 400 tokens.

    Their lines have six random identifiers of 3 to 10 letters.
    """
    generator = random.Random(f"random identifiers {seed}")
    prompts = []
    for _ in range(count):
        wanted = generator.randint(MIN_TOKENS, MAX_TOKENS)
        # An identifier and its separator are at least one token, so this is enough text.
        lines = [_line(generator) for _ in range(-(-wanted // IDENTIFIERS_PER_LINE))]
        ids = token_ids(tokenizer, "".join(lines))[:wanted]
        prompts.append(BenchPrompt(tuple(ids), "random identifiers"))
    return prompts


def num_files(prompts: Sequence[BenchPrompt]) -> int:
    """Return the number of different sources of the prompts."""
    return len({prompt.source for prompt in prompts})


def _line(generator: random.Random) -> str:
    names = (
        "".join(generator.choices(string.ascii_lowercase, k=generator.randint(3, 10)))
        for _ in range(IDENTIFIERS_PER_LINE)
    )
    return " ".join(names) + "\n"
