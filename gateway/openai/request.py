"""Parse the bodies of the OpenAI endpoints into a generation's options."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson
from pydantic import Field

from foretoken import limits
from foretoken.errors import InvalidRequestError
from foretoken.limits import SAMPLING_RANGES
from foretoken.sampling import Grammar, SamplingParams, SpeculationOptions
from gateway.chat.chat_reply import PLAIN, ChatReply
from gateway.chat.openai_tools import ToolCallFields, ToolFields, template_calls, tool_use
from gateway.chat.reasoning import ReasoningPlace
from gateway.chat.tools import ToolUse
from gateway.fields import (
    Fields,
    SpeculativeFields,
    allowed_ids,
    check_in_range,
    draw_seed,
    is_id_list,
    one_or_many_strings,
    text_list,
    token_biases,
    validate,
)
from gateway.grammar import GrammarFields, requested_grammar
from gateway.prediction import PredictionFields, parts_text
from gateway.sampling_defaults import SamplingDefaults
from gateway.tokenizer import RESERVED_TEMPLATE_KWARGS
from gateway.unsupported_fields import UNSUPPORTED

# OpenAI's default for completions; a chat may fill the context.
COMPLETION_MAX_TOKENS = 16
REST_OF_CONTEXT = int(SAMPLING_RANGES["max_tokens"].high)

# Accounting and hints for OpenAI's own service; they have no meaning here.
IGNORED = frozenset(
    {
        # Only beam search, which is refused, has an effect of these.
        "early_stopping",
        "length_penalty",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    }
)
USE_TOKEN_IDS = "use return_token_ids"
# Fields that would change the output and cannot be obeyed, with the reason.
UNSUPPORTED_IN_COMPLETION: Mapping[str, str] = {
    **UNSUPPORTED,
    "return_tokens_as_token_ids": USE_TOKEN_IDS,
    "suffix": "",
    "functions": "use tools of /v1/chat/completions",
}
UNSUPPORTED_IN_CHAT: Mapping[str, str] = {
    **UNSUPPORTED,
    "return_tokens_as_token_ids": USE_TOKEN_IDS,
    "audio": "the engine takes and writes text only",
    "modalities": "the engine takes and writes text only",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "web_search_options": "",
    "best_of": "use n for several choices",
    "echo": "use continue_final_message, or /v1/completions",
    "suffix": "",
    "documents": "give them in chat_template_kwargs",
    "chat_template": "a template is a program, so only the server's --chat-template runs",
}
NO_FUNCTIONS: tuple[tuple[str, object], ...] = (("functions", []), ("function_call", "none"), ("function_call", "auto"))


class StreamOptions(Fields):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    # OpenAI pads chunks with random characters if this is set; foretoken never pads.
    include_obfuscation: bool = False


class SharedFields(Fields):
    """Fields of every API of texts and chats, as its own or as extensions.

    Ranges: foretoken/limits.py.
    """

    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] | None = None
    # vLLM's and SGLang's extensions.
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: list[int] = Field(default_factory=list)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    allowed_token_ids: list[int] | None = Field(None, description="Only these tokens may be sampled.")
    bad_words: list[str] = Field(default_factory=list, description="Texts whose tokens the output must not contain.")
    truncate_prompt_tokens: int | None = Field(
        None, description="Keep only the prompt's last tokens, this many; -1: as many as the context has room for."
    )
    priority: int = Field(0, description="Requests with a lower number start first and are preempted last.")
    cache_salt: str | None = None
    prediction: PredictionFields | None = None
    # Our extension.
    speculative: SpeculativeFields = SpeculativeFields()


class GenerationFields(GrammarFields, SharedFields):
    """Fields of both endpoints. Ranges: foretoken/limits.py."""

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    n: int = 1
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    stop: Any = Field(None, description="A string, or a list of at most 64 strings.")
    request_id: str | None = Field(None, description="vLLM's: the client's name for the request, as x-request-id.")
    no_stop_trim: bool = Field(False, description="SGLang's name of include_stop_str_in_output.")
    # vLLM's.
    prompt_logprobs: int | None = Field(None, description="Logprobs of the prompt's tokens, with as many best ones.")
    return_token_ids: bool = Field(False, description="The answer carries prompt_token_ids and token_ids.")
    # Our extension.
    return_token_sources: bool = Field(
        False,
        description="Each choice carries token_ids, token_texts, token_sources (0: target, k: the verifier's drafter "
        "k) and token_drafters (its name, null for the target).",
    )
    return_draft_tree: bool = Field(
        False,
        description="Each choice carries the newest draft tree that was verified for its tokens, if there was one.",
    )


class CompletionFields(GenerationFields):
    """Body of POST /v1/completions."""

    prompt: Any = Field(description="A string, a list of strings, a list of token ids, or a list of such lists.")
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool = True


class ChatMessage(Fields):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Any = Field(
        None, description="A string, or a list of parts of type text. Only an assistant may leave it out or null."
    )
    name: str | None = None
    tool_call_id: str | None = None
    # Some servers put these into answers, and clients send answers back.
    annotations: Any = None
    # vLLM's name is reasoning.
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallFields] = Field(default_factory=list)


class ChatFields(GenerationFields):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage]
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[ToolFields] = Field(default_factory=list)
    tool_choice: Any = Field(None, description="auto, none, required, or the function to call.")
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool = Field(True, description="vLLM's; false: reasoning is left out of the answer.")
    separate_reasoning: bool = Field(True, description="SGLang's; false: reasoning stays in the content.")
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """A body's checked options with defaults and a seed; only the prompts are missing."""

    sampling: SamplingParams
    speculation: SpeculationOptions
    n: int
    # Whether the client gave no seed.
    draws_seeds: bool
    stop: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    cache_salt: str | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_sources: bool
    return_draft_tree: bool
    # The text that the client expects.
    prediction: str
    echo: bool = False
    # Whether the answer is the prompt without output. One token is computed, with the prompt's
    # logprobs.
    shows_prompt_alone: bool = False
    # Texts that the output must not contain.
    bad_words: tuple[str, ...] = ()
    # vLLM's prompt_logprobs: the best tokens of each prompt position; None: no such list.
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool = False
    priority: int = 0
    # The client's name for the request; empty: it gave none.
    request_id: str = ""
    # The field that set the grammar.
    grammar_field: str = ""
    tool_use: ToolUse = field(default_factory=ToolUse)
    # How the outputs of a chat are read, once its prompt is rendered.
    reply: ChatReply = PLAIN


