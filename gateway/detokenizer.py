"""Incremental decoding: token ids in, text out, never half a character.

Two ways. Byte-level BPE (Llama 3, Qwen, GPT-2) maps each token to bytes, so an incremental UTF-8 decoder is exact and
costs about a microsecond a token. All other decoders (SentencePiece with byte fallback) go through the tokenizer's
own ``decode`` over a short window, and show what is new in its text.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from typing import Any, Protocol

from gateway.token_length import byte_characters

REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Decodes one output. The pieces of all calls, joined, are the tokenizer's ``decode`` of all ids."""

    def feed(self, ids: Sequence[int]) -> str:
        """The text that became certain with ``ids``; bytes of an unfinished character wait."""
        ...

    def flush(self) -> str:
        """What still waits, at the end of the output: bytes of an unfinished character become U+FFFD."""
        ...


class ByteTable:
    """The bytes of every token of a byte-level BPE tokenizer."""

    def __init__(self, tokens: list[bytes]) -> None:
        self._tokens = tokens

    @staticmethod
    def of(backend: Any) -> ByteTable | None:
        """The table of a ``tokenizers.Tokenizer``; None if its decoder is not plain byte-level."""
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
        """Empty for an id without a token: a model's vocabulary may be padded."""
        return self._tokens[token_id] if 0 <= token_id < len(self._tokens) else b""


class Utf8Detokenizer:
    """Detokenizer of byte-level tokenizers."""

    def __init__(self, table: ByteTable, skipped_ids: frozenset[int]) -> None:
        self._table = table
        self._skipped_ids = skipped_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Sequence[int]) -> str:
        table, skipped = self._table, self._skipped_ids
        return self._decoder.decode(b"".join([table[i] for i in ids if i not in skipped]))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class PrefixDetokenizer:
    """Detokenizer of all other tokenizers.

    Exact but for one case: byte-fallback decoders turn a whole run of byte tokens into U+FFFD once any of them is
    malformed, also the part that was already shown.
    """

    # The longest run of tokens without a certain character; beyond it, what there is is shown.
    MAX_PENDING = 64
    # U+FFFD that an unfinished character may decode to: three bytes of four.
    MAX_UNFINISHED = 3

    def __init__(self, backend: Any, skipped_ids: frozenset[int]) -> None:
        self._backend = backend
        self._skipped_ids = skipped_ids
        # The window: tokens whose text was shown (context for the ones after them), then those that wait.
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
        """New text of the window; moves the window on when nothing is left to wait for."""
        before = self._decode(self._context)
        text = self._decode([*self._context, *self._pending])
        fresh = text[len(before) :] if text.startswith(before) else self._decode(self._pending)
        unfinished = len(fresh) - len(fresh.rstrip(REPLACEMENT))
        shown = fresh[self._num_shown :]
        if unfinished and not final:
            # Context without a text is within ``fresh``: a first space, which decoders strip, that comes as a byte is
            # malformed as long as the run of bytes is.
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
    """Bytes of one vocabulary entry; an added token that is not written in the table stands for its own text."""
    if all(character in byte_of for character in token):
        return bytes(byte_of[character] for character in token)
    return token.encode()
