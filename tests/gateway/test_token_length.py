"""The most characters that a token can stand for, by the tokenizer's parts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from gateway.token_length import COMPOSED_CHARS, GENEROUS_CHARS, max_token_chars
from gateway.tokenizer import Tokenizer
from tests.gateway.conftest import LONG_TOKEN

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
FALLBACK = {f"<0x{byte:02X}>": byte for byte in range(256)}


def byte_level(**parts: Any) -> Backend:
    """Return a byte-level BPE tokenizer whose longest token has 3 characters."""
    vocabulary = {character: i for i, character in enumerate([*BYTES, "aa", "aaa"])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[("a", "a"), ("aa", "a")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


def test_the_longest_token_bounds() -> None:
    assert max_token_chars(byte_level()) == 3
    backend = byte_level()
    backend.add_tokens([AddedToken("a token", normalized=False)])
    assert max_token_chars(backend) == len("a token")


@pytest.mark.parametrize(
    ("normalizer", "most"),
    [
        (normalizers.NFC(), 3 * COMPOSED_CHARS),
        (normalizers.NFKC(), 3 * COMPOSED_CHARS),
        (normalizers.NFD(), 3),
        (normalizers.Lowercase(), 3),
        (normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()]), 3 * COMPOSED_CHARS),
        (normalizers.Replace(" ", "_"), 3),
        (normalizers.Replace("abc", "xx"), 6),
        (normalizers.Replace("abc", ""), GENEROUS_CHARS),
        (normalizers.Replace(Regex(" +"), " "), GENEROUS_CHARS),
        (normalizers.Strip(), GENEROUS_CHARS),
        (normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]), GENEROUS_CHARS),
        (normalizers.BertNormalizer(), GENEROUS_CHARS),
    ],
)
def test_normalizers(normalizer: Any, most: int) -> None:
    assert max_token_chars(byte_level(normalizer=normalizer)) == most


@pytest.mark.parametrize(
    ("first", "most"),
    [
        (pre_tokenizers.Split(Regex(r"\s+"), "isolated"), 3),
        (pre_tokenizers.Digits(), 3),
        (pre_tokenizers.Split(" ", "removed"), GENEROUS_CHARS),
        (pre_tokenizers.Whitespace(), GENEROUS_CHARS),
    ],
)
def test_pre_tokenizers(first: Any, most: int) -> None:
    both = pre_tokenizers.Sequence([first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    assert max_token_chars(byte_level(pre_tokenizer=both)) == most


def test_tokens_that_take_space_along_and_models_that_merge_the_unknown() -> None:
    backend = byte_level()
    backend.add_tokens([AddedToken("<x>", rstrip=True)])
    assert max_token_chars(backend) == GENEROUS_CHARS
    assert max_token_chars(Backend(models.BPE(vocab={"a": 0}, merges=[]))) == GENEROUS_CHARS
    assert max_token_chars(byte_level(model=models.BPE(vocab={"a": 0}, merges=[]))) == GENEROUS_CHARS
    assert max_token_chars(Backend(models.WordLevel(vocab={"a": 0}, unk_token="a"))) == GENEROUS_CHARS
    complete = models.BPE(vocab={**FALLBACK, "abcdefgh": 256}, merges=[], byte_fallback=True, fuse_unk=True)
    assert max_token_chars(Backend(complete)) == 8
    unigram = models.Unigram([("<unk>", 0.0), *((byte, -1.0) for byte in FALLBACK)], 0, True)
    assert max_token_chars(Backend(unigram)) == 6
    assert max_token_chars(Backend(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0, False))) == GENEROUS_CHARS


@given(
    text=st.text(st.one_of(st.sampled_from("aaa ẛ̣가ᾂéK"), st.characters(codec="utf-8")), max_size=80),
    normalizer=st.sampled_from([None, normalizers.NFC(), normalizers.NFKC(), normalizers.NFD()]),
)
def test_no_text_has_fewer_tokens(text: str, normalizer: Any) -> None:
    backend = byte_level() if normalizer is None else byte_level(normalizer=normalizer)
    assert len(backend.encode(text).ids) * max_token_chars(backend) >= len(text)


def test_fewest_tokens_of_a_text(tokenizer: Tokenizer) -> None:
    length = len(LONG_TOKEN)
    assert [tokenizer.min_tokens(chars) for chars in (0, 1, length, length + 1)] == [0, 1, 1, 2]
