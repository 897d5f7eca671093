"""Serve the operator's API for corpora: texts that drafters draft from for every request."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from foretoken import limits
from foretoken.corpora import token_bytes
from foretoken.errors import InvalidRequestError
from gateway import http
from gateway.core import GatewayCore
from gateway.fields import ClosedFields, is_id_list, validate
from gateway.operator.all_verifiers import call_all
from protos import verifier_pb2

# Sorting millions of tokens takes seconds.
CALL_TIMEOUT_S = 150.0
# The operator may send more than other clients.
MAX_JSON_VALUES = limits.MAX_CORPUS_TOKENS + limits.MAX_JSON_VALUES


class CorpusFields(ClosedFields):
    """Body of POST /v1/corpora."""

    name: str = Field(description="1 to 64 characters of a-z, 0-9, _, . and -.")
    text: str | None = Field(None, description="Text, at most 2 million characters; or give token_ids.")
    token_ids: Any = Field(None, description="A list of token ids; or give text.")
    append: bool = Field(False, description="Add the text to the corpus as a separate text; else replace the corpus.")
    drafter: str = Field("", description="A drafter that can hold corpora; empty: the first.")


def corpora_router(core: GatewayCore) -> APIRouter:
    """Return the routes of one gateway, for the operator."""
    router = APIRouter(prefix="/v1/corpora", tags=["Operation"])

    async def call(method: str, message: Any) -> list[Any]:
        return await call_all(core.verifiers.clients, method, message, timeout_s=CALL_TIMEOUT_S)

    @router.post("", openapi_extra=http.body_schema(CorpusFields))
    async def add(request: Request) -> Response:
        """Draft from a text from now on, on all verifiers.

        With ``append: false`` it is safe to repeat.
        """
        fields = validate(CorpusFields, await http.read_object(request, max_values=MAX_JSON_VALUES))
        limits.check_name("name", fields.name)
        data = await _token_bytes(core, fields)
        message = verifier_pb2.AddCorpusRequest(
            drafter=fields.drafter, name=fields.name, token_ids=data, append=fields.append
        )
        responses = await call("AddCorpus", message)
        return http.json_response(_corpus(responses[0].corpus))

    @router.get("")
    async def list_all(drafter: str = "") -> Response:
        """List the corpora of one drafter, or of all; each once, even if on several verifiers."""
        responses = await call("ListCorpora", verifier_pb2.ListCorporaRequest(drafter=drafter))
        corpora: dict[tuple[str, str], verifier_pb2.Corpus] = {}
        for corpus in itertools.chain.from_iterable(response.corpora for response in responses):
            corpora.setdefault((corpus.drafter, corpus.name), corpus)
        return http.json_response({"object": "list", "data": [_corpus(corpus) for corpus in corpora.values()]})

    @router.delete("/{name}")
    async def remove(name: str, drafter: str = "") -> Response:
        """Remove a corpus from all verifiers."""
        await call("RemoveCorpus", verifier_pb2.RemoveCorpusRequest(drafter=drafter, name=name))
        return http.json_response({"object": "corpus", "name": name, "deleted": True})

    return router


async def _token_bytes(core: GatewayCore, fields: CorpusFields) -> bytes:
    if (fields.text is None) == (fields.token_ids is None):
        raise InvalidRequestError("give either text or token_ids", field="text")
    if fields.text is not None:
        field = "text"
        token_ids = await core.texts.token_ids(fields.text, _check_text_length, field=field)
    elif is_id_list(fields.token_ids):
        field, token_ids = "token_ids", fields.token_ids
    else:
        raise InvalidRequestError("token_ids must be a list of token ids", field="token_ids")
    limits.check_count(field, len(token_ids), limits.MAX_CORPUS_TOKENS, least=1)
    return await asyncio.to_thread(token_bytes, token_ids)


def _check_text_length(num_tokens: int, /, *, at_least: bool = False) -> None:
    """Raise InvalidRequestError for a text of too many tokens; the context does not limit them."""
    limits.check_tokens("text", num_tokens, limits.MAX_CORPUS_TOKENS)


def _corpus(corpus: verifier_pb2.Corpus) -> dict[str, Any]:
    return {"object": "corpus", "name": corpus.name, "num_tokens": corpus.num_tokens, "drafter": corpus.drafter}
