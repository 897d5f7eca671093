"""Serve POST /v1/completions, POST /v1/chat/completions and GET /v1/models."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from gateway import http
from gateway.core import GatewayCore
from gateway.exchange import Exchange
from gateway.generation_request import GenerationRequest, Prompt
from gateway.openai.chat_request import chat_request
from gateway.openai.generation_request import generation_request
from gateway.openai.request import ChatFields, CompletionFields, GenerationOptions, parse_completion, prompts_of
from gateway.openai.response import ChatFormat, CompletionFormat
from gateway.reply_format import ReplyFormat
from gateway.texts import cut_prompt


def openai_router(core: GatewayCore) -> APIRouter:
    """Return the routes of one gateway."""
    router = APIRouter(tags=["OpenAI"])

    @router.get("/v1/models")
    async def models() -> Response:
        """List the served model, once for each of its names that the caller may use."""
        data = [await _model(core, name) for name in core.model_names]
        return http.json_response({"object": "list", "data": data})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """Return the served model by one of its names."""
        if not name:
            return await models()
        core.check_model(name)
        return http.json_response(await _model(core, core.answered_model(name)))

    @router.post("/v1/completions", openapi_extra=http.body_schema(CompletionFields))
    async def completions(request: Request) -> Response:
        """Continue a prompt."""
        body = await http.read_object(request, core.check_open)
        fields, options = parse_completion(body, core.sampling_defaults)
        core.check_model(fields.model)
        kept = await core.texts.num_kept(options.truncate_prompt_tokens, options.sampling.max_tokens)
        prompts = [
            await core.texts.encode(item, add_special_tokens=fields.add_special_tokens, keep_last=kept)
            if isinstance(item, str)
            else cut_prompt(Prompt(tuple(item)), kept)
            for item in prompts_of(fields.prompt)
        ]
        request_id, trace = http.new_id("cmpl"), http.trace_context(request)
        generation = await generation_request(core, request_id, tuple(prompts), options, trace)
        await core.check(generation)
        if options.echo:
            generation = await _with_texts(core, generation)
        return _exchange(core, request, generation, options, fields.model, CompletionFormat)

    @router.post("/v1/chat/completions", openapi_extra=http.body_schema(ChatFields))
    async def chat_completions(request: Request) -> Response:
        """Answer a chat."""
        body = await http.read_object(request, core.check_open)
        request_id, trace = http.new_id("chatcmpl"), http.trace_context(request)
        chat = await chat_request(core, body, request_id=request_id, trace=trace)
        return _exchange(core, request, chat.generation, chat.options, chat.model, ChatFormat)

    return router


async def _with_texts(core: GatewayCore, request: GenerationRequest) -> GenerationRequest:
    """Return the request with the text of every prompt, which the answer echoes."""
    prompts = []
    for prompt in request.prompts:
        text = prompt.text
        if text is None:
            text = await core.texts.decode(prompt.ids, skip_special_tokens=request.skip_special_tokens)
        prompts.append(Prompt(prompt.ids, text))
    return dataclasses.replace(request, prompts=tuple(prompts))


def _exchange(
    core: GatewayCore,
    request: Request,
    generation: GenerationRequest,
    options: GenerationOptions,
    model: str | None,
    kind: type[ChatFormat] | type[CompletionFormat],
) -> Response:
    name, detail = core.answered_model(model), core.settings.speculative_metrics
    reply: ReplyFormat = kind(options, name, int(time.time()), core.tokenizer, detail)
    own = http.client_id(request, options.request_id)
    return Exchange(core, generation, reply, stream=options.stream, api=request.url.path, client_id=own)


async def _model(core: GatewayCore, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": core.created,
        "owned_by": "foretoken",
        "root": core.model_names[0],
        "parent": None,
        "max_model_len": (await core.info()).max_model_len,
    }
