"""Serve POST /generate in SGLang's shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from foretoken import limits
from foretoken.errors import InvalidRequestError
from foretoken.results import FinishReason, TokenLogprobs
from foretoken.sampling import Grammar, SamplingParams
from gateway import http
from gateway.core import GatewayCore
from gateway.exchange import Exchange
from gateway.fields import (
    Fields,
    SpeculativeFields,
    allowed_ids,
    check_in_range,
    draw_seed,
    is_id_list,
    one_or_many_strings,
    text_list,
    token_biases,
    validate,
)
from gateway.generation import Generation
from gateway.generation_request import GenerationRequest, Prompt
from gateway.grammar import checked, schema_grammar, the_one
from gateway.output import Delta, Output
from gateway.reply_format import ReplyFormat, event
from gateway.tokenizer import Tokenizer
from gateway.unsupported_fields import UNSUPPORTED

DEFAULT_MAX_NEW_TOKENS = 128
# Fields that would change the output and cannot be obeyed, with the reason.
UNSUPPORTED_HERE: Mapping[str, str] = {
    **UNSUPPORTED,
    "image_data": "the engine takes text only",
    "video_data": "the engine takes text only",
    "audio_data": "the engine takes text only",
    "token_ids_logprob": "use top_logprobs_num",
}
IGNORED_IN_SAMPLING = frozenset(
    # White space between special tokens, and the pace of the stream.
    {"spaces_between_special_tokens", "stream_interval"}
)


class SglangSamplingFields(Fields):
    """``sampling_params`` of POST /generate. Ranges: foretoken/limits.py."""

    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: Any = Field(None, description="A string, or a list of at most 64 strings.")
    stop_token_ids: list[int] = Field(default_factory=list)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    n: int = 1
    sampling_seed: int | None = None
    logit_bias: dict[str, float] | None = None
    json_schema: Any = Field(None, description="A JSON schema's text, or the schema itself.")
    regex: str | None = None
    ebnf: str | None = Field(None, description="A grammar in EBNF (GBNF) or llguidance's Lark form.")
    # vLLM's.
    allowed_token_ids: list[int] | None = Field(None, description="Only these tokens may be sampled.")
    bad_words: list[str] = Field(default_factory=list, description="Texts whose tokens the output must not contain.")


class GenerateFields(Fields):
    """Body of POST /generate."""

    text: Any = Field(None, description="A string or a list of strings; or give input_ids.")
    input_ids: Any = Field(None, description="A list of token ids or a list of such lists; or give text.")
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    stream: bool = False
    return_logprob: bool = False
    top_logprobs_num: int = 0
    logprob_start_len: int = -1
    return_text_in_logprobs: bool = False
    rid: Any = Field(None, description="The request's name, or a list with one for each prompt.")
    priority: int = Field(0, description="Requests with a lower number start first and are preempted last.")
    model: str | None = None
    cache_salt: str | None = None
    # Our extensions.
    prediction: Any = Field(None, description="The expected output: a string or a list of token ids.")
    speculative: SpeculativeFields = SpeculativeFields()


class SglangFormat(ReplyFormat):
    """Writes one object, or a list for several prompts or choices.

    Streamed objects are cumulative, as in SGLang.
    """

    def __init__(self, fields: GenerateFields, tokenizer: Tokenizer, *, many: bool) -> None:
        self._fields = fields
        self._tokenizer = tokenizer
        self._many = many
        self._texts: dict[int, str] = {}
        self._logprobs: dict[int, list[TokenLogprobs]] = {}
        self._prompt_logprobs: dict[int, list[TokenLogprobs]] = {}

    def whole(self, generation: Generation, deltas: list[Delta]) -> bytes:
        answers = [self._answer(generation, delta) for delta in deltas]
        return orjson.dumps(answers if self._many else answers[0])

    def chunk(self, generation: Generation, delta: Delta) -> bytes:
        answer = self._answer(generation, delta)
        return event({**answer, "index": delta.index} if self._many else answer)

    def _answer(self, generation: Generation, delta: Delta) -> dict[str, Any]:
        output = generation.outputs[delta.index]
        text = self._texts[delta.index] = self._texts.get(delta.index, "") + delta.text
        return {"text": text, "output_ids": output.token_ids, "meta_info": self._meta_info(generation, output, delta)}

    def _meta_info(self, generation: Generation, output: Output, delta: Delta) -> dict[str, Any]:
        info: dict[str, Any] = {
            "id": generation.request.output_ids[output.index],
            "finish_reason": _finish_reason(output),
            "prompt_tokens": len(output.prompt.ids),
            "completion_tokens": len(output.token_ids),
        }
        if self._fields.return_logprob:
            info |= self._logprob_lists(output, delta)
        if output.finished is not None:
            stats = output.finished.speculation
            num_tokens = len(output.token_ids) - output.num_resumed_tokens
            info |= {
                "seed": output.spec.sampling.seed,
                "cached_tokens": output.finished.num_cached_tokens,
                "e2e_latency": max(output.times.last_at - generation.started_at, 0.0),
                "spec_verify_ct": stats.num_decode_steps,
                # SGLang's formula: it counts the prefill's token and a trimmed last step.
                "spec_accept_length": num_tokens / stats.num_decode_steps if stats.num_decode_steps else 1.0,
                "spec_accept_token_num": stats.num_accepted_tokens,
                "spec_draft_token_num": stats.num_draft_tokens,
                "spec_accept_rate": stats.draft_acceptance_rate,
                "accepted_prediction_tokens": output.prediction.num_accepted,
                "rejected_prediction_tokens": output.prediction.num_rejected,
            }
        return info

    def _logprob_lists(self, output: Output, delta: Delta) -> dict[str, Any]:
        entries = self._logprobs.setdefault(output.index, [])
        entries += delta.logprobs
        lists = {
            "output_token_logprobs": [self._triple(entry.logprob, entry.token_id) for entry in entries],
            "output_top_logprobs": [self._top(entry) for entry in entries],
        }
        if self._fields.logprob_start_len < 0:
            return lists
        prompt_entries = self._prompt_logprobs.setdefault(output.index, [])
        prompt_entries += delta.prompt_logprobs
        start = self._fields.logprob_start_len
        first = [] if start > 0 else [self._triple(None, output.prompt.ids[0])]
        known = prompt_entries[max(start - 1, 0) :]
        return lists | {
            "input_token_logprobs": first + [self._triple(entry.logprob, entry.token_id) for entry in known],
            "input_top_logprobs": [None] * len(first) + [self._top(entry) for entry in known],
        }

    def _triple(self, logprob: float | None, token_id: int) -> list[Any]:
        text = self._tokenizer.token_text(token_id)[0] if self._fields.return_text_in_logprobs else None
        return [logprob, token_id, text]

    def _top(self, entry: TokenLogprobs) -> list[list[Any]] | None:
        return [self._triple(logprob, token_id) for token_id, logprob in entry.top] or None


def generate_router(core: GatewayCore) -> APIRouter:
    """Return the route of one gateway."""
    router = APIRouter(tags=["SGLang"])

    @router.post("/generate", openapi_extra=http.body_schema(GenerateFields))
    async def generate(request: Request) -> Response:
        """Continue a prompt, in SGLang's form."""
        body = await http.read_object(request, core.check_open)
        # SGLang's clients send nulls and empty values for fields that they do not use.
        fields = validate(
            GenerateFields, {name: v for name, v in body.items() if v is not None}, unsupported=UNSUPPORTED_HERE
        )
        sampling_fields = validate(
            SglangSamplingFields,
            fields.sampling_params,
            ignored=IGNORED_IN_SAMPLING,
            unsupported=UNSUPPORTED,
            prefix="sampling_params.",
        )
        core.check_model(fields.model)
        prompts, many = await _prompts(core, fields)
        generation = GenerationRequest(
            id=http.new_id("gen"),
            prompts=prompts,
            sampling=await _sampling(core, fields, sampling_fields),
            speculation=fields.speculative.to_options(),
            n=sampling_fields.n,
            draws_seeds=sampling_fields.sampling_seed is None,
            stop=one_or_many_strings("stop", sampling_fields.stop, limits.MAX_STOP_STRINGS),
            include_stop=sampling_fields.no_stop_trim,
            skip_special_tokens=sampling_fields.skip_special_tokens,
            cache_salt=fields.cache_salt,
            timeout_ms=core.timeout_ms,
            trace=http.trace_context(request),
            prediction_ids=await _prediction(core, fields.prediction),
            priority=fields.priority,
            grammar_field="ebnf" if sampling_fields.ebnf is not None else "",
        )
        await core.check(generation, prompt_field="input_ids" if fields.text is None else "text")
        generation = dataclasses.replace(generation, output_ids=_output_ids(generation, fields.rid, many=many))
        reply = SglangFormat(fields, core.tokenizer, many=many or sampling_fields.n > 1)
        name = http.client_id(request, fields.rid if isinstance(fields.rid, str) else "")
        return Exchange(core, generation, reply, stream=fields.stream, api="/generate", client_id=name)

    return router


