"""Chat-shaped training samples: a docstring's first line asks, the function's source answers.

They give the chat template a meaning for the demo models. They come from training files only.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

MIN_REQUEST_CHARS, MAX_REQUEST_CHARS = 20, 200
MIN_REPLY_LINES, MAX_REPLY_LINES = 4, 50


@dataclass(frozen=True, slots=True)
class ChatSample:
    """One exchange: a line of prose, and a function at column 0 that ends with a newline."""

    request: str
    reply: str


def chat_samples(text: str) -> Iterator[ChatSample]:
    """Return a source text's samples: top-level functions of moderate length with a docstring."""
    lines = text.split("\n")
    for node in ast.parse(text).body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.end_lineno is None:
            continue
        docstring = ast.get_docstring(node)
        num_lines = node.end_lineno - node.lineno + 1
        if docstring is None or not MIN_REPLY_LINES <= num_lines <= MAX_REPLY_LINES:
            continue
        request = docstring.split("\n", 1)[0].strip()
        if MIN_REQUEST_CHARS <= len(request) <= MAX_REQUEST_CHARS and request.isascii() and request[0].isupper():
            reply = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            yield ChatSample(request, reply + "\n")
