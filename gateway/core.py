"""What REST and gRPC share: checks, admission, the life of a generation, and the one log line at its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence

from foretoken import limits
from foretoken.errors import (
    ForetokenError,
    NotFoundError,
)
from foretoken.limits import ModelLimits
from gateway.admission import Admission
from gateway.config import GatewaySettings
from gateway.generation import ClientGoneError, Generation, GenerationRequest, Prompt, sum_stats
from gateway.messages import VerifierInfo
from gateway.metrics import GatewayMetrics
from gateway.tokenizer import Tokenizer
from gateway.verifier_client import VerifierClient

logger = logging.getLogger(__name__)

# Longer texts are encoded in a thread: the event loop serves all other streams meanwhile.
INLINE_TEXT_CHARS = 4096


class GatewayCore:
    """The gateway without its protocols."""

    def __init__(self, settings: GatewaySettings, tokenizer: Tokenizer, client: VerifierClient) -> None:
        self.settings = settings
        self.tokenizer = tokenizer
        self.client = client
        self.admission = Admission(settings.max_concurrent_requests)
        self.metrics = GatewayMetrics(settings.served_model_name, lambda: self.admission.num_requests)
        self.created = int(time.time())

    @property
    def is_ready(self) -> bool:
        """Whether a new request would be taken now."""
        return self.client.is_up and not self.admission.draining

    @property
    def info(self) -> VerifierInfo:
        """The verifier's latest figures. Raises UnavailableError before it was first reached."""
        return self.client.info

    @property
    def model_limits(self) -> ModelLimits:
        return self.client.info.limits

    @property
    def timeout_ms(self) -> int:
        """Milliseconds that a request may take."""
        return round(1e3 * self.settings.request_timeout_s)

    def check_model(self, name: str | None) -> None:
        """Raise NotFoundError unless ``name`` is the served model, or absent."""
        served = self.settings.served_model_name
        if name and name != served:
            raise NotFoundError(f"the model {name!r} does not exist; this server serves {served!r}", field="model")

    async def encode(self, text: str, *, field: str = "prompt", add_special_tokens: bool = True) -> Prompt:
        """Token ids of a prompt's text. Raises InvalidRequestError naming ``field`` for one that is too long."""
        limits.check_text(field, text, limits.MAX_PROMPT_CHARS)
        if len(text) <= INLINE_TEXT_CHARS:
            ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            ids = await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return Prompt(tuple(ids), text)

    def check(self, request: GenerationRequest, *, prompt_field: str = "prompt") -> None:
        """Raise InvalidRequestError naming the first field that is out of its limits."""
        model = self.model_limits
        limits.check_sampling(request.sampling, model)
        limits.check_speculation(request.speculation, model)
        limits.check_number("n", request.n, limits.Range(1, limits.MAX_N))
        limits.check_count(prompt_field, len(request.prompts), limits.MAX_PROMPTS_PER_REQUEST, least=1)
        for prompt in request.prompts:
            limits.check_prompt(prompt.ids, model, field=prompt_field)
        check_stop(request.stop)
        if request.cache_salt is not None:
            limits.check_text("cache_salt", request.cache_salt, limits.MAX_CACHE_SALT_CHARS)

    @contextlib.asynccontextmanager
    async def generate(self, request: GenerationRequest, *, api: str, client_id: str = "") -> AsyncIterator[Generation]:
        """A started generation; when the block is left, whatever still runs is dropped, counted and logged.

        ``client_id`` is the caller's own name for the request, for the log. Raises QueueFullError or
        UnavailableError where it cannot start.
        """
        with self.admission.enter():
            generation = Generation(
                request, self.client, self.tokenizer, self.info.max_model_len, self.metrics.tokens_arrived
            )
            failure: str | None = "cancelled"
            try:
                generation.start()
                yield generation
                failure = None if all(output.ended for output in generation.outputs) else "cancelled"
            except ForetokenError as error:
                failure = error.status.name.lower()
                raise
            except (ClientGoneError, asyncio.CancelledError, GeneratorExit):
                raise
            except BaseException:
                failure = "internal"
                raise
            finally:
                generation.close()
                self._ended(generation, failure, api, client_id)

    def reject(self, error: ForetokenError) -> None:
        """Count a request that was refused before it ran."""
        self.metrics.request_rejected(error.status.name.lower())

    def give_up(self, api: str, client_id: str) -> None:
        """Count and log a request whose client went away before it ran."""
        self.metrics.request_rejected("cancelled")
        logger.info("request", extra={"client_request_id": client_id, "api": api, "outcome": "cancelled"})

    def _ended(self, generation: Generation, failure: str | None, api: str, client_id: str) -> None:
        seconds = time.monotonic() - generation.started_at
        self.metrics.request_ended(generation, seconds, failure)
        request, outputs = generation.request, generation.outputs
        stats = sum_stats(outputs)
        firsts = [output.first_token_at for output in outputs if output.first_token_at]
        logger.info(
            "request",
            extra={
                "request_id": request.id,
                "client_request_id": client_id,
                "api": api,
                "outcome": failure or "ok",
                "finish_reasons": [output.finish_reason and output.finish_reason.value for output in outputs],
                "prompt_tokens": generation.prompt_tokens,
                "cached_tokens": generation.cached_tokens,
                "completion_tokens": generation.completion_tokens,
                "time_to_first_token_ms": round(1e3 * (min(firsts) - generation.started_at), 3) if firsts else None,
                "duration_ms": round(1e3 * seconds, 3),
                "drafter": stats.drafter,
                "decode_steps": stats.num_decode_steps,
                "draft_tokens": stats.num_draft_tokens,
                "accepted_tokens": stats.num_accepted_tokens,
            },
        )


def check_stop(stops: Sequence[str]) -> None:
    """Raise InvalidRequestError naming ``stop`` unless all stop strings are within the limits."""
    limits.check_count("stop", len(stops), limits.MAX_STOP_STRINGS)
    for stop in stops:
        limits.check_text("stop", stop, limits.MAX_STOP_STRING_CHARS, min_chars=1)
