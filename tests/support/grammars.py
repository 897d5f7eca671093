"""A vocabulary of 54 tokens that spells small JSON values, its tokenizer.json, and grammars."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from foretoken.sampling import Grammar
from verifier_svc.sampling.grammar import Matcher, Vocabulary, compile_grammar

END = 7
EOS = frozenset({END})
# Token ids of a prompt.
PROMPT = (3, 1, 4)
_TEXTS = [
    *'{}[]":,',
    None,  # the end of the text: id 7
    *"0123456789",
    *" \n-.",
    *"abcdeflnrstuxyz",
    *('{"', '":', '",', '"}', "ab", "cd", "true", "false", "null", "a1", "12", ', "', "]}", "xyz", "}}", "99", '"a"'),
]
VOCAB = len(_TEXTS)


def write_tokenizer(folder: Path) -> Path:
    """Write a byte-level tokenizer.json of these tokens; return ``folder``."""
    alphabet = {chr(byte): chr(byte) for byte in range(33, 127)} | {" ": "Ġ", "\n": "Ċ"}
    vocab = {
        "<end>" if text is None else "".join(alphabet[char] for char in text): number
        for number, text in enumerate(_TEXTS)
    }
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    return folder


def vocabulary(folder: Path) -> Vocabulary:
    return Vocabulary(write_tokenizer(folder), vocab_limit=VOCAB, eos_ids=frozenset({END}))


def text_of(token_ids: list[int]) -> str:
    texts = [_TEXTS[token_id] for token_id in token_ids]
    assert None not in texts, "the end of the text is in the output"
    return "".join(text or "" for text in texts)


def ids_of(*texts: str) -> list[int]:
    return [_TEXTS.index(text) for text in texts]


def schema(value: object) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


def regex(text: str) -> Grammar:
    return Grammar("regex", text)


def matcher(grammar: Grammar, vocabulary: Vocabulary) -> Matcher:
    return compile_grammar(grammar, vocabulary)


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    x: bool
    y: int = Field(ge=0, le=999)


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    a: int = Field(ge=-99, le=99)
    b: list[Inner] = Field(max_length=2)
    c: str = Field(pattern="^[a-f]{1,4}$")


RECORD = schema(Record.model_json_schema())
