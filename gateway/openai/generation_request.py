"""Make the request for a generation from a body of the chat and completion APIs."""

from __future__ import annotations

import dataclasses

from foretoken.tracing import TraceContext
from gateway.core import GatewayCore
from gateway.generation_request import GenerationRequest, Prompt
from gateway.openai.request import GenerationOptions


async def generation_request(
    core: GatewayCore,
    request_id: str,
    prompts: tuple[Prompt, ...],
    options: GenerationOptions,
    trace: TraceContext | None,
) -> GenerationRequest:
    """Return the request. Raises InvalidRequestError for a prediction that is too long."""
    bad_token_ids = await core.texts.encode_bad_words(options.bad_words)
    return GenerationRequest(
        id=request_id,
        prompts=prompts,
        sampling=dataclasses.replace(options.sampling, bad_token_ids=bad_token_ids),
        speculation=options.speculation,
        n=options.n,
        draws_seeds=options.draws_seeds,
        stop=options.stop,
        include_stop=options.include_stop,
        skip_special_tokens=options.skip_special_tokens,
        kept_special_ids=options.reply.kept_special_ids,
        cache_salt=options.cache_salt,
        timeout_ms=core.timeout_ms,
        trace=trace,
        grammar_field=options.grammar_field,
        schema_tools=options.reply.schema_tools,
        prediction_ids=await core.texts.encode_prediction(options.prediction, field="prediction.content"),
        priority=options.priority,
        returns_trees=options.return_draft_tree,
        names_drafters=options.return_token_sources or options.return_draft_tree,
    )
