"""The operator's API for corpora: texts that drafters draft from for everybody.

Its routes are there only where ``--admin-api-key-file`` is given, and each call needs that key.
"""

from __future__ import annotations

import asyncio
import hmac
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from foretoken import limits
from foretoken.corpora import token_bytes
from foretoken.errors import InvalidRequestError, PermissionDeniedError, UnauthenticatedError
from gateway import http
from gateway.core import GatewayCore
from gateway.fields import Fields, is_id_list, validate
from protos import verifier_pb2

# Sorting millions of tokens takes seconds.
CALL_TIMEOUT_S = 150.0
_BEARER = "bearer "


class CorpusFields(Fields):
    """Body of POST /v1/corpora."""

    name: str = Field(description="1 to 64 characters of a-z, 0-9, _, . and -.")
    text: str | None = Field(None, description="Text, at most 2 million characters; or give token_ids.")
    token_ids: Any = Field(None, description="A list of token ids; or give text.")
    append: bool = Field(False, description="Beside what the corpus holds, as a text of its own; else instead of it.")
    drafter: str = Field("", description="A drafter that holds corpora; empty: the first.")


def corpora_router(core: GatewayCore, key: str) -> APIRouter:
    """The routes, bound to one gateway, for callers that have ``key``."""
    router = APIRouter(prefix="/v1/corpora", tags=["Operation"])

    @router.post("", openapi_extra=http.body_schema(CorpusFields))
    async def add(request: Request) -> Response:
        """Draft from a text from now on, on all verifiers. Sent again with ``append: false`` it has the same effect."""
        check_key(request, key)
        fields = validate(CorpusFields, await http.read_object(request))
        limits.check_name("name", fields.name)
        data = await _token_bytes(core, fields)
        message = verifier_pb2.AddCorpusRequest(
            drafter=fields.drafter, name=fields.name, token_ids=data, append=fields.append
        )
        responses = await _call_all(core, "AddCorpus", message)
        return http.json_response(_corpus(responses[0].corpus))

    @router.get("")
    async def list_all(request: Request, drafter: str = "") -> Response:
        """The corpora of a drafter as the first verifier has them."""
        check_key(request, key)
        (response, *_) = await _call_all(core, "ListCorpora", verifier_pb2.ListCorporaRequest(drafter=drafter))
        return http.json_response({"object": "list", "data": [_corpus(corpus) for corpus in response.corpora]})

    @router.delete("/{name}")
    async def remove(request: Request, name: str, drafter: str = "") -> Response:
        """Draft from a corpus no more, on any verifier."""
        check_key(request, key)
        await _call_all(core, "RemoveCorpus", verifier_pb2.RemoveCorpusRequest(drafter=drafter, name=name))
        return http.json_response({"object": "corpus", "name": name, "deleted": True})

    return router


def check_key(request: Request, key: str) -> None:
    """Raise UnauthenticatedError without a key in ``Authorization: Bearer``, PermissionDeniedError for a wrong one."""
    header = request.headers.get("authorization", "")
    if not header.lower().startswith(_BEARER):
        raise UnauthenticatedError("this endpoint needs the operator's key, as Authorization: Bearer KEY")
    if not hmac.compare_digest(header[len(_BEARER) :].strip().encode(), key.encode()):
        raise PermissionDeniedError("this key is not the operator's")


async def _token_bytes(core: GatewayCore, fields: CorpusFields) -> bytes:
    if (fields.text is None) == (fields.token_ids is None):
        raise InvalidRequestError("give either text or token_ids", field="text")
    if fields.text is not None:
        field = "text"
        token_ids = (await core.encode(fields.text, field=field, add_special_tokens=False)).ids
    elif is_id_list(fields.token_ids):
        field, token_ids = "token_ids", fields.token_ids
    else:
        raise InvalidRequestError("token_ids must be a list of token ids", field="token_ids")
    limits.check_count(field, len(token_ids), limits.MAX_CORPUS_TOKENS, least=1)
    return await asyncio.to_thread(token_bytes, token_ids)


async def _call_all(core: GatewayCore, method: str, message: Any) -> list[Any]:
    """The answers of all verifiers. Raises what the first of them that failed says; the others may have done it."""
    calls = [client.call(method, message, timeout_s=CALL_TIMEOUT_S) for client in core.verifiers.clients]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers


def _corpus(corpus: verifier_pb2.Corpus) -> dict[str, Any]:
    return {"object": "corpus", "name": corpus.name, "num_tokens": corpus.num_tokens, "drafter": corpus.drafter}
