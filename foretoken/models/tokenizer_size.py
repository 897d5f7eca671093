"""The number of ids of a checkpoint's tokenizer, which is often smaller than the padded output
head."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer


def num_token_ids(folder: Path, vocab_size: int) -> int:
    """Return one more than the tokenizer's largest id, at most ``vocab_size``, which also stands
    for no tokenizer."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return vocab_size
    ids = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True).values()
    return min(max(ids, default=vocab_size - 1) + 1, vocab_size)
