"""Build the REST application: all routes, middleware, and errors as OpenAI's error object."""

from __future__ import annotations

import functools
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import foretoken
from foretoken import telemetry
from foretoken.errors import ForetokenError
from gateway import error_shapes, http, ignored_fields
from gateway.access import caller as callers
from gateway.access.rest_guard import AccessMiddleware
from gateway.anthropic.api import anthropic_router
from gateway.bodies import BodyMiddleware
from gateway.callers import CallerCheck, CallerMiddleware
from gateway.core import GatewayCore
from gateway.head_requests import HeadMiddleware, answers_head
from gateway.ignored_fields import IgnoredFieldsMiddleware
from gateway.messages import VerifierInfo
from gateway.openai.api import openai_router
from gateway.openapi.document import complete, methods_of
from gateway.openapi.page import SECURITY_POLICY, page
from gateway.operator.activity import activity_router
from gateway.operator.corpora import corpora_router
from gateway.operator.drafters import drafters_router
from gateway.playground.routes import playground_router
from gateway.responses.api import responses_router
from gateway.sglang.control import control_router
from gateway.sglang.generate import generate_router
from gateway.sglang.info import info_router
from gateway.tokenize_api import tokenize_router

# What pages of --allowed-origins may read of an answer beside its body; request-id is Anthropic's.
EXPOSED_HEADERS = ["retry-after", "x-request-id", "request-id", ignored_fields.HEADER.decode()]


def create_app(core: GatewayCore) -> FastAPI:
    """Return the ASGI application of one gateway."""
    app = FastAPI(title="foretoken", version=foretoken.__version__, docs_url=None, redoc_url=None)
    app.include_router(openai_router(core))
    app.include_router(responses_router(core))
    app.include_router(anthropic_router(core))
    app.include_router(generate_router(core))
    app.include_router(info_router(core))
    app.include_router(control_router(core))
    app.include_router(tokenize_router(core))
    if not core.settings.disable_playground:
        app.include_router(playground_router())
    if core.admin_key is not None:
        app.include_router(activity_router(core))
        app.include_router(corpora_router(core))
        app.include_router(drafters_router(core))
    _add_operator_routes(app, core)
    _add_error_handlers(app, core)
    _add_documents(app)
    _add_middleware(app, core)
    return app


def _add_middleware(app: FastAPI, core: GatewayCore) -> None:
    """Add the middleware; the one added last sees a request first."""
    settings = core.settings
    reject = functools.partial(_reject, core)
    app.add_middleware(BodyMiddleware, budget=core.bodies)
    app.add_middleware(IgnoredFieldsMiddleware, is_strict=settings.strict_fields)
    app.add_middleware(AccessMiddleware, policy=core.policy, reject=reject)
    app.add_middleware(HeadMiddleware)
    if settings.allowed_origins:
        # Without it, browsers hide the answers from pages. It comes before the
        # check of keys, because a browser's preflight has none, and a page must be
        # able to read that its key is wrong.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
    check = CallerCheck(settings.host, settings.allowed_hosts, settings.allowed_origins)
    app.add_middleware(CallerMiddleware, check=check, reject=reject)


def _reject(core: GatewayCore, request: Request, error: ForetokenError) -> None:
    core.reject(error, api=request.url.path, client_id=http.client_id(request), trace=http.trace_context(request))