async def _prompts(core: GatewayCore, fields: GenerateFields) -> tuple[tuple[Prompt, ...], bool]:
    """Return the prompts, and whether the client sent a list."""
    if (fields.text is None) == (fields.input_ids is None):
        raise InvalidRequestError("give either text or input_ids", field="text")
    if fields.text is not None:
        texts = one_or_many_strings("text", fields.text, limits.MAX_PROMPTS_PER_REQUEST)
        return tuple([await core.texts.encode(text, field="text") for text in texts]), isinstance(fields.text, list)
    if is_id_list(fields.input_ids):
        return (Prompt(tuple(fields.input_ids)),), False
    lists = fields.input_ids
    if not isinstance(lists, list) or not all(is_id_list(ids) for ids in lists):
        raise InvalidRequestError("input_ids must be a list of token ids or a list of such lists", field="input_ids")
    return tuple(Prompt(tuple(ids)) for ids in lists), True


def _output_ids(request: GenerationRequest, rid: object, *, many: bool) -> tuple[str, ...]:
    """Return each output's id: the client's name, or SGLang's ``NAME_0``, ``NAME_1`` for several.

    Raises InvalidRequestError for a list of names that does not fit the prompts.
    """
    names = one_or_many_strings("rid", rid, limits.MAX_PROMPTS_PER_REQUEST)
    if isinstance(rid, list):
        if not many or len(names) != len(request.prompts):
            raise InvalidRequestError("a list in rid needs one name for each prompt of a list", field="rid")
        if not all(map(http.clean_id, names)) or len(set(names)) < len(names):
            raise InvalidRequestError(
                f"rid must have different names, of 1 to {limits.MAX_REQUEST_ID_CHARS} printable ASCII characters",
                field="rid",
            )
        ids = list(names)
    else:
        own = (http.clean_id(names[0]) if names else "") or request.id
        ids = [f"{own}_{number}" for number in range(len(request.prompts))] if many else [own]
    return tuple([f"{own}_{choice}" for own in ids for choice in range(request.n)] if request.n > 1 else ids)


