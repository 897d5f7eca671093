"""Serve POST /v1/completions, POST /v1/chat/completions and GET /v1/models."""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response

from foretoken import limits
from gateway import http
from gateway.chat.tools import ToolUse
from gateway.core import GatewayCore
from gateway.exchange import Exchange
from gateway.generation import GenerationRequest, Prompt
from gateway.openai_request import (
    ChatFields,
    CompletionFields,
    GenerationOptions,
    num_message_chars,
    parse_chat,
    parse_completion,
    prompts_of,
    template_kwargs,
    template_messages,
)
from gateway.openai_response import ChatFormat, CompletionFormat, ReplyFormat
from gateway.tokenizer import SHORT_TEXT_CHARS

# A template is a program: it may take more than a few milliseconds for more messages.
SHORT_CHAT_MESSAGES = 32


def openai_router(core: GatewayCore) -> APIRouter:
    """Return the routes of one gateway."""
    router = APIRouter(tags=["OpenAI"])

    @router.get("/v1/models")
    async def models() -> Response:
        return http.json_response({"object": "list", "data": [await _model(core)]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        core.check_model(name)
        return http.json_response(await _model(core))

    @router.post("/v1/completions", openapi_extra=http.body_schema(CompletionFields))
    async def completions(request: Request) -> Response:
        body = await http.read_object(request, core.check_open)
        fields, options = parse_completion(body)
        core.check_model(fields.model)
        prompts = [
            await core.encode(item, add_special_tokens=fields.add_special_tokens)
            if isinstance(item, str)
            else Prompt(tuple(item))
            for item in prompts_of(fields.prompt)
        ]
        generation = await _request(core, request, "cmpl", tuple(prompts), options)
        await core.check(generation)
        if options.echo:
            generation = await _with_texts(core, generation)
        return _exchange(core, request, generation, options, CompletionFormat)

    @router.post("/v1/chat/completions", openapi_extra=http.body_schema(ChatFields))
    async def chat_completions(request: Request) -> Response:
        body = await http.read_object(request, core.check_open)
        fields, options = parse_chat(body)
        core.check_model(fields.model)
        core.chat_forms.check(options.tool_use)
        text = await chat_text(core, fields, options.tool_use)
        options = _with_reply(core, options, text)
        prompt = await core.encode(text, field="messages", add_special_tokens=False)
        generation = await _request(core, request, "chatcmpl", (prompt,), options)
        await core.check(generation, prompt_field="messages")
        return _exchange(core, request, generation, options, ChatFormat)

    return router


async def chat_text(core: GatewayCore, fields: ChatFields, use: ToolUse) -> str:
    """Return the prompt that the chat template renders. Long messages are rendered in a thread.

    A template may leave text out, so the messages may be longer than the context.
    """
    messages = template_messages(fields.messages)
    num_chars = sum(map(num_message_chars, messages))
    limits.check_chars("messages", num_chars, limits.MAX_PROMPT_CHARS)
    tools = [tool.for_template() for tool in use.offered]
    if tools:
        num_tool_chars = len(orjson.dumps(tools))
        limits.check_chars("tools", num_tool_chars, limits.MAX_TOOLS_CHARS)
        num_chars += num_tool_chars
    options: dict[str, Any] = {
        "tools": tools,
        "add_generation_prompt": fields.add_generation_prompt,
        "continue_final_message": fields.continue_final_message,
        "template_kwargs": template_kwargs(fields),
    }
    render = functools.partial(core.tokenizer.render_chat, messages, **options)
    is_short = num_chars <= SHORT_TEXT_CHARS and len(messages) <= SHORT_CHAT_MESSAGES
    return render() if is_short else await core.in_text_thread(render)


def _with_reply(core: GatewayCore, options: GenerationOptions, prompt: str) -> GenerationOptions:
    """Return a chat's options with how its outputs are written and read."""
    sampling = options.sampling
    reply = core.chat_forms.reply(
        prompt,
        options.tool_use,
        sampling.grammar,
        options.grammar_field,
        skip_special_tokens=options.skip_special_tokens,
    )
    if reply.is_plain:
        return options
    sampling = dataclasses.replace(sampling, grammar=reply.grammar)
    return dataclasses.replace(options, sampling=sampling, grammar_field=reply.grammar_field, reply=reply)


async def _with_texts(core: GatewayCore, request: GenerationRequest) -> GenerationRequest:
    """Return the request with the text of every prompt, which the answer echoes."""
    prompts = []
    for prompt in request.prompts:
        text = prompt.text
        if text is None:
            text = await core.decode(prompt.ids, skip_special_tokens=request.skip_special_tokens)
        prompts.append(Prompt(prompt.ids, text))
    return dataclasses.replace(request, prompts=tuple(prompts))


async def _request(
    core: GatewayCore, request: Request, prefix: str, prompts: tuple[Prompt, ...], options: GenerationOptions
) -> GenerationRequest:
    return GenerationRequest(
        id=http.new_id(prefix),
        prompts=prompts,
        sampling=options.sampling,
        speculation=options.speculation,
        n=options.n,
        stop=options.stop,
        include_stop=options.include_stop,
        skip_special_tokens=options.skip_special_tokens,
        kept_special_ids=options.reply.kept_special_ids,
        cache_salt=options.cache_salt,
        timeout_ms=core.timeout_ms,
        trace=http.trace_context(request),
        grammar_field=options.grammar_field,
        prediction_ids=await core.encode_prediction(options.prediction, field="prediction.content"),
    )


def _exchange(
    core: GatewayCore,
    request: Request,
    generation: GenerationRequest,
    options: GenerationOptions,
    kind: type[ChatFormat] | type[CompletionFormat],
) -> Response:
    settings = core.settings
    reply: ReplyFormat = kind(
        options, settings.served_model_name, int(time.time()), core.tokenizer, settings.speculative_metrics
    )
    return Exchange(
        core, generation, reply, stream=options.stream, api=request.url.path, client_id=http.client_id(request)
    )


async def _model(core: GatewayCore) -> dict[str, Any]:
    return {
        "id": core.settings.served_model_name,
        "object": "model",
        "created": core.created,
        "owned_by": "foretoken",
        "max_model_len": (await core.info()).max_model_len,
    }
