"""Bound the characters that one token can stand for, to recognize texts that can never fit.

The bound comes from the tokenizer's definition (``tokenizer.json``). A part that may drop or merge
any number of characters, or that this module does not know, has no bound: GENEROUS_CHARS stands
in for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# For tokenizers without a bound. The longest tokens of public vocabularies have 128 characters.
GENEROUS_CHARS = 1024
# Canonical composition makes one character of at most this many.
COMPOSED_CHARS = 4
# Characters that one character of a normalized text stands for, by the kind of normalizer.
_SHRINKING = {
    "ByteLevel": 1,
    "Lowercase": 1,
    "NFC": COMPOSED_CHARS,
    "NFD": 1,
    "NFKC": COMPOSED_CHARS,
    "NFKD": 1,
    "Prepend": 1,
}
# Pre-tokenizers that keep every character, whatever their options.
_KEEPING = frozenset({"ByteLevel", "Digits", "FixedLength", "Metaspace", "UnicodeScripts"})
_NUM_BYTES = 256


def max_token_chars(backend: Any) -> int:
    """Return the most characters that one token stands for; GENEROUS_CHARS if there is no bound."""
    tokenizer = json.loads(backend.to_str())
    shrinking = _shrinking(tokenizer["normalizer"])
    if shrinking is None or not _keeps_text(tokenizer["pre_tokenizer"]) or not _knows_all_text(tokenizer):
        return GENEROUS_CHARS
    # An added token that strips includes all space around it.
    if any(token["lstrip"] or token["rstrip"] for token in tokenizer["added_tokens"]):
        return GENEROUS_CHARS
    tokens = [*backend.get_vocab(with_added_tokens=True)]
    if backend.normalizer is not None:
        # The tokenizer searches for their normalized form in the normalized text.
        matched = [token["content"] for token in tokenizer["added_tokens"] if token["normalized"]]
        tokens += [backend.normalizer.normalize_str(content) for content in matched]
    return shrinking * max(map(len, tokens), default=1)


def _shrinking(normalizer: Mapping[str, Any] | None) -> int | None:
    """Return the most characters that one normalized character stands for; None if unbounded."""
    if normalizer is None:
        return 1
    kind = normalizer["type"]
    if kind == "Sequence":
        product = 1
        for part in normalizer["normalizers"]:
            factor = _shrinking(part)
            if factor is None:
                return None
            product *= factor
        return product
    if kind == "Replace":
        pattern, content = normalizer["pattern"].get("String"), normalizer["content"]
        return -(-len(pattern) // len(content)) if pattern and content else None
    return _SHRINKING.get(kind)


def _keeps_text(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    """Return whether all characters reach the model."""
    if pre_tokenizer is None:
        return True
    kind = pre_tokenizer["type"]
    if kind == "Sequence":
        return all(_keeps_text(part) for part in pre_tokenizer["pretokenizers"])
    if kind in ("Split", "Punctuation"):
        return bool(pre_tokenizer["behavior"] != "Removed")
    return kind in _KEEPING


def _knows_all_text(tokenizer: Mapping[str, Any]) -> bool:
    """Return whether the model has a token for every text, so that it drops and merges nothing."""
    model = tokenizer["model"]
    if model["type"] not in ("BPE", "Unigram"):
        return False
    vocabulary = model["vocab"] if model["type"] == "BPE" else {token for token, _ in model["vocab"]}
    if model.get("byte_fallback"):
        return all(f"<0x{byte:02X}>" in vocabulary for byte in range(_NUM_BYTES))
    return _is_byte_level(tokenizer) and all(character in vocabulary for character in byte_characters())


def _is_byte_level(tokenizer: Mapping[str, Any]) -> bool:
    """Return whether the model sees bytes, written as characters."""
    parts: list[Mapping[str, Any] | None] = [tokenizer["normalizer"], tokenizer["pre_tokenizer"]]
    for part in parts:
        if part is not None:
            parts += part.get("normalizers", ()) or part.get("pretokenizers", ())
    return any(part is not None and part["type"] == "ByteLevel" for part in parts)


def byte_characters() -> dict[str, int]:
    """Return the byte that each printable stand-in of byte-level BPE stands for (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(_NUM_BYTES) if byte not in set(printable)]
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}
