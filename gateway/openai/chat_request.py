"""Make the generation that a chat asks for, whichever API it came from."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import orjson

from foretoken import limits
from foretoken.errors import InvalidRequestError
from foretoken.tracing import TraceContext
from gateway.chat.field_names import FieldNames
from gateway.chat.tools import ToolUse
from gateway.core import GatewayCore
from gateway.generation_request import GenerationRequest, Prompt
from gateway.openai.generation_request import generation_request
from gateway.openai.request import (
    ChatFields,
    GenerationOptions,
    num_message_chars,
    parse_chat,
    reasoning_place,
    template_kwargs,
    template_messages,
)
from gateway.openai.truncation import newest_turns
from gateway.tokenizer import SHORT_TEXT_CHARS

# A template is a program: it may take more than a few milliseconds for more messages.
SHORT_CHAT_MESSAGES = 32
# A request does not wait longer for the template, with whatever variables the client gave it.
TEMPLATE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked chat: its generation, and the options with which its answer is written."""

    options: GenerationOptions
    generation: GenerationRequest
    # The model's name in the answer.
    model: str


async def chat_request(
    core: GatewayCore,
    body: dict[str, Any],
    *,
    request_id: str,
    trace: TraceContext | None,
    names: FieldNames | None = None,
    drops_oldest: bool = False,
) -> ChatRequest:
    """Return the request of a body of POST /v1/chat/completions.

    ``names``: the field names of the API that the body was made for. ``drops_oldest``: turns that
    the context cannot hold are dropped. Raises InvalidRequestError naming the field at fault, and
    NotFoundError for another model.
    """
    names = names or FieldNames()
    with names.in_errors():
        fields, options = parse_chat(body, core.sampling_defaults)
        core.check_model(fields.model)
        core.chat_forms.check(options.tool_use)

        kept = await core.texts.num_kept(options.truncate_prompt_tokens, options.sampling.max_tokens)
        text = ""

        async def prompt_of(fields: ChatFields) -> Prompt:
            nonlocal text
            text = await chat_text(core, fields, options.tool_use)
            return await core.texts.encode(
                text, field="messages", add_special_tokens=fields.add_special_tokens, keep_last=kept
            )

        if drops_oldest:
            prompt = await newest_turns(fields, prompt_of, (await core.info()).max_model_len)
        else:
            prompt = await prompt_of(fields)
        options = _with_reply(core, options, text, fields)
        options = dataclasses.replace(options, grammar_field=names.own(options.grammar_field))
        generation = await generation_request(core, request_id, (prompt,), options, trace)
        await core.check(generation, prompt_field="messages")
    return ChatRequest(options, generation, core.answered_model(fields.model))


async def chat_token_ids(core: GatewayCore, body: dict[str, Any], names: FieldNames | None = None) -> tuple[int, ...]:
    """Return the prompt of a body as ``chat_request`` takes it.

    It may be longer than the context.
    """
    with (names or FieldNames()).in_errors():
        fields, options = parse_chat(body, core.sampling_defaults)
        core.check_model(fields.model)
        core.chat_forms.check(options.tool_use)
        text = await chat_text(core, fields, options.tool_use)
        return await core.texts.tokenize(text, field="messages", add_special_tokens=fields.add_special_tokens)


async def chat_text(core: GatewayCore, fields: ChatFields, use: ToolUse) -> str:
    """Return the prompt that the chat template renders. Long messages are rendered in a thread.

    A template may leave text out, so the messages may be longer than the context.

    Raises InvalidRequestError if messages or tools are too long, or the template takes too long.
    """
    messages = template_messages(fields.messages)
    num_chars = sum(map(num_message_chars, messages))
    limits.check_prompt_size("messages", num_chars, (await core.info()).max_model_len)
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
    if is_short and all(isinstance(value, bool | str) for value in fields.chat_template_kwargs.values()):
        return render()
    try:
        async with asyncio.timeout(TEMPLATE_TIMEOUT_S):
            return await core.texts.in_thread(render)
    except TimeoutError:
        raise InvalidRequestError(
            f"the chat template takes longer than {TEMPLATE_TIMEOUT_S:g} s for these messages", field="messages"
        ) from None


def _with_reply(core: GatewayCore, options: GenerationOptions, prompt: str, fields: ChatFields) -> GenerationOptions:
    """Return a chat's options with how its outputs are written and read."""
    sampling = options.sampling
    # OpenAI's clients may always send a response_format.
    if options.tool_use.must_call and options.grammar_field not in ("", "response_format"):
        raise InvalidRequestError(
            f"{options.grammar_field} asks for a second form of the output, beside tool_choice",
            field=options.grammar_field,
        )
    reply = core.chat_forms.reply(
        prompt,
        options.tool_use,
        sampling.grammar,
        options.grammar_field,
        skip_special_tokens=options.skip_special_tokens,
        continues=fields.continue_final_message,
    )
    if reply.is_plain:
        return options
    reply = dataclasses.replace(reply, reasoning_place=reasoning_place(fields))
    sampling = dataclasses.replace(sampling, grammar=reply.grammar)
    return dataclasses.replace(options, sampling=sampling, grammar_field=reply.grammar_field, reply=reply)
