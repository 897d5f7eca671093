"""Encoding, chat templates, and incremental decoding equal to the tokenizer's own decode."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from foretoken.errors import CheckpointError, ConfigError, InvalidRequestError
from gateway.detokenizer import Detokenizer, PrefixDetokenizer
from gateway.tokenizer import Tokenizer
from tests.gateway.conftest import train_tokenizer

SPLITS = st.lists(st.integers(1, 5), max_size=40)


def pieces(detokenizer: Detokenizer, ids: list[int], split: list[int]) -> list[str]:
    """Return the texts of ``ids`` fed in runs as in ``split``, then one by one, then the flush."""
    texts = []
    while ids:
        length, split = (split[0], split[1:]) if split else (1, [])
        texts.append(detokenizer.feed(ids[:length]))
        ids = ids[length:]
    return [*texts, detokenizer.flush()]


@given(data=st.data(), skip=st.booleans(), split=SPLITS)
def test_any_ids_in_any_split_decode_as_a_whole(tokenizer: Tokenizer, data: Any, skip: bool, split: list[int]) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=60))
    texts = pieces(tokenizer.detokenizer(skip_special_tokens=skip), ids, split)
    assert "".join(texts) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(text=st.text(st.characters(codec="utf-8"), max_size=60), split=SPLITS)
def test_text_comes_back_without_half_characters(tokenizer: Tokenizer, text: str, split: list[int]) -> None:
    text = text.replace("\ufffd", "?")
    texts = pieces(tokenizer.detokenizer(skip_special_tokens=False), tokenizer.encode(text), split)
    assert "".join(texts) == text
    assert not any("\ufffd" in piece for piece in texts)
    assert texts[-1] == ""


def test_unfinished_character_waits_and_becomes_a_replacement_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("日")
    assert len(ids) > 1
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.feed(ids[:-1]) == ""
    assert detokenizer.flush() == "\ufffd" == tokenizer.decode(ids[:-1])


def test_special_tokens_are_skipped_only_if_asked(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|end|>b")
    assert tokenizer.detokenizer().feed(ids) == "ab"
    assert tokenizer.detokenizer(skip_special_tokens=False).feed(ids) == "a<|end|>b"


def byte_fallback_backend() -> Backend:
    """Return a SentencePiece-like tokenizer: words with a marked space, bytes for the rest."""
    words = ["<unk>", "<s>", "▁hello", "▁world", "▁", "llo", "a"]
    vocabulary = {word: i for i, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return backend


FALLBACK_BYTES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=3).map(
    lambda text: [7 + byte for byte in text.replace("\ufffd", "?").encode()]
)
FALLBACK_IDS = st.lists(st.one_of(st.integers(1, 6).map(lambda i: [i]), FALLBACK_BYTES), max_size=20)


@given(parts=FALLBACK_IDS, split=SPLITS)
@example(parts=[[7 + 0x20], [7 + byte for byte in "𐀀".encode()]], split=[])
def test_byte_fallback_decodes_as_a_whole(parts: list[list[int]], split: list[int]) -> None:
    backend = byte_fallback_backend()
    ids = [token_id for part in parts for token_id in part]
    texts = pieces(PrefixDetokenizer(backend, frozenset({1})), ids, split)
    assert "".join(texts) == backend.decode(ids, skip_special_tokens=True)
    assert not any("\ufffd" in piece for piece in texts)


def test_byte_fallback_shows_malformed_bytes_in_the_end(tokenizer: Tokenizer) -> None:
    backend = byte_fallback_backend()
    detokenizer = PrefixDetokenizer(backend, frozenset())
    euro = [7 + byte for byte in "€".encode()]
    assert detokenizer.feed([2, *euro[:2]]) == "hello"
    assert detokenizer.flush() == "\ufffd\ufffd"
    # A stream of only malformed bytes neither waits for ever nor grows its window.
    endless = PrefixDetokenizer(backend, frozenset())
    shown = "".join(endless.feed([7 + 0xFF]) for _ in range(1000))
    assert len(shown) >= 1000 - PrefixDetokenizer.MAX_PENDING


def test_encoding_is_that_of_transformers(model_folder: Path, tokenizer: Tokenizer) -> None:
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast.from_pretrained(str(model_folder))
    text = "def add(x): <|end|> é🙂 <tool call>\n"
    assert tokenizer.encode(text) == reference(text).input_ids
    assert tokenizer.encode(text, add_special_tokens=False) == reference(text, add_special_tokens=False).input_ids


def test_chat_template_renders_messages(tokenizer: Tokenizer) -> None:
    text = tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert text == "<|user|>user: hi\nassistant: "
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}], add_generation_prompt=False).endswith("hi\n")


def test_what_a_chat_template_refuses_names_the_messages(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="no tools here") as caught:
        tokenizer.render_chat([{"role": "tool", "content": "hi"}])
    assert caught.value.field == "messages"


def test_template_file_replaces_the_tokenizers_own(tmp_path: Path) -> None:
    folder = train_tokenizer(tmp_path / "m", chat_template=None)
    with pytest.raises(InvalidRequestError, match="--chat-template"):
        Tokenizer(folder).render_chat([{"role": "user", "content": "hi"}])
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[0].content }}!")
    assert Tokenizer(folder, template).render_chat([{"role": "user", "content": "hi"}]) == "hi!"
    with pytest.raises(ConfigError, match="--chat-template"):
        Tokenizer(folder, tmp_path / "missing.jinja")
    template.write_text("{{ messages[0].content }}\n{% bad %}")
    with pytest.raises(ConfigError, match=r"--chat-template: .*chat.jinja, line 2: .*bad"):
        Tokenizer(folder, template)
    template.write_text("{{ raise_exception('no system message') }}")
    assert Tokenizer(folder, template).has_chat_template


def test_unusable_folders_are_refused_by_file_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not found"):
        Tokenizer(tmp_path)
    folder = train_tokenizer(tmp_path / "m")
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({"auto_map": {"AutoTokenizer": ["evil.Evil", None]}}))
    with pytest.raises(CheckpointError, match="auto_map"):
        Tokenizer(folder)
    config.write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        Tokenizer(folder)
    config.unlink()
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer(folder)


def test_the_gateway_imports_no_torch(model_folder: Path) -> None:
    program = (
        "import sys; from pathlib import Path; import gateway.server; from gateway.tokenizer import Tokenizer; "
        f"Tokenizer(Path({str(model_folder)!r})).render_chat([{{'role': 'user', 'content': 'hi'}}]); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# Bytes that glibc has given away and not got back.
HEAP_GROWTH = """
import ctypes, random, string, sys
from pathlib import Path
from gateway.tokenizer import Tokenizer

names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"

class Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

glibc = ctypes.CDLL(None)
glibc.mallinfo2.restype = Mallinfo2
tokenizer, generator = Tokenizer(Path(sys.argv[1])), random.Random(1)
texts = [" ".join("".join(generator.choices(string.ascii_letters, k=12)) for _ in range(400)) for _ in range(40)]
tokenizer.encode(texts[0])
before = glibc.mallinfo2().uordblks
for text in texts:
    tokenizer.encode(text)
print(glibc.mallinfo2().uordblks - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="asks glibc")
def test_few_words_that_never_come_again_are_kept(model_folder: Path) -> None:
    """16,000 random words; as many as the library keeps by default take 5.6 MB."""
    done = subprocess.run(
        [sys.executable, "-c", HEAP_GROWTH, str(model_folder)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 3_000_000
