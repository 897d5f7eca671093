"""Convert text to token ids and back, as a checkpoint's ``tokenizer.json`` defines it.

It never runs code from a checkpoint and does not import torch, as transformers' AutoTokenizer
would.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, nodes
from transformers import PreTrainedTokenizerFast

from foretoken.errors import CheckpointError, ConfigError, InvalidRequestError
from foretoken.json_file import read_object
from gateway.config import read_chat_template
from gateway.detokenizer import ByteTable, Detokenizer, PrefixDetokenizer, Utf8Detokenizer
from gateway.token_length import max_token_chars

# Arguments of apply_chat_template, which a request must not set as variables of the template.
# Documents are only a variable.
RESERVED_TEMPLATE_KWARGS = frozenset(
    inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters.keys() | {"messages"}
) - {"documents"}
# Up to these sizes a call takes a few milliseconds, so an event loop may make it.
SHORT_TEXT_CHARS = 4096
SHORT_TEXT_TOKENS = 4096
# Words whose tokens a model of the library keeps; it drops none. Encoding code is as fast with
# these as with its default of 10,000 (1.6 million tokens a second), and text that is no language,
# which fills them with words that never come again, takes less memory.
KEPT_WORDS = 4000
_MARKING_TAGS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")


class Tokenizer:
    """A checkpoint's tokenizer. Its methods may be called from several threads.

    ``encode`` and ``decode`` release the GIL for all but short inputs, so that an event loop keeps
    running. Only the library's batch calls do that. They wait for a thread of the library's pool,
    so short inputs, which may come from an event loop, use the other calls.
    """

    def __init__(self, folder: Path, chat_template: Path | None = None) -> None:
        """Load the tokenizer.

        Raises CheckpointError, naming the file, for an unusable tokenizer, and ConfigError for an
        unreadable chat template.
        """
        self._hf = _load(folder)
        self._backend = self._hf.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        # Models without such a cache lack the method.
        if hasattr(self._backend.model, "_resize_cache"):
            self._backend.model._resize_cache(KEPT_WORDS)
        if chat_template is not None:
            self._hf.chat_template = read_chat_template(chat_template)
            self._check_template(chat_template)
        self.has_chat_template = bool(self._hf.chat_template)
        added = self._backend.get_added_tokens_decoder()
        # Special tokens by their text.
        self.special_ids: dict[str, int] = {token.content: i for i, token in added.items() if token.special}
        self._special = frozenset(self.special_ids.values())
        self._bytes = ByteTable.of(self._backend)
        self._max_token_chars = max_token_chars(self._backend)

    def _check_template(self, path: Path) -> None:
        """Raise ConfigError for a template with a syntax error."""
        try:
            self._hf.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
        except TemplateSyntaxError as error:
            raise ConfigError(f"--chat-template: {path}, line {error.lineno}: {error.message}") from error
        except Exception:
            # A template is a program. Any other error is about this message, as in render_chat.
            return

    @property
    def vocab_size(self) -> int:
        """Number of ids with a token; the model's vocabulary may have padding after them."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def chat_template_text(self) -> str:
        """The chat template, or the variants that a checkpoint names, joined; empty if none."""
        template = self._hf.chat_template or ""
        return template if isinstance(template, str) else "\n".join(map(str, template.values()))

    @property
    def takes_tools(self) -> bool:
        """Return whether the chat template reads tools, so that the model can see them."""
        # Tags of transformers' own, which only mark text, would need its environment.
        text = _MARKING_TAGS.sub("", self.chat_template_text)
        try:
            template = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
        except TemplateSyntaxError:
            return False
        return any(name.name == "tools" for name in template.find_all(nodes.Name))

    def min_tokens(self, num_chars: int) -> int:
        """Return the fewest tokens that a text of ``num_chars`` characters can have."""
        return -(-num_chars // self._max_token_chars)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, check: Callable[[int], None] | None = None
    ) -> list[int]:
        """Return the token ids of ``text``, with or without the special tokens added by default.

        ``check`` is called with their number before the list is made, and may raise.
        """
        if len(text) <= SHORT_TEXT_CHARS:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        else:
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        if check is not None:
            check(len(encoding))
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``. Incomplete UTF-8 becomes U+FFFD."""
        ids = list(ids)
        text: str
        if len(ids) <= SHORT_TEXT_TOKENS:
            text = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        else:
            (text,) = self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return text

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt that the chat template renders; encode it without special tokens.

        Raises InvalidRequestError if there is no template or the template refuses the messages.
        """
        if not self.has_chat_template:
            raise InvalidRequestError(
                "this model has no chat template; start the server with --chat-template FILE, or use /v1/completions",
                field="messages",
            )
        try:
            text = self._hf.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(template_kwargs or {}),
            )
        except Exception as error:
            # A template is a program: any error is about the messages that it received.
            raise InvalidRequestError(f"the chat template refused the messages: {error}", field="messages") from error
        return str(text)

    def detokenizer(self, *, skip_special_tokens: bool = True, kept_ids: frozenset[int] = frozenset()) -> Detokenizer:
        """Return a new incremental decoder for one output; it never skips ``kept_ids``."""
        skipped = self._special - kept_ids if skip_special_tokens else frozenset()
        if self._bytes is not None:
            return Utf8Detokenizer(self._bytes, skipped)
        return PrefixDetokenizer(self._backend, skipped)

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """Return one token's text and bytes; the text of a part of a character holds U+FFFD."""
        if self._bytes is not None:
            raw = self._bytes[token_id]
            return raw.decode("utf-8", "replace"), raw
        text = self.decode((token_id,), skip_special_tokens=False)
        return text, text.encode()

    def describe(self) -> dict[str, Any]:
        """Return the answer of ``/tokenizer_info``: special tokens, chat template and class."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        return {
            "tokenizer_class": type(self._hf).__name__,
            "vocab_size": self.vocab_size,
            "chat_template": self._hf.chat_template,
            **{name: getattr(self._hf, name) for name in names},
        }


def _load(folder: Path) -> Any:
    """Return transformers' wrapper of ``tokenizer.json``. Any: the library is untyped."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{path}: not found; foretoken needs a tokenizer in this format")
    config_path = folder / "tokenizer_config.json"
    if "auto_map" in (read_object(config_path) or {}):
        raise CheckpointError(f"{config_path}: auto_map asks to run the checkpoint's code, which is refused")
    try:
        return PreTrainedTokenizerFast.from_pretrained(
            str(folder), local_files_only=True, clean_up_tokenization_spaces=False
        )
    except Exception as error:
        # The library raises bare Exceptions for malformed files.
        raise CheckpointError(f"{path}: cannot be loaded: {error}") from error
