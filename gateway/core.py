"""Check, admit, run, count, log and trace requests, for REST and gRPC alike."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from foretoken import limits
from foretoken.errors import ForetokenError, InvalidRequestError, NotFoundError, QueueFullError, UnavailableError
from foretoken.limits import ModelLimits
from foretoken.sampling import SpeculationOptions
from foretoken.tracing import TraceContext, Tracer
from gateway.access import caller as callers
from gateway.access.policy import Policy
from gateway.admission import Admission
from gateway.bodies import BodyBudget
from gateway.chat.chat_reply import ChatForms
from gateway.config import GatewaySettings
from gateway.generation import ClientGoneError, Generation
from gateway.generation_request import GenerationRequest
from gateway.messages import VerifierInfo
from gateway.metrics import GatewayMetrics
from gateway.recent_requests import RecentRequests
from gateway.request_span import end_span, refused_span, start_span
from gateway.running import RunningRequests
from gateway.sampling_defaults import SamplingDefaults
from gateway.texts import Texts
from gateway.tokenizer import Tokenizer
from gateway.verifier_pool import VerifierPool

logger = logging.getLogger(__name__)

# Statuses with which a verifier refuses a sequence: its queue is full, or only it could check a
# field.
REFUSALS = frozenset(error.status.name.lower() for error in (QueueFullError, InvalidRequestError))


class GatewayCore:
    """Runs requests for all protocols."""

    def __init__(
        self,
        settings: GatewaySettings,
        tokenizer: Tokenizer,
        verifiers: VerifierPool,
        tracer: Tracer | None = None,
        admin_key: str | None = None,
        policy: Policy | None = None,
    ) -> None:
        """``admin_key`` protects the operator's endpoints; None: there are none.

        ``policy`` decides who may call; None: everybody, and the operator with its key.
        """
        self.settings = settings
        self.admin_key = admin_key
        self.policy = policy or Policy(None, models=settings.served_model_names, operator_key=admin_key)
        self.tokenizer = tokenizer
        self.verifiers = verifiers
        self.admission = Admission(settings.max_concurrent_requests)
        self.bodies = BodyBudget(settings.max_body_bytes_per_process)
        self.metrics = GatewayMetrics(
            settings.served_model_name,
            lambda: self.admission.num_requests,
            lambda: verifiers.num_waiting,
            lambda: verifiers.known.num_routed,
            vllm_names=settings.vllm_metric_names,
        )
        self.created = int(time.time())
        self.running = RunningRequests()
        # Aborts a tenant's requests by name, in all gateway processes.
        self.abort: Callable[[str | None, str], Awaitable[int]] = self._abort_here
        self.recent = RecentRequests()
        # What all gateway processes do, one entry each.
        self.activity: Callable[[], Awaitable[list[dict[str, Any]]]] = self._activity_here
        self.sampling_defaults = SamplingDefaults.of_settings(settings)
        self.chat_forms = ChatForms(tokenizer, settings.tool_call_parser, settings.reasoning_parser)
        self.texts = Texts(tokenizer, self.info)
        self._tracer = tracer

    @property
    def is_ready(self) -> bool:
        """Return whether the gateway takes requests.

        Its verifiers must also have the drafters that they wait for at a start.
        """
        return self.verifiers.is_ready and not self.admission.draining

    async def info(self) -> VerifierInfo:
        """Return a verifier's latest figures; right after its start the gateway waits for them.

        Raises UnavailableError if no verifier answers in time, QueueFullError if too many wait.
        """
        with contextlib.suppress(UnavailableError):
            return self.verifiers.info
        with self.admission.enter():
            return await self.verifiers.wait_info()

    @property
    def timeout_ms(self) -> int:
        """Milliseconds that a request may take."""
        return round(1e3 * self.settings.request_timeout_s)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names of the served model that the caller may use, at least one."""
        return tuple(filter(callers.current().may_use, self.settings.served_model_names))

    def check_model(self, name: str | None) -> None:
        """Raise NotFoundError unless ``name`` is one of the served model's, or absent.

        Raises PermissionDeniedError if the caller may not use it.
        """
        served = self.model_names
        callers.current().check_model(name or served[0])
        if name and name not in served:
            known = ", ".join(map(repr, served))
            raise NotFoundError(f"the model {name!r} does not exist; this server serves {known}", field="model")

    def answered_model(self, name: str | None) -> str:
        """Return the name of the model in the answer to a request for ``name``."""
        return name or self.model_names[0]

    def check_open(self) -> None:
        """Raise QueueFullError or UnavailableError if the caller's request would be refused now.

        Call it before parsing and encoding: under overload a refusal must cost next to nothing.
        """
        self.admission.check()
        callers.current().check_quota()
        self.verifiers.check_room(1)

    async def check(self, request: GenerationRequest, *, prompt_field: str = "prompt") -> None:
        """Raise InvalidRequestError naming the first field that is out of its limits."""
        model = await self._limits(request.speculation)
        limits.check_sampling(request.sampling, model)
        limits.check_speculation(request.speculation, model)
        limits.check_number("n", request.n, limits.Range(1, limits.MAX_N))
        limits.check_count(prompt_field, len(request.prompts), limits.MAX_PROMPTS_PER_REQUEST, least=1)
        for prompt in request.prompts:
            limits.check_prompt(prompt.ids, model, field=prompt_field)
        check_stop(request.stop)
        limits.check_number("priority", request.priority, limits.PRIORITY_RANGE)
        callers.current().priority(request.priority)
        limits.check_prediction(request.prediction_ids, model)
        if request.prediction_ids and len(request.prompts) > 1:
            # One text can be expected from several choices of a prompt, not from several prompts.
            raise InvalidRequestError("prediction needs a request of one prompt", field="prediction")
        if request.cache_salt is not None:
            limits.check_text("cache_salt", request.cache_salt, limits.MAX_CACHE_SALT_CHARS)

    async def _limits(self, options: SpeculationOptions) -> ModelLimits:
        """Return the model's limits; refresh them for an unknown drafter, which may be new."""
        model = (await self.info()).limits
        if set(limits.named_drafters(options)) <= set(model.drafter_names):
            return model
        await self.verifiers.refresh_infos()
        return self.verifiers.info.limits

    @contextlib.asynccontextmanager
    async def generate(self, request: GenerationRequest, *, api: str, client_id: str = "") -> AsyncIterator[Generation]:
        """Start a generation. At the end of the block, drop what still runs; count, log and trace.

        ``client_id`` is the client's name for the request in the log. Raises QueueFullError at the
        limit of requests, RateLimitError at one of the caller's, and UnavailableError while
        draining.
        """
        caller = callers.current()
        max_model_len = self.verifiers.info.max_model_len
        with (
            self.admission.enter(),
            caller.running(request.num_prompt_tokens, request.max_output_tokens(max_model_len)),
        ):
            request = dataclasses.replace(
                request,
                cache_salt=caller.tenant(request.cache_salt),
                priority=caller.priority(request.priority),
            )
            span, request = start_span(self._tracer, request, self.settings.served_model_name, api, client_id)
            generation = Generation(request, self.verifiers, self.tokenizer, max_model_len, self.metrics)
            failure: str | None = "cancelled"
            try:
                with self.running.holding(generation, client_id, caller.name):
                    generation.start()
                    yield generation
                failure = None if all(output.ended for output in generation.outputs) else "cancelled"
            except ForetokenError as error:
                failure = error.status.name.lower()
                # ``_ended`` reports it: whoever answers the client must not do so again.
                error.is_reported = True
                raise
            except (ClientGoneError, asyncio.CancelledError, GeneratorExit):
                raise
            except BaseException:
                failure = "internal"
                raise
            finally:
                generation.close()
                caller.spend(generation.completion_tokens)
                self._ended(generation, failure, api, client_id)
                if span is not None:
                    end_span(span, generation, failure)

    async def _abort_here(self, name: str | None, tenant: str) -> int:
        return self.running.abort(name, tenant)

    def own_activity(self) -> dict[str, Any]:
        """Return what this process does now, and the requests that it ended lately."""
        return {
            "num_requests": self.admission.num_requests,
            "num_waiting": self.verifiers.num_waiting,
            "requests": self.recent.latest(),
        }

    async def _activity_here(self) -> list[dict[str, Any]]:
        return [self.own_activity()]

    def reject(self, error: ForetokenError, *, api: str, client_id: str, trace: TraceContext | None) -> None:
        """Count, log and trace a request that was refused before it ran, unless already done."""
        if error.is_reported:
            return
        error.is_reported = True
        outcome = error.status.name.lower()
        caller = callers.current()
        self.metrics.request_rejected(outcome, caller.name)
        trace = refused_span(self._tracer, error, trace, self.settings.served_model_name, api, client_id)
        logger.info(
            "request refused",
            extra={
                "client_request_id": client_id,
                "trace_id": trace.trace_id if trace else None,
                "api": api,
                "outcome": outcome,
                "field": error.field,
                # Our own words; other messages may quote the client's text.
                "reason": error.message if isinstance(error, QueueFullError | UnavailableError) else None,
                **caller.log_fields,
            },
        )

    def give_up(self, api: str, client_id: str) -> None:
        """Count and log a request whose client went away before it ran."""
        caller = callers.current()
        self.metrics.request_rejected("cancelled", caller.name)
        fields = {"client_request_id": client_id, "api": api, "outcome": "cancelled", **caller.log_fields}
        logger.info("request", extra=fields)

    def _ended(self, generation: Generation, failure: str | None, api: str, client_id: str) -> None:
        seconds = time.monotonic() - generation.started_at
        caller = callers.current()
        if failure in REFUSALS and not generation.completion_tokens:
            # The verifier refused it, as the gateway might have.
            self.metrics.request_rejected(failure, caller.name)
        else:
            self.metrics.request_ended(generation, seconds, failure, caller.name)
        request, outputs = generation.request, generation.outputs
        stats = generation.speculation
        first_s = generation.time_to_first_token_s
        figures = {
            "api": api,
            "outcome": failure or "ok",
            "prompt_tokens": generation.prompt_tokens,
            "cached_tokens": generation.cached_tokens,
            "completion_tokens": generation.completion_tokens,
            "time_to_first_token_ms": None if first_s is None else round(1e3 * first_s, 3),
            "duration_ms": round(1e3 * seconds, 3),
            "resumes": generation.num_resumes,
            "drafter": stats.drafter or generation.drafter_of_tokens,
            "decode_steps": stats.num_decode_steps,
            "draft_tokens": stats.num_draft_tokens,
            "accepted_tokens": stats.num_accepted_tokens,
            **caller.log_fields,
        }
        self.recent.add(figures)
        logger.info(
            "request",
            extra={
                "request_id": request.id,
                "client_request_id": client_id,
                "trace_id": request.trace.trace_id if request.trace else None,
                "verifiers": generation.verifiers,
                "finish_reasons": [output.finish_reason and output.finish_reason.value for output in outputs],
                **figures,
            },
        )


def check_stop(stops: Sequence[str]) -> None:
    """Raise InvalidRequestError naming ``stop`` unless all stop strings are within the limits."""
    limits.check_count("stop", len(stops), limits.MAX_STOP_STRINGS)
    for stop in stops:
        limits.check_text("stop", stop, limits.MAX_STOP_STRING_CHARS, min_chars=1)
