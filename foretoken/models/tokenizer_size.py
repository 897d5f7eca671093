"""Count the ids of a checkpoint's tokenizer.

There are often fewer than the padded output head has.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer


def num_token_ids(folder: Path, vocab_size: int) -> int:
    """Return one more than the tokenizer's largest id, at most ``vocab_size``.

    Without a tokenizer, return ``vocab_size``.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return vocab_size
    ids = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True).values()
    return min(max(ids, default=vocab_size - 1) + 1, vocab_size)
