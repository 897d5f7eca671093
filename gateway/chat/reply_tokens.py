"""Read an output's deltas token by token: pieces, their logprobs, the reasoning's length."""

from __future__ import annotations

from collections.abc import Iterator

from foretoken.results import TokenLogprobs
from gateway.chat.chat_reply import ChatReply
from gateway.chat.pieces import ReplyPieces
from gateway.output import Delta


class ReplyTokens:
    """Reads one output. Its pieces come in the order of the text, however deltas split it."""

    def __init__(self, reply: ChatReply) -> None:
        self._reader = None if reply.is_plain else reply.reader()
        self._logprobs: list[TokenLogprobs] = []
        self.num_reasoning_tokens = 0

    def read(self, delta: Delta) -> Iterator[tuple[ReplyPieces, list[TokenLogprobs]]]:
        """Yield what a delta adds to the reply, each with its tokens' logprobs, if any.

        Text that waits comes with the logprobs of its tokens when it is certain.
        """
        if self._reader is None:
            self._logprobs += delta.logprobs
            if delta.text:
                yield ReplyPieces(delta.text), self.take_logprobs()
            return
        num_chars = 0
        for number, text in enumerate(delta.token_texts):
            num_chars += len(text)
            self._logprobs += delta.logprobs[number : number + 1]
            if pieces := self._reader.feed(text, finished=False):
                yield pieces, self.take_logprobs()
            self.num_reasoning_tokens += self._reader.is_reasoning
        if pieces := self._reader.feed(delta.text[num_chars:], finished=delta.finished):
            yield pieces, self.take_logprobs()

    def take_logprobs(self) -> list[TokenLogprobs]:
        """Return the logprobs of the tokens since the last piece."""
        logprobs, self._logprobs = self._logprobs, []
        return logprobs
