"""The server that the scripts speak to, and its answers as a plain HTTP client gets them."""

from __future__ import annotations

import json
import os
import urllib.request
from typing import Any

URL = os.environ["FORETOKEN_URL"]
BASE_URL = f"{URL}/v1"
GRPC_ADDRESS = os.environ["FORETOKEN_GRPC_ADDRESS"]
MODEL = os.environ["FORETOKEN_MODEL"]
TOKENIZER = os.environ["FORETOKEN_TOKENIZER"]
KEY = "none"
QUESTION = "Write a function that adds two numbers."
MESSAGES = [{"role": "user", "content": QUESTION}]
# Bounded, so that any model ends its arguments: the grammar admits nothing longer.
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Berlin", "Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Get a forecast.", "parameters": PARAMETERS, "strict": True},
}
TOO_LONG = "word " * 200_000


def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a JSON body."""
    request = urllib.request.Request(
        URL + path, data=json.dumps(body).encode(), headers={"content-type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=600) as answer:
        value: dict[str, Any] = json.load(answer)
    return value


def chat_text(max_tokens: int) -> str:
    """Return the greedy answer to QUESTION."""
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": max_tokens, "temperature": 0}
    text: str = post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
    return text


def is_forecast(arguments: Any) -> bool:
    """Return whether these are arguments that PARAMETERS admits."""
    return (
        isinstance(arguments, dict)
        and arguments.keys() == {"city", "days"}
        and arguments["city"] in {"Berlin", "Paris", "Rome"}
        and arguments["days"] in range(1, 8)
    )
