"""Describe the answers' bodies for the OpenAPI document. Routes write their bodies themselves.

An answer may have more members than these.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Seed = Annotated[int, Field(description="The seed in force; drawn if the request had none.")]


class Answer(BaseModel):
    model_config = ConfigDict(extra="allow")


class ErrorDetails(Answer):
    message: str
    type: str = Field(description="OpenAI's type, such as invalid_request_error.")
    param: str | None = Field(description="The request's field at fault.")
    code: str | None = Field(description="OpenAI's code, such as context_length_exceeded.")


class Error(Answer):
    error: ErrorDetails


class AnthropicErrorDetails(Answer):
    type: str
    message: str


class AnthropicError(Answer):
    type: Literal["error"]
    error: AnthropicErrorDetails


class Model(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Answer):
    object: Literal["list"]
    data: list[Model]


class PromptTokensDetails(Answer):
    cached_tokens: int


class CompletionTokensDetails(Answer):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class SpeculativeDecoding(Answer):
    """How one output was drafted; docs/figures.md has the formulas."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_spec_tokens: int
    drafter: str | None
    fallback_steps: int
    mean_tokens_per_step: float


class Metrics(Answer):
    """Figures of an answer with one output."""

    speculative_decoding: SpeculativeDecoding
    time_to_first_token_ms: float | None
    queue_time_ms: float
    mean_itl_ms: float | None
    tokens_per_second: float | None
    generation_time_ms: float


class Choice(Answer):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls", "function_call", "abort"]
    stop_reason: str | int | None = Field(description="The stop string or stop token that ended the output.")
    logprobs: dict[str, Any] | None


class CompletionChoice(Choice):
    text: str
    seed: int | None = Field(None, description="The seed of its prompt, if the request has several prompts.")


class AssistantMessage(Answer):
    role: Literal["assistant"]
    content: str | None


class ChatChoice(Choice):
    message: AssistantMessage


class Completion(Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    seed: Seed
    metrics: Metrics | None = None


class ChatCompletion(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    seed: Seed
    metrics: Metrics | None = None


class Response(Answer):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "failed", "in_progress"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    seed: Seed


class Message(Answer):
    """Anthropic's message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: dict[str, Any]
    seed: Seed


class TokenCount(Answer):
    input_tokens: int


class MetaInfo(Answer):
    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    seed: Seed | None = None
    cached_tokens: int | None = None
    spec_accept_length: float | None = Field(None, description="Completion tokens ÷ decode steps.")


class Generated(Answer):
    text: str
    output_ids: list[int]
    meta_info: MetaInfo


class Tokenized(Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Answer):
    prompt: str


class TokenizerInfo(Answer):
    tokenizer_class: str
    vocab_size: int
    chat_template: str | dict[str, Any] | None
    bos_token: str | None
    eos_token: str | None


class Health(Answer):
    status: str


class Readiness(Health):
    model: str
    verifiers: list[dict[str, Any]]


class Version(Answer):
    version: str
    model: str
    verifiers: list[dict[str, Any]]


class InternalState(Answer):
    num_running_reqs: int
    num_waiting_reqs: int
    avg_spec_accept_length: float | None = Field(
        None, description="1 + accepted draft tokens ÷ verified drafts since the verifier's start."
    )


class ServerInfo(Answer):
    version: str
    model_path: str
    served_model_name: str
    internal_states: list[InternalState]


class ModelInfo(Answer):
    model_path: str
    tokenizer_path: str
    is_generation: bool
    weight_version: str


class Aborted(Answer):
    num_aborted: int


class Corpus(Answer):
    object: Literal["corpus"]
    name: str


class CorpusList(Answer):
    object: Literal["list"]
    data: list[Corpus]


class Drafter(Answer):
    object: Literal["drafter"]
    name: str


class EndedRequest(Answer):
    ended_at: float = Field(description="Unix seconds.")
    api: str
    outcome: str = Field(description="ok, cancelled, or the name of the status that ended it.")
    prompt_tokens: int
    completion_tokens: int
    time_to_first_token_ms: float | None
    duration_ms: float


class Activity(Answer):
    num_requests: int = Field(description="Requests in the gateway now.")
    num_waiting: int = Field(description="Sequences that wait for a verifier.")
    verifiers: list[dict[str, Any]]
    requests: list[EndedRequest] = Field(description="At most 200 of the last 15 minutes, the latest first.")


class DrafterList(Answer):
    object: Literal["list"]
    data: list[Drafter]
