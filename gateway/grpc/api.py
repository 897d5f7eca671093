"""Serve the public gRPC API, GatewayService. Protobuf types stop here."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import uuid
from collections.abc import AsyncGenerator, Iterator
from typing import TypeAlias

import grpc

import foretoken
from foretoken import limits, rpc, wire
from foretoken.errors import ForetokenError, InvalidRequestError
from foretoken.sampling import SamplingParams
from gateway import http
from gateway.core import GatewayCore
from gateway.fields import draw_seed, text_list
from gateway.generation_request import GenerationRequest, Prompt
from gateway.output import Delta, Output
from gateway.slow_reader import SlowReaderTimeout
from protos import common_pb2, gateway_pb2, gateway_pb2_grpc

SERVICE_NAME = "foretoken.gateway.v1.GatewayService"
# As in logs and spans.
API = "grpc"
# Clients refuse messages above 4 MiB by default. 1,024 tokens with 20 logprobs each take 0.3 MB,
# the text at most 1 MB.
MAX_CHUNK_TOKENS = 1024
MAX_CHUNK_CHARS = 1 << 18
Context: TypeAlias = "grpc.aio.ServicerContext[gateway_pb2.GenerateRequest, gateway_pb2.GenerateResponse]"
ModelContext: TypeAlias = "grpc.aio.ServicerContext[gateway_pb2.GetModelRequest, gateway_pb2.GetModelResponse]"


class GatewayServicer(gateway_pb2_grpc.GatewayServiceServicer):
    """Serves GatewayService. foretoken.rpc's interceptor turns ForetokenErrors into statuses."""

    def __init__(self, core: GatewayCore) -> None:
        self._core = core
        self._ending_calls: set[asyncio.Task[None]] = set()

    async def Generate(
        self, request: gateway_pb2.GenerateRequest, context: Context
    ) -> AsyncGenerator[gateway_pb2.GenerateResponse, None]:
        entered = False
        client_id = http.clean_id(request.request_id)
        timeout = SlowReaderTimeout(context, self._core.settings.client_timeout_s, self._ending_calls)
        try:
            generation_request = await self._read(request, context)
            name = request.request_id or generation_request.id
            entered = True
            async with self._core.generate(generation_request, api=API, client_id=client_id) as generation:
                while not generation.done:
                    deltas = await generation.wait()
                    # Build all responses before sending: the outputs continue during a send.
                    responses = [_responses(generation.outputs[delta.index], delta, name) for delta in deltas]
                    for response in itertools.chain.from_iterable(responses):
                        with timeout:
                            yield response
        except asyncio.CancelledError:
            if not entered:
                self._core.give_up(API, client_id)
            raise
        except ForetokenError as error:
            self._core.reject(error, api=API, client_id=client_id, trace=rpc.trace_context(context))
            raise

    async def GetModel(
        self, request: gateway_pb2.GetModelRequest, context: ModelContext
    ) -> gateway_pb2.GetModelResponse:
        info = await self._core.info()
        return gateway_pb2.GetModelResponse(
            model=self._core.model_names[0],
            version=foretoken.__version__,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            drafters=[drafter.name for drafter in info.drafters],
            model_fingerprint=info.model_fingerprint,
        )

    async def _read(self, request: gateway_pb2.GenerateRequest, context: Context) -> GenerationRequest:
        """Return the checked request.

        Raises InvalidRequestError, or NotFoundError for the model.
        """
        core = self._core
        core.check_open()
        core.check_model(request.model)
        limits.check_text("request_id", request.request_id, limits.MAX_REQUEST_ID_CHARS)
        limits.check_count("stop", len(request.stop), limits.MAX_STOP_STRINGS)
        limits.check_count("bad_words", len(request.bad_words), limits.MAX_BAD_WORDS)
        bad_words = text_list("bad_words", request.bad_words, limits.MAX_BAD_WORDS, limits.MAX_BAD_WORD_CHARS)
        sampling = self._sampling(request.sampling)
        if bad_words:
            bad_token_ids = (*sampling.bad_token_ids, *await core.texts.encode_bad_words(bad_words))
            sampling = dataclasses.replace(sampling, bad_token_ids=bad_token_ids)
        truncate = request.truncate_prompt_tokens if request.HasField("truncate_prompt_tokens") else None
        kept = await core.texts.num_kept(truncate, sampling.max_tokens)
        generation = GenerationRequest(
            id=f"grpc-{uuid.uuid4().hex}",
            prompts=(await self._prompt(request, kept),),
            sampling=sampling,
            speculation=wire.speculation_from_proto(request.speculation),
            n=request.n if request.HasField("n") else 1,
            stop=tuple(request.stop),
            include_stop=request.include_stop_str_in_output,
            cache_salt=request.cache_salt if request.HasField("cache_salt") else None,
            timeout_ms=_timeout_ms(context, core.timeout_ms),
            trace=rpc.trace_context(context),
            prediction_ids=await self._prediction(request),
            priority=request.priority,
        )
        await core.check(generation, prompt_field=request.WhichOneof("prompt") or "prompt")
        return generation

    def _sampling(self, message: common_pb2.SamplingParams) -> SamplingParams:
        """Return the sampling parameters with the server's defaults.

        A request without a seed gets one.
        """
        sampling = wire.sampling_from_proto(message)
        defaults = self._core.sampling_defaults
        given = [field.name for field, _ in message.ListFields()]
        changes = defaults.of_request(sampling, given)
        if "max_tokens" not in given:
            changes["max_tokens"] = defaults.max_tokens_or(sampling.max_tokens)
        if "seed" not in given:
            changes["seed"] = draw_seed(None)
        return dataclasses.replace(sampling, **changes)

    async def _prompt(self, request: gateway_pb2.GenerateRequest, kept: int | None) -> Prompt:
        kind = request.WhichOneof("prompt")
        if kind is None:
            raise InvalidRequestError("give either text or token_ids", field="prompt")
        if kind == "token_ids":
            if kept is not None:
                return Prompt(tuple(request.token_ids.ids[-kept:]))
            # Check before copying: a message may hold millions of ids.
            limits.check_prompt_length(kind, len(request.token_ids.ids), (await self._core.info()).max_model_len)
            return Prompt(tuple(request.token_ids.ids))
        add_special_tokens = not request.skip_special_tokens_in_prompt
        return await self._core.texts.encode(
            request.text, field="text", add_special_tokens=add_special_tokens, keep_last=kept
        )

    async def _prediction(self, request: gateway_pb2.GenerateRequest) -> tuple[int, ...]:
        if request.WhichOneof("prediction") == "prediction_token_ids":
            count = len(request.prediction_token_ids.ids)
            limits.check_prediction_length("prediction", count, (await self._core.info()).max_model_len)
            return tuple(request.prediction_token_ids.ids)
        return await self._core.texts.encode_prediction(request.prediction_text, field="prediction_text")