def _add_operator_routes(app: FastAPI, core: GatewayCore) -> None:
    @app.get("/health", tags=["Operation"])
    async def health() -> Response:
        """Return 200 while this process lives."""
        return http.json_response({"status": "ok"})

    @app.get("/ping", tags=["Operation"])
    async def ping() -> Response:
        """Return 200 while this process lives, with an empty body, as in vLLM."""
        return PlainTextResponse("")

    @app.get("/ready", tags=["Operation"])
    async def ready() -> Response:
        """Return the state of verifiers and drafters; 200 if ready, else 503.

        Ready means that requests are taken and that, since the start, each drafter of the settings
        has attached or the wait for it has ended. Requests are taken during that wait. A caller
        without the key that this server needs gets the status alone.
        """
        infos = await core.verifiers.fetch_infos()
        is_ready = core.is_ready and any(infos.values())
        details: dict[str, Any] = {
            "status": "ready" if is_ready else "draining" if core.admission.draining else "not ready"
        }
        if callers.current().may_see:
            details["model"] = core.model_names[0]
            details["verifiers"] = [
                {
                    "address": client.address,
                    "up": client.is_up,
                    "reason": "" if client.is_up else client.reason,
                    "drafters": _drafters(infos.get(client.address)),
                }
                for client in core.verifiers.clients
            ]
        headers = {} if is_ready else {"retry-after": str(http.RETRY_AFTER_S)}
        return http.json_response(details, status=200 if is_ready else 503, headers=headers)

    @app.get("/version", tags=["Operation"])
    async def version() -> Response:
        """Return versions, the model, and each drafter with its transport."""
        infos = await core.verifiers.fetch_infos()
        return http.json_response(
            {
                "version": foretoken.__version__,
                "model": core.model_names[0],
                "generation_config": core.settings.generation_config,
                "sampling_defaults": core.sampling_defaults.as_dict(),
                "verifiers": [_verifier(address, info) for address, info in infos.items()],
            }
        )

    @app.get("/metrics", tags=["Operation"])
    async def metrics() -> Response:
        """Return metrics in Prometheus' text format, with fresh figures of the verifiers."""
        infos = await core.verifiers.fetch_infos()
        return Response(await core.metrics.render(infos), media_type=telemetry.EXPOSITION_TYPE)


def _verifier(address: str, info: VerifierInfo | None) -> dict[str, Any]:
    names = ("version", "model_name", "model_fingerprint", "device", "dtype", "mode", "max_model_len", "vocab_size")
    known = {} if info is None else {name: getattr(info, name) for name in names}
    if info is not None and not callers.current().may_use(info.model_name):
        del known["model_name"]
    return {"address": address, **known, "drafters": _drafters(info)}


def _drafters(info: VerifierInfo | None) -> list[dict[str, Any]]:
    names = ("name", "algorithm", "transport", "state", "reason", "num_attaches")
    drafters = () if info is None else info.drafters
    return [{name: getattr(drafter, name) for name in names} for drafter in drafters]


def _add_error_handlers(app: FastAPI, core: GatewayCore) -> None:
    @app.exception_handler(ForetokenError)
    async def foretoken_error(request: Request, error: ForetokenError) -> Response:
        _reject(core, request, error)
        return error_shapes.error_response(request.url.path, error)

    @app.exception_handler(ClientDisconnect)
    async def client_gone(request: Request, error: ClientDisconnect) -> Response:
        """Count a client that left while it sent its body."""
        core.give_up(request.url.path, http.client_id(request))
        return Response(status_code=499)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        """Answer the routing's errors: unknown path, wrong method."""
        path, headers = request.url.path, {name.lower(): text for name, text in (error.headers or {}).items()}
        if error.status_code == 405 and (methods := methods_of(app.openapi(), path)):
            # The routing names the methods of one route only.
            headers["allow"] = ", ".join(methods)
        if error.status_code == 405 and answers_head(path):
            headers["allow"] += ", HEAD"
        return error_shapes.status_response(path, error.status_code, str(error.detail), headers)

    @app.exception_handler(Exception)
    async def unexpected_error(request: Request, error: Exception) -> Response:
        """Hide an internal error from the client; the server logs it with its stack."""
        return error_shapes.error_response(request.url.path, ForetokenError("internal error"))


def _add_documents(app: FastAPI) -> None:
    """Serve the OpenAPI document, complete, and a page that shows it."""
    generate = app.openapi

    @functools.cache
    def openapi() -> dict[str, Any]:
        return complete(generate())

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        """Return the OpenAPI document as a page."""
        address = str(request.base_url).rstrip("/")
        return HTMLResponse(page(openapi(), address), headers={"content-security-policy": SECURITY_POLICY})

    app.openapi = openapi  # type: ignore[method-assign]
