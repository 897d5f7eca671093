"""Decode token ids to text step by step, never half a character.

Byte-level BPE (Llama 3, Qwen, GPT-2) maps each token to bytes, so an incremental UTF-8 decoder is
exact and costs about a microsecond per token. For all other decoders (SentencePiece with byte
fallback) the tokenizer decodes a short window again, and the new part of its text is shown.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from typing import Any, Protocol

from gateway.token_length import byte_characters

REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Decodes one output. All pieces joined are the tokenizer's ``decode`` of all ids."""

    def feed(self, ids: Sequence[int]) -> str:
        """Return the text that ``ids`` make certain; bytes of an unfinished character wait."""
        ...

    def flush(self) -> str:
        """Return the text that still waits at the end; an unfinished character becomes U+FFFD."""
        ...


class ByteTable:
    """Holds the bytes of every token of a byte-level BPE tokenizer."""

    def __init__(self, tokens: list[bytes]) -> None:
        self._tokens = tokens

    @staticmethod
    def of(backend: Any) -> ByteTable | None:
        """Return a tokenizer's table; None if its decoder is not plain byte-level."""
        decoder = json.loads(backend.to_str()).get("decoder") or {}
        if decoder.get("type") == "Sequence" and len(decoder["decoders"]) == 1:
            decoder = decoder["decoders"][0]
        if decoder.get("type") != "ByteLevel":
            return None
        vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        byte_of = byte_characters()
        tokens = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for token, token_id in vocabulary.items():
            tokens[token_id] = _token_bytes(token, byte_of)
        return ByteTable(tokens)

    def __getitem__(self, token_id: int) -> bytes:
        """Return a token's bytes; none for an id without a token, as in a padded vocabulary."""
        return self._tokens[token_id] if 0 <= token_id < len(self._tokens) else b""


class Utf8Detokenizer:
    """Decodes tokens of byte-level tokenizers."""

    def __init__(self, table: ByteTable, skipped_ids: frozenset[int]) -> None:
        self._table = table
        self._skipped_ids = skipped_ids
        # Of a character whose last bytes have not come.
        self._first_bytes = b""

    def feed(self, ids: Sequence[int]) -> str:
        table, skipped = self._table, self._skipped_ids
        data = self._first_bytes + b"".join([table[i] for i in ids if i not in skipped])
        text, num_decoded = codecs.utf_8_decode(data, "replace")
        self._first_bytes = data[num_decoded:]
        return text

    def flush(self) -> str:
        text, _ = codecs.utf_8_decode(self._first_bytes, "replace", True)
        self._first_bytes = b""
        return text


class PrefixDetokenizer:
    """Decodes tokens of all other tokenizers.

    It is exact except in one case: when one byte token of a run is malformed, a byte-fallback
    decoder turns the whole run into U+FFFD, even the part that was already shown.
    """

    # After this many tokens without a certain character, the text is shown as it is.
    MAX_PENDING = 64
    # Number of U+FFFD that an unfinished character may decode to: three bytes of four.
    MAX_UNFINISHED = 3

    def __init__(self, backend: Any, skipped_ids: frozenset[int]) -> None:
        self._backend = backend
        self._skipped_ids = skipped_ids
        # The window: tokens whose text was shown, as context, then tokens that wait.
        self._context: list[int] = []
        self._pending: list[int] = []
        self._num_shown = 0

    def feed(self, ids: Sequence[int]) -> str:
        pieces = []
        for token_id in ids:
            if token_id not in self._skipped_ids:
                self._pending.append(token_id)
                pieces.append(self._take(final=len(self._pending) >= self.MAX_PENDING))
        return "".join(pieces)

    def flush(self) -> str:
        return self._take(final=True) if self._pending else ""

    def _take(self, *, final: bool) -> str:
        """Return the window's new text; move the window when no token waits."""
        before = self._decode(self._context)
        text = self._decode([*self._context, *self._pending])
        fresh = text[len(before) :] if text.startswith(before) else self._decode(self._pending)
        unfinished = len(fresh) - len(fresh.rstrip(REPLACEMENT))
        shown = fresh[self._num_shown :]
        if unfinished and not final:
            # A context without text belongs to ``fresh``. For example, decoders strip a first
            # space; if it is a byte token, it stays malformed as long as its run of bytes.
            waiting = self.MAX_UNFINISHED + (0 if before else len(self._context))
            certain = len(fresh) - min(unfinished, waiting)
            shown = fresh[self._num_shown : max(certain, self._num_shown)]
            self._num_shown = max(certain, self._num_shown)
            return shown
        self._context, self._pending, self._num_shown = self._pending, [], 0
        return shown

    def _decode(self, ids: list[int]) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=False) if ids else ""
        return text


def _token_bytes(token: str, byte_of: dict[str, int]) -> bytes:
    """Return the bytes of one vocabulary entry; an added token outside the table is plain text."""
    if all(character in byte_of for character in token):
        return bytes(byte_of[character] for character in token)
    return token.encode()
