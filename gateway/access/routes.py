"""List every REST route and RPC, and who may call it; print the list for docs/access.md.

A route that is not in the list needs a client's key, as most do. A test fails for a route that is
missing here, and for a row without a route.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum


class Who(Enum):
    """Who may make a call, on a server with keys."""

    PUBLIC = "everybody"
    CALLER = "a client's key"
    OBSERVER = "a client's key with `metrics`, or the operator's"
    OPERATOR = "the operator's key"
    SERVICE = "foretoken's own services"


@dataclass(frozen=True, slots=True)
class Route:
    """A REST route: its path as FastAPI writes it."""

    method: str
    path: str
    who: Who


@dataclass(frozen=True, slots=True)
class Rpc:
    """A method of a gRPC service, or all its methods."""

    service: str
    method: str
    who: Who

    @property
    def path(self) -> str:
        return f"/{self.service}/{self.method}"


ROUTES = (
    Route("GET", "/health", Who.PUBLIC),
    Route("GET", "/ping", Who.PUBLIC),
    # Without a key it says only whether the server is ready.
    Route("GET", "/ready", Who.PUBLIC),
    # The page itself; what it calls needs a key.
    Route("GET", "/", Who.PUBLIC),
    Route("GET", "/playground/{name}", Who.PUBLIC),
    Route("GET", "/version", Who.CALLER),
    Route("GET", "/metrics", Who.OBSERVER),
    Route("GET", "/openapi.json", Who.CALLER),
    Route("GET", "/docs", Who.CALLER),
    Route("GET", "/v1/models", Who.CALLER),
    Route("GET", "/v1/models/{name:path}", Who.CALLER),
    Route("POST", "/v1/completions", Who.CALLER),
    Route("POST", "/v1/chat/completions", Who.CALLER),
    Route("POST", "/v1/responses", Who.CALLER),
    Route("GET", "/v1/responses/{response_id}", Who.CALLER),
    Route("DELETE", "/v1/responses/{response_id}", Who.CALLER),
    Route("POST", "/v1/responses/{response_id}/cancel", Who.CALLER),
    Route("GET", "/v1/responses/{response_id}/input_items", Who.CALLER),
    Route("POST", "/v1/messages", Who.CALLER),
    Route("POST", "/v1/messages/count_tokens", Who.CALLER),
    Route("POST", "/generate", Who.CALLER),
    Route("GET", "/health_generate", Who.CALLER),
    Route("GET", "/server_info", Who.CALLER),
    Route("GET", "/get_server_info", Who.CALLER),
    Route("GET", "/model_info", Who.CALLER),
    Route("GET", "/get_model_info", Who.CALLER),
    # The caller's own requests.
    Route("POST", "/abort_request", Who.CALLER),
    Route("GET", "/flush_cache", Who.OPERATOR),
    Route("POST", "/flush_cache", Who.OPERATOR),
    Route("POST", "/tokenize", Who.CALLER),
    Route("POST", "/detokenize", Who.CALLER),
    Route("GET", "/tokenizer_info", Who.CALLER),
    Route("POST", "/v1/corpora", Who.OPERATOR),
    Route("GET", "/v1/corpora", Who.OPERATOR),
    Route("DELETE", "/v1/corpora/{name}", Who.OPERATOR),
    Route("POST", "/v1/drafters", Who.OPERATOR),
    Route("GET", "/v1/drafters", Who.OPERATOR),
    Route("DELETE", "/v1/drafters/{name}", Who.OPERATOR),
    Route("GET", "/v1/activity", Who.OPERATOR),
)
RPCS = (
    Rpc("foretoken.gateway.v1.GatewayService", "Generate", Who.CALLER),
    Rpc("foretoken.gateway.v1.GatewayService", "GetModel", Who.CALLER),
    # Load balancers and orchestrators ask without a key.
    Rpc("grpc.health.v1.Health", "Check", Who.PUBLIC),
    Rpc("grpc.health.v1.Health", "List", Who.PUBLIC),
    Rpc("grpc.health.v1.Health", "Watch", Who.PUBLIC),
    Rpc("grpc.reflection.v1alpha.ServerReflection", "ServerReflectionInfo", Who.CALLER),
    # The gateway listens for none of these: they are on other sockets,
    # guarded by foretoken/links.py.
    Rpc("foretoken.verifier.v1.VerifierService", "*", Who.SERVICE),
    Rpc("foretoken.drafter.v1.DrafterService", "*", Who.SERVICE),
)
_PLAIN = {(route.method, route.path): route.who for route in ROUTES if "{" not in route.path}
_TEMPLATES = [
    (route.method, re.compile(re.sub(r"\{\w+\}", "[^/]+", route.path)), route.who)
    for route in ROUTES
    if "{" in route.path and route.who is not Who.CALLER
]
_RPCS = {rpc.path: rpc.who for rpc in RPCS}


def who_may_call(method: str, path: str) -> Who:
    """Return who may call a REST path."""
    if (who := _PLAIN.get((method, path))) is not None:
        return who
    for other, template, who in _TEMPLATES:
        if other == method and template.fullmatch(path):
            return who
    return Who.CALLER


def who_may_call_rpc(path: str) -> Who:
    """Return who may call an RPC, ``/package.Service/Method``."""
    return _RPCS.get(path, Who.CALLER)


def table() -> list[str]:
    """Return the rows of the table in docs/access.md."""
    rest = [f"| `{route.method} {route.path}` | {route.who.value} |" for route in ROUTES]
    return rest + [f"| `{rpc.service}/{rpc.method}` | {rpc.who.value} |" for rpc in RPCS]


if __name__ == "__main__":
    print("| call | who may make it |", "| --- | --- |", *table(), sep="\n")