def parse_completion(body: dict[str, Any], defaults: SamplingDefaults) -> tuple[CompletionFields, GenerationOptions]:
    """Return a completion's fields and options. Raises InvalidRequestError naming the field."""
    fields = validate(CompletionFields, body, ignored=IGNORED, unsupported=UNSUPPORTED_IN_COMPLETION)
    if fields.best_of not in (None, 1):
        raise InvalidRequestError("best_of must be 1: use n for several choices", field="best_of")
    check_in_range("logprobs", fields.logprobs)
    echoed = fields.logprobs if fields.echo else None
    wanted = _prompt_logprobs(fields)
    prompt_logprobs = max(echoed or 0, wanted or 0) if echoed is not None or wanted is not None else None
    shows_prompt_alone = fields.echo and fields.max_tokens == 0 and fields.max_completion_tokens is None
    max_tokens = 1 if shows_prompt_alone else _max_tokens(fields, defaults.max_tokens_or(COMPLETION_MAX_TOKENS))
    # Evaluation harnesses score so: the answer's lists need one position after the prompt, even if
    # the model would end there.
    is_scoring = echoed is not None and max_tokens == 1
    grammar, grammar_field = requested_grammar(fields)
    sampling = _sampling(fields, defaults, max_tokens, fields.logprobs, prompt_logprobs, grammar, ignore_eos=is_scoring)
    options = _options(fields, sampling, grammar_field, echo=fields.echo)
    return fields, dataclasses.replace(options, shows_prompt_alone=shows_prompt_alone)