async def _prediction(core: GatewayCore, value: object) -> tuple[int, ...]:
    if value is None or value == []:
        return ()
    if isinstance(value, str):
        return await core.texts.encode_prediction(value, field="prediction")
    if not is_id_list(value):
        raise InvalidRequestError("prediction must be a string or a list of token ids", field="prediction")
    return tuple(value)  # type: ignore[arg-type]


async def _sampling(core: GatewayCore, fields: GenerateFields, sampling: SglangSamplingFields) -> SamplingParams:
    defaults, given = core.sampling_defaults, sampling.model_fields_set
    check_in_range("max_new_tokens", sampling.max_new_tokens, "max_tokens")
    check_in_range("min_new_tokens", sampling.min_new_tokens, "min_tokens")
    check_in_range("sampling_seed", sampling.sampling_seed, "seed")
    check_in_range("top_logprobs_num", fields.top_logprobs_num, "logprobs")
    if fields.logprob_start_len < -1:
        raise InvalidRequestError("logprob_start_len must be -1 or more", field="logprob_start_len")
    wants_prompt = fields.return_logprob and fields.logprob_start_len >= 0
    bad_words = text_list("bad_words", sampling.bad_words, limits.MAX_BAD_WORDS, limits.MAX_BAD_WORD_CHARS)
    max_tokens = sampling.max_new_tokens
    if "max_new_tokens" not in given:
        max_tokens = defaults.max_tokens_or(max_tokens)
    return SamplingParams(
        **defaults.of_request(sampling, given),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=draw_seed(sampling.sampling_seed),
        logit_bias=token_biases("logit_bias", sampling.logit_bias),
        max_tokens=max_tokens,
        min_tokens=sampling.min_new_tokens,
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        logprobs=fields.top_logprobs_num if fields.return_logprob else None,
        prompt_logprobs=fields.top_logprobs_num if wants_prompt else None,
        grammar=_grammar(sampling),
        allowed_token_ids=allowed_ids(sampling.allowed_token_ids),
        bad_token_ids=await core.texts.encode_bad_words(bad_words),
    )


def _grammar(sampling: SglangSamplingFields) -> Grammar | None:
    wanted = []
    if sampling.json_schema is not None:
        wanted.append((schema_grammar("json_schema", sampling.json_schema), "json_schema"))
    if sampling.regex is not None:
        wanted.append((checked("regex", Grammar("regex", sampling.regex)), "regex"))
    if sampling.ebnf is not None:
        wanted.append((checked("ebnf", Grammar("lark", sampling.ebnf)), "ebnf"))
    return the_one(wanted)[0]


def _finish_reason(output: Output) -> dict[str, Any] | None:
    if output.finished is None or output.finish_reason is None:
        return None
    if output.finish_reason is FinishReason.LENGTH:
        return {"type": "length", "length": len(output.token_ids)}
    if output.finish_reason is FinishReason.ABORT:
        return {"type": "abort", "message": "Aborted by /abort_request."}
    return {"type": "stop", "matched": output.matched}
