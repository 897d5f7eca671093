"""Encode and decode the texts of requests, long ones in threads."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from foretoken import limits
from foretoken.errors import InvalidRequestError
from gateway.generation_request import Prompt
from gateway.messages import VerifierInfo
from gateway.tokenizer import SHORT_TEXT_CHARS, SHORT_TEXT_TOKENS, Tokenizer

# More words that an output must not contain are encoded in a thread.
SHORT_BAD_WORDS = 16
# Leave as many processors to the event loop and the verifier.
MAX_TEXT_THREADS = max(1, (os.cpu_count() or 1) // 2)
ResultT = TypeVar("ResultT")


class LengthCheck(Protocol):
    """Raises InvalidRequestError for a text of too many tokens.

    ``at_least``: the text may have more than ``num_tokens``.
    """

    def __call__(self, num_tokens: int, /, *, at_least: bool = False) -> None: ...


class Texts:
    """Turns texts into token ids that fit the model, and back."""

    def __init__(self, tokenizer: Tokenizer, info: Callable[[], Awaitable[VerifierInfo]]) -> None:
        """``info``: returns a verifier's latest figures."""
        self._tokenizer, self._info = tokenizer, info
        self._threads = ThreadPoolExecutor(MAX_TEXT_THREADS, "text")

    async def in_thread(self, work: Callable[[], ResultT]) -> ResultT:
        """Run ``work`` on a long text in one of a few threads, and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def encode(
        self, text: str, *, field: str = "prompt", add_special_tokens: bool = True, keep_last: int | None = None
    ) -> Prompt:
        """Return a prompt's text with its token ids, at most the last ``keep_last``.

        Raises ContextLengthError naming ``field`` if it is too long.
        """
        max_model_len = (await self._info()).max_model_len

        def check(num_tokens: int, /, *, at_least: bool = False) -> None:
            if keep_last is None:
                limits.check_prompt_length(field, num_tokens, max_model_len, at_least=at_least)
            else:
                limits.check_tokens(field, num_tokens, max(limits.MAX_TOKENIZED_IDS, max_model_len))

        check(self._tokenizer.min_tokens(len(text)), at_least=True)
        limits.check_prompt_size(field, len(text), max_model_len)
        limits.check_unicode(field, text)
        limits.check_prompt_size(field, len(text), max_model_len, num_bytes=len(text.encode()))
        ids = await self._encode(text, check, add_special_tokens=add_special_tokens)
        return cut_prompt(Prompt(ids, text), keep_last)

    async def num_kept(self, truncate: int | None, max_tokens: int) -> int | None:
        """Return how many of a prompt's last tokens ``truncate_prompt_tokens`` keeps; None: all.

        -1 keeps what the context has room for beside ``max_tokens``, or beside one token.

        Raises InvalidRequestError for 0, or a number out of range.
        """
        if truncate is None:
            return None
        field, max_model_len = "truncate_prompt_tokens", (await self._info()).max_model_len
        limits.check_number(field, truncate, limits.Range(-1, max_model_len - 1))
        if truncate == 0:
            raise InvalidRequestError(f"{field} must not be 0: a prompt has at least one token", field=field)
        return truncate if truncate > 0 else max_model_len - (max_tokens if max_tokens < max_model_len else 1)

    async def encode_bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences of texts that an output must not contain.

        As in vLLM each text is encoded alone, and after a space if that changes its first token and
        not the number of tokens.
        """
        if not words:
            return ()
        encode = functools.partial(_bad_sequences, self._tokenizer, words)
        return encode() if len(words) <= SHORT_BAD_WORDS else await self.in_thread(encode)

    async def encode_prediction(self, text: str, *, field: str) -> tuple[int, ...]:
        """Return the token ids of the output that the client expects.

        Raises InvalidRequestError naming ``field``, or "prediction" for too many tokens.
        """
        if not text:
            return ()
        max_model_len = (await self._info()).max_model_len
        check = functools.partial(limits.check_prediction_length, "prediction", max_model_len=max_model_len)
        return await self.token_ids(text, check, field=field)

    async def token_ids(
        self, text: str, check: LengthCheck, *, field: str, add_special_tokens: bool = False
    ) -> tuple[int, ...]:
        """Return the token ids of a text. Raises InvalidRequestError naming ``field``.

        ``check`` gets the fewest tokens that the text can have, then their number. So a text that
        can never fit is refused before encoding.
        """
        limits.check_text(field, text, limits.MAX_PROMPT_CHARS)
        check(self._tokenizer.min_tokens(len(text)), at_least=True)
        limits.check_bytes(field, text, limits.MAX_PROMPT_BYTES)
        return await self._encode(text, check, add_special_tokens=add_special_tokens)

    async def _encode(self, text: str, check: LengthCheck, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Return the token ids of a text that is not too large to be encoded."""

        def encode() -> tuple[int, ...]:
            return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens, check=check))

        return encode() if len(text) <= SHORT_TEXT_CHARS else await self.in_thread(encode)

    async def tokenize(self, text: str, *, field: str, add_special_tokens: bool = False) -> tuple[int, ...]:
        """Return the token ids of a text that may be longer than the context.

        Raises InvalidRequestError naming ``field`` for a text that can never fit.
        """
        max_model_len = (await self._info()).max_model_len

        def check(num_tokens: int, /, *, at_least: bool = False) -> None:
            if at_least:
                limits.check_prompt_length(field, num_tokens, max_model_len, at_least=True)
            limits.check_tokens(field, num_tokens, limits.MAX_TOKENIZED_IDS)

        return await self.token_ids(text, check, field=field, add_special_tokens=add_special_tokens)

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids."""
        decode = functools.partial(self._tokenizer.decode, ids, skip_special_tokens=skip_special_tokens)
        return decode() if len(ids) <= SHORT_TEXT_TOKENS else await self.in_thread(decode)


def cut_prompt(prompt: Prompt, keep_last: int | None) -> Prompt:
    """Return the prompt's last ``keep_last`` tokens; None: all.

    The text of a cut prompt is unknown.
    """
    if keep_last is None or len(prompt.ids) <= keep_last:
        return prompt
    return Prompt(prompt.ids[-keep_last:])


def _bad_sequences(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    sequences = []
    for word in words:
        alone, spaced = (
            tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (word.lstrip(), " " + word.lstrip())
        )
        if alone:
            sequences.append(alone)
        if spaced and (not alone or (spaced[0] != alone[0] and len(spaced) == len(alone))):
            sequences.append(spaced)
    return tuple(dict.fromkeys(sequences))
