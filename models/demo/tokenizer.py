"""The demo tokenizer: byte-level BPE for code, with its special tokens and chat template.

Before BPE the text is split into pieces: runs of line ends; runs of two or more blanks (indentation
stays whole, so a prompt may end in it); up to three digits; an identifier part with at most one
space before it; punctuation likewise; one leftover blank. There is no normaliser and no clean-up:
``decode(encode(text)) == text``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 8_192
CONTEXT_LENGTH = 2_048
END_OF_TEXT = "<|endoftext|>"
USER, ASSISTANT, END_OF_TURN = "<|user|>", "<|assistant|>", "<|end|>"
RESERVED = tuple(f"<|reserved_{index}|>" for index in range(12))
SPECIAL_TOKENS = (END_OF_TEXT, USER, ASSISTANT, END_OF_TURN, *RESERVED)

PIECE_PATTERN = r"[\r\n]+|[^\S\r\n]{2,}|\p{N}{1,3}| ?[\p{L}_]+| ?[^\s\p{L}\p{N}_]+|\s"

# Without tools and calls, the text is as the demo models were trained. They never saw a tool, whose
# form here is Hermes'.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}{{ '<|user|># Tools\n\n<tools>\n' }}"
    "{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}"
    "{{ '</tools>\n\nTo call one, reply with its name and arguments:\n<tool_call>\n"
    '{"name": <name>, "arguments": <object>}\n</tool_call><|end|>'
    "' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|assistant|>' if message['role'] == 'assistant' else '<|user|>' }}"
    "{% if message['role'] == 'tool' %}"
    "{{ '<tool_response>\n' }}{{ message['content'] }}{{ '\n</tool_response>' }}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '\n' if message['content'] or not loop.first }}{{ '<tool_call>\n' }}"
    "{{ {'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson }}"
    "{{ '\n</tool_call>' }}{% endfor %}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Learn the merges from ``texts``. ``SPECIAL_TOKENS`` get the first ids, in their order."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECE_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=32,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``tokenizer.json`` and the two configuration files that ``transformers`` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT_LENGTH,
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    names = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    (folder / "special_tokens_map.json").write_text(json.dumps(names, indent=2) + "\n")


def load_for_corpus(file: Path) -> Tokenizer:
    """Load the tokenizer for training: the *name* of a special token in a file is ordinary text."""
    tokenizer: Tokenizer = Tokenizer.from_file(str(file))
    tokenizer.encode_special_tokens = True
    return tokenizer