def _timeout_ms(context: Context, most: int) -> int:
    """Return the client's remaining deadline, at most the server's."""
    left = context.time_remaining()
    return most if left is None else max(1, min(most, round(1e3 * left)))


def _responses(output: Output, delta: Delta, name: str) -> list[gateway_pb2.GenerateResponse]:
    responses = [gateway_pb2.GenerateResponse(chunk=chunk) for chunk in _chunks(output, delta)]
    if delta.finished:
        responses.append(gateway_pb2.GenerateResponse(complete=_complete(output, name)))
    return responses


def _chunks(output: Output, delta: Delta) -> Iterator[gateway_pb2.Chunk]:
    """Yield the delta in chunks that clients accept; more than one only for a slow reader."""
    first = len(output.token_ids) - len(delta.token_ids)
    num_entries = max(len(delta.token_ids), len(delta.prompt_logprobs))
    count = max(-(-num_entries // MAX_CHUNK_TOKENS), -(-len(delta.text) // MAX_CHUNK_CHARS))
    for number in range(count):
        tokens = slice(number * MAX_CHUNK_TOKENS, (number + 1) * MAX_CHUNK_TOKENS)
        text = slice(number * MAX_CHUNK_CHARS, (number + 1) * MAX_CHUNK_CHARS)
        token_ids = delta.token_ids[tokens]
        offset = first + min(tokens.start, len(delta.token_ids))
        yield gateway_pb2.Chunk(
            choice_index=output.index,
            offset=offset,
            token_ids=token_ids,
            text=delta.text[text],
            logprobs=wire.logprobs_to_proto(delta.logprobs[tokens]),
            sources=delta.sources[tokens],
            num_output_tokens=offset + len(token_ids),
            prompt_logprobs=wire.logprobs_to_proto(delta.prompt_logprobs[tokens]),
        )


def _complete(output: Output, request_id: str) -> gateway_pb2.Complete:
    assert output.finished is not None and output.finish_reason is not None
    return gateway_pb2.Complete(
        choice_index=output.index,
        reason=wire.reason_to_proto(output.finish_reason),
        num_prompt_tokens=len(output.prompt.ids),
        num_cached_tokens=output.finished.num_cached_tokens,
        num_output_tokens=len(output.token_ids),
        speculation=wire.stats_to_proto(output.finished.speculation),
        stop=output.matched if isinstance(output.matched, str) else "",
        request_id=request_id,
        seed=output.spec.sampling.seed,
        num_accepted_prediction_tokens=output.prediction.num_accepted,
        num_rejected_prediction_tokens=output.prediction.num_rejected,
    )
