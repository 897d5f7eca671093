"""Measure the cost of a grammar on the demo model's vocabulary: to compile, a sequence, a token.

    python -m benchmarks.grammars [--folder CHECKPOINT]

A token costs one step of the matcher and the mask of the next row, both on the engine's thread.
Outputs are random walks, which reach more of the grammar than a model would. Each output fills the
cache of its own lexer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from foretoken.models.config import load_config
from foretoken.models.tokenizer_size import num_token_ids
from foretoken.sampling import Grammar
from verifier_svc.sampling.grammar import Matcher, Vocabulary, compile_grammar

DEMO = Path(__file__).parents[1] / "models" / "demo" / "target"
NUM_WALKS = 20
MAX_TOKENS = 200
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema of a record": Grammar("json_schema", json.dumps(RECORD)),
    "enum of 5000": Grammar("json_schema", json.dumps({"enum": [f"value number {i}" for i in range(5000)]})),
    "any JSON object": Grammar("json_object"),
    "regex, 20 dates": Grammar("regex", r"(\d{4}-\d{2}-\d{2}\n){20}"),
    "regex, any words": Grammar("regex", r"(\w+[ ,.\n])*"),
}
T = TypeVar("T")


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """Call a function; return its result and the seconds that it took."""
    began = time.perf_counter()
    result = work()
    return result, time.perf_counter() - began


def walk(matcher: Matcher, rng: np.random.Generator) -> list[float]:
    """Return the seconds of each token of one random output."""
    seconds = []
    for _ in range(MAX_TOKENS):
        allowed = np.flatnonzero(np.unpackbits(matcher.allowed, bitorder="little"))
        if not len(allowed):
            break
        token = int(rng.choice(allowed))
        seconds.append(timed(lambda token=token: matcher.advance((token,)))[1])  # type: ignore[misc]
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, default=DEMO, help="a checkpoint; its config and tokenizer are read")
    folder = parser.parse_args().folder
    config = load_config(folder)
    limit = num_token_ids(folder, config.vocab_size)
    vocabulary, seconds = timed(lambda: Vocabulary(folder, vocab_limit=limit, eos_ids=frozenset(config.eos_token_ids)))
    print(f"vocabulary of {limit} tokens: {seconds * 1e3:.0f} ms, once")
    print(
        f"{'grammar':20} {'compile ms':>10} {'anew us':>8} {'most us':>8} {'median us':>9} {'p99 us':>7} {'tokens':>7}"
    )
    rng = np.random.default_rng(0)
    for name, grammar in GRAMMARS.items():
        template, compiled = timed(lambda grammar=grammar: compile_grammar(grammar, vocabulary))  # type: ignore[misc]
        made, tokens = [], []
        for _ in range(NUM_WALKS):
            matcher, seconds = timed(template.anew)
            made.append(seconds)
            tokens += walk(matcher, rng)
        print(
            f"{name:20} {compiled * 1e3:10.1f} {statistics.median(made) * 1e6:8.0f} {max(tokens) * 1e6:8.0f} "
            f"{statistics.median(tokens) * 1e6:9.0f} {np.quantile(tokens, 0.99) * 1e6:7.0f} {len(tokens):7d}"
        )


if __name__ == "__main__":
    main()