def parse_chat(body: dict[str, Any], defaults: SamplingDefaults) -> tuple[ChatFields, GenerationOptions]:
    """Return a chat's fields and options. Raises InvalidRequestError naming the field."""
    if body.get("modalities") == ["text"]:
        body = {name: value for name, value in body.items() if name != "modalities"}
    # Without effect: deprecated fields that only say that there are no functions.
    body = {name: value for name, value in body.items() if (name, value) not in NO_FUNCTIONS}
    if isinstance(tools := body.get("tools"), list):
        limits.check_count("tools", len(tools), limits.MAX_TOOLS)
    if isinstance(messages := body.get("messages"), list):
        limits.check_count("messages", len(messages), limits.MAX_CHAT_MESSAGES, least=1)
    fields = validate(ChatFields, _without_nulls_in_messages(body), ignored=IGNORED, unsupported=UNSUPPORTED_IN_CHAT)
    use = tool_use(fields.tools, fields.tool_choice, fields.parallel_tool_calls)
    if fields.top_logprobs is not None and not fields.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true", field="top_logprobs")
    check_in_range("top_logprobs", fields.top_logprobs, "logprobs")
    _check_template_kwargs(fields.chat_template_kwargs)
    if fields.continue_final_message and fields.add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message needs add_generation_prompt: false", field="continue_final_message"
        )
    logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
    grammar, grammar_field = requested_grammar(fields)
    max_tokens = _max_tokens(fields, defaults.max_tokens_or(REST_OF_CONTEXT))
    sampling = _sampling(fields, defaults, max_tokens, logprobs, _prompt_logprobs(fields), grammar)
    return fields, dataclasses.replace(_options(fields, sampling, grammar_field), tool_use=use)


def _prompt_logprobs(fields: GenerationFields) -> int | None:
    check_in_range("prompt_logprobs", fields.prompt_logprobs)
    if fields.prompt_logprobs is not None and fields.stream:
        raise InvalidRequestError(
            "prompt_logprobs come only with whole answers: set stream to false", field="prompt_logprobs"
        )
    return fields.prompt_logprobs


def _check_template_kwargs(kwargs: dict[str, Any]) -> None:
    """Raise InvalidRequestError for variables that are too large or not a template's."""
    field = "chat_template_kwargs"
    limits.check_count(field, len(kwargs), limits.MAX_TEMPLATE_KWARGS)
    for name in sorted(RESERVED_TEMPLATE_KWARGS & kwargs.keys()):
        raise InvalidRequestError(f"{field} cannot set {name}, which is no variable of a template", field=field)
    try:
        num_bytes = len(orjson.dumps(kwargs))
    except orjson.JSONEncodeError as error:
        raise InvalidRequestError(f"{field} cannot be written as JSON: {error}", field=field) from None
    if num_bytes > limits.MAX_TEMPLATE_KWARGS_BYTES:
        most = limits.MAX_TEMPLATE_KWARGS_BYTES
        raise InvalidRequestError(f"{field} must have at most {most} bytes, got {num_bytes}", field=field)


def prompts_of(value: object) -> list[str | list[int]]:
    """Return the prompts of a completion, texts or lists of token ids, in order.

    Raises InvalidRequestError for other values, or too many prompts.
    """
    if isinstance(value, str) or is_id_list(value):
        return [value]  # type: ignore[list-item]
    if not isinstance(value, list) or not value:
        raise InvalidRequestError("prompt must not be empty", field="prompt")
    limits.check_count("prompt", len(value), limits.MAX_PROMPTS_PER_REQUEST)
    for item in value:
        if not isinstance(item, str) and not is_id_list(item):
            raise InvalidRequestError(
                "prompt must be a string, a list of strings, a list of token ids, or a list of lists of token ids",
                field="prompt",
            )
    return value


