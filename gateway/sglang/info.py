"""Serve SGLang's /server_info, /model_info and /health_generate."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

import foretoken
from foretoken.errors import ForetokenError, UnavailableError
from foretoken.sampling import SamplingParams, SpeculationOptions
from gateway import http
from gateway.core import GatewayCore
from gateway.generation_request import GenerationRequest, Prompt
from gateway.messages import VerifierInfo

HEALTH_TIMEOUT_S = 20.0
# Settings that anybody may read.
SETTINGS = (
    "host",
    "port",
    "grpc_port",
    "gateway_workers",
    "request_timeout_s",
    "resume_attempts",
    "verifier_wait_s",
    "client_timeout_s",
    "speculative_metrics",
    "max_concurrent_requests",
    "max_body_bytes_in_flight",
    "allowed_hosts",
    "allowed_origins",
    "vllm_metric_names",
    "drain_timeout_s",
)


def info_router(core: GatewayCore) -> APIRouter:
    """Return the routes of one gateway."""
    router = APIRouter(tags=["SGLang"])

    @router.get("/server_info")
    @router.get("/get_server_info")
    async def server_info() -> Response:
        """Return settings without secrets, and the figures of each verifier.

        ``avg_spec_accept_length`` is 1 + accepted draft tokens ÷ verified drafts, of all requests
        since the verifier's start. It is absent before the first draft.
        """
        infos = await core.verifiers.fetch_infos()
        known = [info for info in infos.values() if info is not None]
        if not known:
            raise UnavailableError("not ready: no verifier answers")
        first = known[0]
        return http.json_response(
            {
                **{name: getattr(core.settings, name) for name in SETTINGS},
                "served_model_name": core.model_names[0],
                "served_model_names": core.model_names,
                "version": foretoken.__version__,
                "model_path": str(core.settings.model),
                "tokenizer_path": str(core.settings.model),
                "context_length": first.max_model_len,
                "dtype": first.dtype,
                "device": first.device,
                "page_size": first.block_size,
                "max_total_num_tokens": sum(info.num_blocks * info.block_size for info in known),
                "max_queued_requests": sum(info.max_queue for info in known),
                "speculative_algorithm": next((drafter.algorithm for drafter in first.drafters), None),
                "status": "ready" if core.is_ready else "not ready",
                "internal_states": [_internal_state(info) for info in known],
            }
        )

    @router.get("/model_info")
    @router.get("/get_model_info")
    async def model_info() -> Response:
        """Return the model's folder and what it is."""
        info = await core.info()
        return http.json_response(
            {
                "model_path": str(core.settings.model),
                "tokenizer_path": str(core.settings.model),
                "served_model_name": core.model_names[0],
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": info.model_fingerprint,
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "max_model_len": info.max_model_len,
                "vocab_size": info.vocab_size,
            }
        )

    @router.get("/health_generate")
    async def health_generate(request: Request) -> Response:
        """Generate one token; 200 if it came, else 503."""
        generation = GenerationRequest(
            id=http.new_id("health"),
            prompts=(Prompt((0,)),),
            sampling=SamplingParams(temperature=0.0, max_tokens=1, seed=0, ignore_eos=True),
            speculation=SpeculationOptions(enabled=False),
            timeout_ms=round(1e3 * HEALTH_TIMEOUT_S),
        )
        try:
            await core.info()
            async with (
                asyncio.timeout(HEALTH_TIMEOUT_S),
                core.generate(generation, api=request.url.path) as running,
            ):
                await running.run()
        except TimeoutError:
            raise UnavailableError(f"no token came within {HEALTH_TIMEOUT_S:g} s") from None
        except ForetokenError as error:
            unavailable = UnavailableError(error.message)
            unavailable.is_reported = error.is_reported
            raise unavailable from error
        return http.json_response({"status": "ok"})

    return router


def _internal_state(info: VerifierInfo) -> dict[str, Any]:
    state: dict[str, Any] = {
        "num_running_reqs": info.num_running,
        "num_waiting_reqs": info.num_waiting,
        "num_steps": info.num_steps,
        "num_generated_tokens": info.num_generated_tokens,
        "kv_cache_free_blocks": info.num_free_blocks,
        "drafters": [drafter.name for drafter in info.drafters],
    }
    drafts = sum(drafter.num_drafts for drafter in info.drafters)
    accepted = sum(drafter.num_accepted_tokens for drafter in info.drafters)
    return {**state, "avg_spec_accept_length": 1 + accepted / drafts} if drafts else state
