"""How many ids a checkpoint's tokenizer has: output heads are often padded beyond it."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer


def num_token_ids(folder: Path, vocab_size: int) -> int:
    """One more than the tokenizer's largest id; ``vocab_size`` if the folder has no tokenizer.json or a larger one."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return vocab_size
    ids = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True).values()
    return min(max(ids, default=vocab_size - 1) + 1, vocab_size)
