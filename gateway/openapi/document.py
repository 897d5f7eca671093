"""Complete the OpenAPI document: bodies, bounds, answers, every status, examples and keys."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel

from gateway.access.routes import Who, who_may_call
from gateway.anthropic.body import CountTokensFields, MessagesFields
from gateway.fields import Fields
from gateway.http import COMPONENTS, component_schemas
from gateway.openai.request import ChatFields, CompletionFields
from gateway.openapi import answers
from gateway.openapi.bounds import add_bounds
from gateway.responses.body import ResponsesFields
from gateway.sglang.generate import SglangSamplingFields
from gateway.tokenize_api import TokenizeFields

Schema = dict[str, Any]
Body = type[BaseModel] | str
JSON, TEXT, EVENTS = "application/json", "text/plain", "text/event-stream"
# Of an operation that is always refused.
NONE = ""

# By operation: the body of 200, or its media type if it is not JSON.
ANSWERS: dict[tuple[str, str], Body] = {
    ("GET", "/health"): answers.Health,
    ("GET", "/ping"): TEXT,
    ("GET", "/ready"): answers.Readiness,
    ("GET", "/version"): answers.Version,
    ("GET", "/metrics"): TEXT,
    ("GET", "/v1/models"): answers.ModelList,
    ("GET", "/v1/models/{name}"): answers.Model,
    ("POST", "/v1/completions"): answers.Completion,
    ("POST", "/v1/chat/completions"): answers.ChatCompletion,
    ("POST", "/v1/responses"): answers.Response,
    ("GET", "/v1/responses/{response_id}"): NONE,
    ("DELETE", "/v1/responses/{response_id}"): NONE,
    ("POST", "/v1/responses/{response_id}/cancel"): NONE,
    ("GET", "/v1/responses/{response_id}/input_items"): NONE,
    ("POST", "/v1/messages"): answers.Message,
    ("POST", "/v1/messages/count_tokens"): answers.TokenCount,
    ("POST", "/generate"): answers.Generated,
    ("POST", "/tokenize"): answers.Tokenized,
    ("POST", "/detokenize"): answers.Detokenized,
    ("GET", "/tokenizer_info"): answers.TokenizerInfo,
    ("GET", "/server_info"): answers.ServerInfo,
    ("GET", "/get_server_info"): answers.ServerInfo,
    ("GET", "/model_info"): answers.ModelInfo,
    ("GET", "/get_model_info"): answers.ModelInfo,
    ("GET", "/health_generate"): answers.Health,
    ("GET", "/flush_cache"): TEXT,
    ("POST", "/flush_cache"): TEXT,
    ("POST", "/abort_request"): answers.Aborted,
    ("POST", "/v1/corpora"): answers.Corpus,
    ("GET", "/v1/corpora"): answers.CorpusList,
    ("DELETE", "/v1/corpora/{name}"): answers.Corpus,
    ("POST", "/v1/drafters"): answers.DrafterList,
    ("GET", "/v1/drafters"): answers.DrafterList,
    ("DELETE", "/v1/drafters/{name}"): answers.Drafter,
    ("GET", "/v1/activity"): answers.Activity,
}
# Bodies of 200 that streams have as well, and SGLang's list for several prompts or choices.
STREAMS = {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/generate"}
_STATUSES = {
    400: "A field is out of bounds, or the body is not a JSON object.",
    401: "No key, or a wrong one.",
    403: "This caller may not do this, or a page of this Origin may not call.",
    404: "There is no such model, or nothing of this name.",
    408: "The body did not arrive in time.",
    409: "It does not go with the server's state.",
    413: "The body is larger than 8 MiB.",
    415: "The body is not declared as JSON.",
    421: "The Host is not this server's.",
    429: "A queue or a budget is full; retry-after says when to try again.",
    500: "An internal error, or logits that are NaN or infinite.",
    503: "Draining, or no verifier is up; retry-after says when to try again.",
    504: "The request's deadline has passed.",
}
_BODIES = (CompletionFields, ChatFields, ResponsesFields, MessagesFields, CountTokensFields, SglangSamplingFields)
_OF_ALL = (400, 401, 403, 421, 500)
_OF_BODIES = (404, 408, 409, 413, 415, 429, 503, 504)
# Of each server-sent event.
_EVENT = {
    "type": "object",
    "description": "With stream: true. data holds JSON; the last event of OpenAI's and SGLang's streams is [DONE].",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}
# Calls that need no model.
_PLAIN = {"/health", "/ping"}
EXAMPLES: dict[str, Schema] = {
    "/v1/completions": {"prompt": "def add(a, b):", "max_tokens": 16, "temperature": 0},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 16},
    "/generate": {"text": "def add(a, b):", "sampling_params": {"max_new_tokens": 16, "temperature": 0}},
    "/v1/responses": {"input": "Say hello.", "max_output_tokens": 16},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 16},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hi"}]},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/abort_request": {"rid": "my-request"},
    "/v1/corpora": {"name": "license", "text": "Permission is hereby granted"},
    "/v1/drafters": {"name": "second", "address": "unix:/run/drafter.sock"},
}
TAGS = [
    {"name": "OpenAI", "description": "OpenAI's API."},
    {"name": "Anthropic", "description": "Anthropic's API."},
    {"name": "SGLang", "description": "SGLang's own API."},
    {"name": "Tokenizer", "description": "vLLM's tokenizer API."},
    {"name": "Operation", "description": "State, metrics, and the operator's calls."},
]
# How a caller shows a key. A server without keys asks for none.
SECURITY_SCHEMES: dict[str, Schema] = {
    "operator": {"type": "http", "scheme": "bearer", "description": "The operator's key."},
    "key": {"type": "http", "scheme": "bearer", "description": "A client's key."},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "A client's key."},
}
_SECURITY: dict[Who, list[Schema]] = {
    Who.CALLER: [{}, {"key": []}, {"x-api-key": []}],
    Who.OBSERVER: [{}, {"key": []}, {"x-api-key": []}, {"operator": []}],
    Who.OPERATOR: [{"operator": []}],
}


def complete(document: Schema) -> Schema:
    """Complete FastAPI's document in place, and return it."""
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas.clear()
    schemas |= component_schemas(*_BODIES)
    for name in list(schemas):
        add_bounds(schemas[name], name)
    schemas |= _schemas_of(answers.Error, answers.AnthropicError)
    document["components"]["securitySchemes"] = SECURITY_SCHEMES
    document["tags"] = TAGS
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            _complete(path, method.upper(), operation, schemas)
    return document


