"""Serve POST /tokenize, POST /detokenize and GET /tokenizer_info in vLLM's shapes."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from foretoken import limits
from foretoken.errors import InvalidRequestError
from gateway import http
from gateway.core import GatewayCore
from gateway.fields import Fields, is_id_list, validate
from gateway.openai.chat_request import chat_token_ids
from gateway.openai.request import IGNORED
from gateway.tokenizer import SHORT_TEXT_TOKENS


class TokenizeFields(Fields):
    """Body of POST /tokenize with a text; a body with ``messages`` is parsed as a chat."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeFields(Fields):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: Any = Field(description="A list of token ids.")
    # As in vLLM, all that /tokenize returned comes back.
    skip_special_tokens: bool = False


def tokenize_router(core: GatewayCore) -> APIRouter:
    """Return the routes of one gateway."""
    router = APIRouter(tags=["Tokenizer"])

    @router.post("/tokenize", openapi_extra=http.body_schema(TokenizeFields))
    async def tokenize(request: Request) -> Response:
        """Return the token ids of a text or a chat."""
        body = await http.read_object(request)
        with_strings = body.get("return_token_strs") is True
        if "messages" in body:
            chat = {name: value for name, value in body.items() if name != "return_token_strs"}
            ids = await chat_token_ids(core, chat)
        else:
            fields = validate(TokenizeFields, body, ignored=IGNORED)
            core.check_model(fields.model)
            ids = await core.texts.tokenize(fields.prompt, field="prompt", add_special_tokens=fields.add_special_tokens)
        max_model_len = (await core.info()).max_model_len

        def answer() -> Response:
            names = [core.tokenizer.token_text(token_id)[0] for token_id in ids] if with_strings else None
            return http.json_response(
                {"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": names}
            )

        return answer() if len(ids) <= SHORT_TEXT_TOKENS else await core.texts.in_thread(answer)

    @router.post("/detokenize", openapi_extra=http.body_schema(DetokenizeFields))
    async def detokenize(request: Request) -> Response:
        """Return the text of token ids."""
        fields = validate(DetokenizeFields, await http.read_object(request), ignored=IGNORED)
        core.check_model(fields.model)
        if isinstance(fields.tokens, list):
            limits.check_count("tokens", len(fields.tokens), limits.MAX_TOKENIZED_IDS)
        if fields.tokens != [] and not is_id_list(fields.tokens):
            raise InvalidRequestError("tokens must be a list of token ids", field="tokens")
        limits.check_token_ids("tokens", fields.tokens, (await core.info()).vocab_size)
        text = await core.texts.decode(fields.tokens, skip_special_tokens=fields.skip_special_tokens)
        return http.json_response({"prompt": text})

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """Return special tokens, chat template and class of the tokenizer."""
        return http.json_response(core.tokenizer.describe())

    return router
