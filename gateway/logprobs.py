"""Build logprobs in OpenAI's two shapes: columns for completions, entries for chats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foretoken.results import TokenLogprobs
from gateway.detokenizer import REPLACEMENT, Detokenizer
from gateway.tokenizer import Tokenizer


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Return a chat's ``choices[].logprobs``: one entry per token, with its bytes."""
    return {
        "content": [
            {
                **_chat_token(tokenizer, entry.token_id, entry.logprob),
                "top_logprobs": [_chat_token(tokenizer, token_id, logprob) for token_id, logprob in entry.top],
            }
            for entry in entries
        ],
        "refusal": None,
    }


class CompletionLogprobs:
    """Builds ``choices[].logprobs`` of one completion, chunk by chunk.

    Offsets count from the start of the whole text.
    """

    def __init__(self, tokenizer: Tokenizer, detokenizer: Detokenizer) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer
        self._offset = 0

    def take(
        self,
        entries: Sequence[TokenLogprobs],
        prompt_ids: Sequence[int] = (),
        prompt_entries: Sequence[TokenLogprobs] = (),
    ) -> dict[str, Any]:
        """Return columns for the next tokens; the first echoed prompt token has no logprob."""
        columns: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        known = {len(prompt_ids) - len(prompt_entries) + i: entry for i, entry in enumerate(prompt_entries)}
        for position, token_id in enumerate(prompt_ids):
            self._add(columns, token_id, known.get(position))
        for entry in entries:
            self._add(columns, entry.token_id, entry)
        return columns

    def _add(self, columns: dict[str, list[Any]], token_id: int, entry: TokenLogprobs | None) -> None:
        columns["text_offset"].append(self._offset)
        columns["tokens"].append(token_name(self._tokenizer, token_id))
        columns["token_logprobs"].append(None if entry is None else entry.logprob)
        columns["top_logprobs"].append(None if entry is None else self._top(entry))
        self._offset += len(self._detokenizer.feed((token_id,)))

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """Return the best tokens and the sampled one; of two with the same text, the likelier."""
        top: dict[str, float] = {}
        for token_id, logprob in ((entry.token_id, entry.logprob), *entry.top):
            name = token_name(self._tokenizer, token_id)
            top[name] = max(logprob, top.get(name, logprob))
        return top


def prompt_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], top_k: int) -> list[dict[str, Any] | None]:
    """Return vLLM's ``prompt_logprobs``: by position, the best tokens and the prompt's own.

    The first token has none.
    """
    found: list[dict[str, Any] | None] = [None]
    for entry in entries:
        ranked = [(entry.rank, entry.token_id, entry.logprob)]
        ranked += [(rank, token_id, logprob) for rank, (token_id, logprob) in enumerate(entry.top[:top_k], 1)]
        found.append(
            {
                str(token_id): {
                    "logprob": logprob,
                    "rank": rank,
                    "decoded_token": tokenizer.token_text(token_id)[0],
                }
                for rank, token_id, logprob in reversed(ranked)
            }
        )
    return found


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """Return a token's text, or ``bytes:\\xe2\\x82`` for a part of a character."""
    text, raw = tokenizer.token_text(token_id)
    if REPLACEMENT in text:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
    return text


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    text, raw = tokenizer.token_text(token_id)
    return {"token": text, "logprob": logprob, "bytes": list(raw)}
