"""Which tokens of a model's vocabulary a grammar can allow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from foretoken.errors import InvalidRequestError
from tests.support.grammars import END, EOS, VOCAB, regex
from verifier_svc.sampling.grammar import Vocabulary, compile_grammar


def test_special_tokens_are_no_text(vocab: Vocabulary) -> None:
    allowed = np.unpackbits(compile_grammar(regex("(?s).*"), vocab).allowed, bitorder="little")
    assert allowed.sum() == VOCAB - 1 and not allowed[END]


def test_ids_from_the_limit_on_are_never_allowed(tmp_path: Path, vocab: Vocabulary) -> None:
    short = Vocabulary(vocab.path.parent, vocab_limit=43, eos_ids=frozenset({END, 45}))
    allowed = np.unpackbits(compile_grammar(regex("(?s).*"), short).allowed, bitorder="little")
    assert len(allowed) == 48 and allowed.sum() == 42 and not allowed[43:].any()


def test_byte_fallback_tokens_are_bytes(tmp_path: Path) -> None:
    """SentencePiece writes U+2581 for spaces, and byte names for text without a token."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁ab", "ab", "é"]
    backend = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    model = Vocabulary(tmp_path, vocab_limit=len(pieces), eos_ids=frozenset({1}))
    matcher = compile_grammar(regex("x( ab|é)?"), model)
    allowed = np.flatnonzero(np.unpackbits(matcher.allowed, bitorder="little"))
    assert allowed.tolist() == [2 + ord("x")]
    assert matcher.advance((2 + ord("x"),)) and matcher.is_accepting
    allowed = np.flatnonzero(np.unpackbits(matcher.allowed, bitorder="little"))
    assert [pieces[token_id] for token_id in allowed] == ["<0x20>", "<0xC3>", "▁", "▁ab", "é"]
    assert matcher.advance((2 + 0xC3, 2 + 0xA9)) and matcher.is_accepting and not matcher.allowed.any()


def test_a_model_without_a_usable_tokenizer_serves_no_grammar(tmp_path: Path, vocab: Vocabulary) -> None:
    with pytest.raises(InvalidRequestError, match="needs a tokenizer"):
        Vocabulary(tmp_path, vocab_limit=8, eos_ids=EOS)
    with pytest.raises(InvalidRequestError, match="knows all"):
        Vocabulary(vocab.path.parent, vocab_limit=VOCAB + 1, eos_ids=EOS)
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InvalidRequestError, match="cannot use"):
        Vocabulary(tmp_path, vocab_limit=8, eos_ids=EOS)
