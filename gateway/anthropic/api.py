"""Serve POST /v1/messages and /v1/messages/count_tokens in Anthropic's shape."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from gateway import http
from gateway.anthropic.body import CountTokensFields, MessagesFields, parse_count_tokens, parse_messages
from gateway.anthropic.reply import MessagesFormat
from gateway.core import GatewayCore
from gateway.exchange import Exchange
from gateway.openai.chat_request import chat_request, chat_token_ids

URL = "/v1/messages"


def anthropic_router(core: GatewayCore) -> APIRouter:
    """Return the routes of one gateway."""
    router = APIRouter(tags=["Anthropic"])

    @router.post(URL, openapi_extra=http.body_schema(MessagesFields))
    async def messages(request: Request) -> Response:
        """Answer a chat in Anthropic's form."""
        body = parse_messages(await http.read_object(request, core.check_open))
        request_id, trace = http.new_id("msg", "_"), http.trace_context(request)
        chat = await chat_request(core, body.chat, request_id=request_id, trace=trace, names=body.names)
        reply = MessagesFormat(chat, body.fields, core.settings)
        client_id = http.client_id(request)
        return Exchange(core, chat.generation, reply, stream=body.fields.stream, api=URL, client_id=client_id)

    @router.post(f"{URL}/count_tokens", openapi_extra=http.body_schema(CountTokensFields))
    async def count_tokens(request: Request) -> Response:
        """Return how many tokens a chat's prompt has."""
        body = parse_count_tokens(await http.read_object(request))
        ids = await chat_token_ids(core, body.chat, names=body.names)
        return http.json_response({"input_tokens": len(ids)})

    return router