def methods_of(document: Schema, path: str) -> list[str]:
    """Return the methods of a path; an empty list if the document does not have it."""
    for template, operations in document["paths"].items():
        if re.fullmatch(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(template)), path):
            return sorted(method.upper() for method in operations)
    return []


def _complete(path: str, method: str, operation: Schema, schemas: Schema) -> None:
    # A docstring marks names as reStructuredText does; readers of the document expect Markdown.
    operation["description"] = operation.get("description", "").replace("``", "`")
    body = operation.get("requestBody", {}).get("content", {}).get(JSON)
    if body is not None:
        _complete_body(path, body)
    statuses = {*_OF_ALL, *(_OF_BODIES if body else ())}
    if path not in _PLAIN:
        statuses |= {503, 504}
    if "{" in path or method in ("DELETE",):
        statuses |= {404, 409, 429}
    who = who_may_call(method, path)
    if who is Who.OPERATOR:
        statuses |= {404, 409, 429}
    if who is Who.CALLER:
        # Of a key's limits.
        statuses |= {429}
    shape = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    error = {"content": {JSON: {"schema": {"$ref": COMPONENTS + shape}}}}
    success = {} if ANSWERS.get((method, path)) == NONE else {"200": _success(path, method, schemas)}
    operation["responses"] = success | {
        str(status): {"description": _STATUSES[status], **error} for status in sorted(statuses)
    }
    if path == "/ready":
        operation["responses"]["503"] = {
            "description": "Not ready, or draining.",
            "content": {JSON: {"schema": {"$ref": COMPONENTS + "Readiness"}}},
        }
    if who in _SECURITY:
        operation["security"] = _SECURITY[who]


def _complete_body(path: str, body: Schema) -> None:
    schema = body["schema"]
    add_bounds(schema, schema.get("title", ""))
    if path == "/generate":
        sampling = SglangSamplingFields.model_json_schema(ref_template=COMPONENTS + "{model}")
        add_bounds(sampling, "SglangSamplingFields")
        schema["properties"]["sampling_params"] = {"anyOf": [sampling, {"type": "null"}]}
    if path == "/tokenize":
        chat = _body_of(ChatFields)
        chat["properties"]["return_token_strs"] = {"type": "boolean"}
        body["schema"] = {"anyOf": [_body_of(TokenizeFields), chat]}
    if path in EXAMPLES:
        body["example"] = EXAMPLES[path]


def _body_of(kind: type[Fields]) -> Schema:
    schema = kind.model_json_schema(ref_template=COMPONENTS + "{model}")
    schema.pop("$defs", None)
    add_bounds(schema, kind.__name__)
    return schema


def _success(path: str, method: str, schemas: Schema) -> Schema:
    body = ANSWERS.get((method, path))
    if body is None:
        return {"description": "Done.", "content": {JSON: {"schema": {}}}}
    if isinstance(body, str):
        return {"description": "Done.", "content": {body: {"schema": {"type": "string"}}}}
    schemas |= _schemas_of(body)
    schema: Schema = {"$ref": COMPONENTS + body.__name__}
    if body is answers.Generated:
        schema = {"anyOf": [schema, {"type": "array", "items": schema}]}
    content: Schema = {JSON: {"schema": schema}}
    if path in STREAMS:
        content[EVENTS] = {"schema": _EVENT}
    return {"description": "Done.", "content": content}


def _schemas_of(*kinds: type[BaseModel]) -> Schema:
    """Return the schemas of answers, and of what they refer to."""
    found: Schema = {}
    for kind in kinds:
        schema = kind.model_json_schema(ref_template=COMPONENTS + "{model}", mode="serialization")
        found |= schema.pop("$defs", {})
        found[kind.__name__] = schema
    return found
