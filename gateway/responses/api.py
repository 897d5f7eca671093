"""Serve POST /v1/responses in OpenAI's shape, without a store of responses."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from foretoken.errors import NotFoundError
from gateway import http
from gateway.core import GatewayCore
from gateway.exchange import Exchange
from gateway.openai.chat_request import chat_request
from gateway.responses.body import ResponsesFields, parse_responses
from gateway.responses.reply import ResponsesFormat

URL = "/v1/responses"


def responses_router(core: GatewayCore) -> APIRouter:
    """Return the routes of one gateway."""
    router = APIRouter(tags=["OpenAI"])

    @router.post(URL, openapi_extra=http.body_schema(ResponsesFields))
    async def responses(request: Request) -> Response:
        """Answer an input with a response object."""
        body = parse_responses(await http.read_object(request, core.check_open))
        request_id, trace = http.new_id("resp", "_"), http.trace_context(request)
        drops_oldest = body.fields.truncation == "auto"
        chat = await chat_request(
            core, body.chat, request_id=request_id, trace=trace, names=body.names, drops_oldest=drops_oldest
        )
        reply = ResponsesFormat(chat, body.fields, core.settings, core.tokenizer)
        client_id = http.client_id(request)
        return Exchange(core, chat.generation, reply, stream=body.fields.stream, api=URL, client_id=client_id)

    @router.get(f"{URL}/{{response_id}}")
    @router.delete(f"{URL}/{{response_id}}")
    @router.post(f"{URL}/{{response_id}}/cancel")
    @router.get(f"{URL}/{{response_id}}/input_items")
    async def stored_response(response_id: str) -> Response:
        """Refuse: this server keeps no responses."""
        raise NotFoundError("this server keeps no responses, so none can be read, deleted or cancelled")

    return router