def template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages as chat templates expect them: one string each; developer becomes system."""
    out = []
    for number, message in enumerate(messages):
        role = "system" if message.role == "developer" else message.role
        limits.check_count(f"messages.{number}.tool_calls", len(message.tool_calls), limits.MAX_TOOLS)
        content = "" if message.content is None and role == "assistant" else message.content
        entry = {
            "role": role,
            "content": parts_text(content, f"messages.{number}.content"),
            "name": message.name,
            "tool_call_id": message.tool_call_id,
            "reasoning_content": message.reasoning_content or message.reasoning,
            "tool_calls": template_calls(message.tool_calls) or None,
        }
        out.append({key: value for key, value in entry.items() if value is not None})
    return out


def num_message_chars(message: dict[str, Any]) -> int:
    """Return the characters of a message for a template."""
    texts = sum(len(value) for value in message.values() if isinstance(value, str))
    return texts + (len(orjson.dumps(message["tool_calls"])) if "tool_calls" in message else 0)


def template_kwargs(fields: ChatFields) -> dict[str, Any]:
    """Return the chat template's variables that the request sets."""
    effort = {} if fields.reasoning_effort is None else {"reasoning_effort": fields.reasoning_effort}
    return effort | fields.chat_template_kwargs


def reasoning_place(fields: ChatFields) -> ReasoningPlace:
    """Return where the answer shows the model's reasoning."""
    if not fields.include_reasoning:
        return ReasoningPlace.NOWHERE
    return ReasoningPlace.APART if fields.separate_reasoning else ReasoningPlace.CONTENT


def _without_nulls_in_messages(body: dict[str, Any]) -> dict[str, Any]:
    """Remove nulls from messages: clients send an assistant's message back as they received it."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        return body
    cleaned = [
        {name: value for name, value in item.items() if value is not None} if isinstance(item, dict) else item
        for item in messages
    ]
    return {**body, "messages": cleaned}


def _max_tokens(fields: GenerationFields, default: int) -> int:
    """Return ``max_completion_tokens``, else ``max_tokens``, else ``default``."""
    check_in_range("max_completion_tokens", fields.max_completion_tokens, "max_tokens")
    check_in_range("max_tokens", fields.max_tokens)
    if fields.max_completion_tokens is not None:
        return fields.max_completion_tokens
    return default if fields.max_tokens is None else fields.max_tokens


def _sampling(
    fields: GenerationFields,
    defaults: SamplingDefaults,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: Grammar | None,
    *,
    ignore_eos: bool = False,
) -> SamplingParams:
    return SamplingParams(
        **defaults.of_request(fields, fields.model_fields_set),
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        seed=draw_seed(fields.seed),
        logit_bias=token_biases("logit_bias", fields.logit_bias),
        max_tokens=max_tokens,
        min_tokens=fields.min_tokens,
        stop_token_ids=tuple(fields.stop_token_ids),
        ignore_eos=fields.ignore_eos or ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
        allowed_token_ids=allowed_ids(fields.allowed_token_ids),
    )


def _options(
    fields: GenerationFields, sampling: SamplingParams, grammar_field: str, *, echo: bool = False
) -> GenerationOptions:
    return GenerationOptions(
        sampling=sampling,
        speculation=fields.speculative.to_options(),
        n=fields.n,
        draws_seeds=fields.seed is None,
        stop=one_or_many_strings("stop", fields.stop, limits.MAX_STOP_STRINGS),
        include_stop=fields.include_stop_str_in_output or fields.no_stop_trim,
        skip_special_tokens=fields.skip_special_tokens,
        cache_salt=fields.cache_salt,
        stream=fields.stream,
        include_usage=fields.stream_options.include_usage or fields.stream_options.continuous_usage_stats,
        continuous_usage=fields.stream_options.continuous_usage_stats,
        return_token_sources=fields.return_token_sources,
        return_draft_tree=fields.return_draft_tree,
        bad_words=text_list("bad_words", fields.bad_words, limits.MAX_BAD_WORDS, limits.MAX_BAD_WORD_CHARS),
        prompt_logprobs=fields.prompt_logprobs,
        truncate_prompt_tokens=fields.truncate_prompt_tokens,
        return_token_ids=fields.return_token_ids,
        priority=fields.priority,
        request_id=fields.request_id or "",
        prediction="" if fields.prediction is None else parts_text(fields.prediction.content, "prediction.content"),
        echo=echo,
        grammar_field=grammar_field,
    )
