"""Build an answer's ``metrics`` object: speculation in vLLM's shape, and one output's times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.generation import Generation
from gateway.messages import Finished
from gateway.output import Output


def generation_metrics(generation: Generation, *, detailed: bool) -> dict[str, Any]:
    """Return the figures of a generation with one output; ``detailed`` adds each step's."""
    (output,) = generation.outputs
    return {
        "speculative_decoding": speculation_figures(output, detailed=detailed),
        **_times(output),
    }


def speculation_figures(output: Output, *, detailed: bool = False) -> dict[str, Any]:
    """Return vLLM's fields and ours. Lengths are 1.0 if nothing was drafted."""
    assert output.finished is not None
    stats = output.finished.speculation
    figures: dict[str, Any] = {
        # After a resume, the figures cover only the steps since.
        "num_resumes": output.num_resumes,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "draft_acceptance_rate": stats.draft_acceptance_rate,
        "acceptance_histogram": stats.acceptance_histogram,
        "num_spec_steps": stats.num_spec_steps,
        "num_accepted_draft_tokens": stats.num_accepted_tokens,
        "num_draft_tokens": stats.num_draft_tokens,
        # The largest number of draft tokens that a step may accept.
        "num_spec_tokens": max(len(stats.acceptance_histogram) - 1, 0),
        "drafter": stats.drafter or None,
        "drafters": {
            drafter.name: {
                "num_draft_tokens": drafter.num_draft_tokens,
                "num_accepted_draft_tokens": drafter.num_accepted_tokens,
                "accepted_per_position": drafter.accepted_per_position,
            }
            for drafter in stats.drafters
        },
        "fallback_steps": stats.fallback_steps,
        "fallback_reasons": dict(stats.fallback_reasons),
        "mean_tokens_per_step": stats.mean_tokens_per_step,
    }
    if detailed:
        figures["accepted_tokens_per_step"] = accepted_per_step(output.sources[output.num_resumed_tokens :])
    return figures


def accepted_per_step(sources: Sequence[int]) -> list[int]:
    """Return the accepted draft tokens of each decode step; a step ends with the target's token.

    The first output token comes from prefill. A stop string may cut off a step's last token.
    """
    steps, accepted = [], 0
    for source in sources[1:]:
        if source:
            accepted += 1
        else:
            steps.append(accepted)
            accepted = 0
    return [*steps, accepted] if accepted else steps


def _times(output: Output) -> dict[str, Any]:
    assert output.finished is not None
    num_tokens = len(output.token_ids)
    # From the first to the last token, as clients see them.
    generating_s = output.times.last_at - output.times.first_at
    first_s, gap_s = output.times.to_first_s, output.times.mean_gap_s
    return {
        "time_to_first_token_ms": 1e3 * first_s if num_tokens and first_s is not None else None,
        "queue_time_ms": output.finished.queue_ms,
        "mean_itl_ms": None if gap_s is None else 1e3 * gap_s,
        "tokens_per_second": _tokens_per_second(gap_s, output.finished),
        "generation_time_ms": 1e3 * generating_s,
    }


def _tokens_per_second(gap_s: float | None, finished: Finished) -> float | None:
    """Return an output's speed after its first message of tokens; None if there is no other.

    Tokens that wait for a busy gateway arrive together, and the time between them says nothing. So
    the verifier's time counts if it is longer.
    """
    if not gap_s:
        return None
    decoded_s = finished.decode_ms / 1e3 / max(finished.num_output_tokens - 1, 1)
    return 1 / max(gap_s, decoded_s)
