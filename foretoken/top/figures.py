"""Compute a gateway's figures of the last seconds.

They come from the metrics of the dashboard's panels.

A rate or share is None where nothing happened, or before the second reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from foretoken.telemetry import DRAFTER_LABEL, VERIFIER_LABEL
from foretoken.top.reading import Values, bucket_bounds, by_label, quantile, total
from foretoken.top.window import Window

LATENCIES = {
    "Time to first token": "time_to_first_token_seconds",
    "Time per output token": "request_time_per_output_token_seconds",
    "Inter-token latency": "inter_token_latency_seconds",
    "Whole request": "e2e_request_latency_seconds",
    "Wait in the queue": "request_queue_time_seconds",
}
VERIFY_PHASES = ("forward", "verify", "wait", "prefill")
HOST_PHASES = ("schedule", "draft_post", "publish", "plan", "launch", "commit", "bind")
_CHOSEN = "drafter_chosen_"
_BECAUSE = _CHOSEN + "because_"


@dataclass(frozen=True, slots=True)
class LoadStatus:
    """What runs and waits now, and what happened each second."""

    running: int
    waiting_in_verifiers: int
    in_gateways: int
    waiting_for_a_verifier: int
    output_tokens: float | None
    prompt_tokens: float | None
    finished: float | None
    failed: float | None
    refused: float | None


@dataclass(frozen=True, slots=True)
class Latency:
    """Two percentiles in seconds, and the finite upper bounds of the histogram's buckets in order.

    A percentile beyond the last bound is infinite. One in the first
    bucket is interpolated from zero.
    """

    p50: float | None
    p99: float | None
    bounds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class DrafterStatus:
    """One drafter, at all verifiers.

    Attributes:
        states: number of verifiers by the drafter's state there.
        acceptance: accepted of drafted tokens.
        length: mean acceptance length: tokens of a step that drafted.
        by_position: share of drafts accepted at each depth.
        has_low_acceptance: whether speculation hardly works with it.
        attaches: times it was attached, since the verifiers began.
        useless_drafts: late, stale and malformed drafts, since then.
    """

    name: str
    states: Mapping[str, int]
    acceptance: float | None
    length: float | None
    by_position: tuple[float, ...]
    has_low_acceptance: bool
    attaches: int
    useless_drafts: int


@dataclass(frozen=True, slots=True)
class ControllerChoice:
    """What one verifier's controller chose last for overlapped steps with one drafter, and why.

    ``nodes``, ``levels``: of a tree; ``rows``: of the step, for each sequence. Tokens a second
    are for the whole batch, as the controller expects them.
    """

    drafter: str
    verifier: str
    nodes: int
    levels: int
    rows: float
    reason: str
    tokens_per_second: float
    plain_tokens_per_second: float


@dataclass(frozen=True, slots=True)
class StepTime:
    """Where the time of a mean step goes, in microseconds."""

    draft: float
    hand_over: float
    verify: float
    host: float


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of all verifiers; reasons are counted each second.

    Tokens a step: ``tokens_of_sequence`` of one sequence that wants drafts, as ``foretoken bench``
    shows them; ``tokens_of_batch`` of the whole batch.
    """

    tokens_of_sequence: float | None
    tokens_of_batch: float | None
    share_from_drafts: float | None
    time: StepTime | None
    without_draft: Mapping[str, float]
    not_overlapped: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class VerifierStatus:
    """One verifier; ``kv_usage``: share of its KV blocks in use, None if it does not answer."""

    address: str
    is_up: bool
    kv_usage: float | None


@dataclass(frozen=True, slots=True)
class Figures:
    """Everything that one picture shows of the metrics.

    Attributes:
        seconds: the length of the window.
        found_in_prefix_cache: share of prompt tokens.
        preemptions, resumes: sequences preempted, outputs resumed, since the processes began.
    """

    seconds: float
    load: LoadStatus
    latencies: Mapping[str, Latency]
    drafters: tuple[DrafterStatus, ...]
    choices: tuple[ControllerChoice, ...]
    steps: Steps
    verifiers: tuple[VerifierStatus, ...]
    found_in_prefix_cache: float | None
    preemptions: int
    resumes: int


def figures(window: Window) -> Figures:
    """Return the figures of a window with at least one reading."""
    now, risen = window.last.values, window.increases()
    return Figures(
        seconds=window.seconds,
        load=_load(now, risen, window.seconds),
        latencies={
            title: Latency(quantile(risen, name, 0.5), quantile(risen, name, 0.99), bucket_bounds(now, name))
            for title, name in LATENCIES.items()
        },
        drafters=_drafters(now, risen),
        choices=_choices(now),
        steps=_steps(risen, window.seconds),
        verifiers=_verifiers(now),
        found_in_prefix_cache=_ratio(
            total(risen, "prefix_cache_hits_total"), total(risen, "prefix_cache_queries_total")
        ),
        preemptions=int(total(now, "num_preemptions_total")),
        resumes=int(total(now, "sequences_resumed_total")),
    )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _load(now: Values, risen: Values, seconds: float) -> LoadStatus:
    return LoadStatus(
        running=int(total(now, "num_requests_running")),
        waiting_in_verifiers=int(total(now, "num_requests_waiting")),
        in_gateways=int(total(now, "gateway_num_requests")),
        waiting_for_a_verifier=int(total(now, "gateway_num_sequences_waiting")),
        output_tokens=_ratio(total(risen, "engine_generated_tokens_total"), seconds),
        prompt_tokens=_ratio(total(risen, "engine_prompt_tokens_total"), seconds),
        finished=_ratio(total(risen, "request_success_total"), seconds),
        failed=_ratio(total(risen, "request_failure_total"), seconds),
        refused=_ratio(total(risen, "admission_rejections_total"), seconds),
    )


def _drafters(now: Values, risen: Values) -> tuple[DrafterStatus, ...]:
    return tuple(_drafter(name, now, risen) for name in sorted(by_label(now, "drafter_info", DRAFTER_LABEL)))


def _drafter(name: str, now: Values, risen: Values) -> DrafterStatus:
    drafts = total(risen, "spec_decode_num_drafts_total", drafter=name)
    accepted = total(risen, "spec_decode_num_accepted_tokens_total", drafter=name)
    positions = by_label(risen, "spec_decode_num_accepted_tokens_per_pos_total", "position", drafter=name)
    shares = [positions[position] / drafts if drafts else 0.0 for position in sorted(positions, key=int)]
    while shares and not shares[-1]:
        shares.pop()
    return DrafterStatus(
        name=name,
        states={
            state: int(count) for state, count in sorted(by_label(now, "drafter_info", "state", drafter=name).items())
        },
        acceptance=_ratio(accepted, total(risen, "spec_decode_num_draft_tokens_total", drafter=name)),
        length=1 + accepted / drafts if drafts else None,
        by_position=tuple(shares),
        has_low_acceptance=total(now, "drafter_low_acceptance", drafter=name) > 0,
        attaches=int(total(now, "drafter_attaches_total", drafter=name)),
        useless_drafts=int(total(now, "spec_decode_num_rejected_drafts_total", drafter=name)),
    )


def _choices(now: Values) -> tuple[ControllerChoice, ...]:
    found = []
    for series in sorted(now):
        if series.name != _CHOSEN + "nodes":
            continue
        figures = {other.name: value for other, value in now.items() if other.labels == series.labels}
        reasons = [name.removeprefix(_BECAUSE) for name, value in figures.items() if _BECAUSE in name and value]
        found.append(
            ControllerChoice(
                drafter=series.label(DRAFTER_LABEL),
                verifier=series.label(VERIFIER_LABEL),
                nodes=int(figures[series.name]),
                levels=int(figures.get(_CHOSEN + "levels", 0)),
                rows=figures.get(_CHOSEN + "rows", 0.0),
                reason=", ".join(sorted(reasons)),
                tokens_per_second=figures.get(_CHOSEN + "tokens_per_second", 0.0),
                plain_tokens_per_second=figures.get(_CHOSEN + "plain_tokens_per_second", 0.0),
            )
        )
    return tuple(found)


def _steps(risen: Values, seconds: float) -> Steps:
    num_steps, tokens = total(risen, "engine_steps_total"), total(risen, "engine_generated_tokens_total")
    accepted = total(risen, "spec_decode_num_accepted_tokens_total")
    # Each row gives one token and the accepted ones. Rows of requests without
    # speculation are not counted.
    rows = total(risen, "spec_decode_num_drafts_total") + total(risen, "fallback_steps_total")
    return Steps(
        tokens_of_sequence=_ratio(rows + accepted, rows),
        tokens_of_batch=_ratio(tokens, num_steps),
        share_from_drafts=_ratio(accepted, tokens),
        time=_step_time(risen, num_steps) if num_steps else None,
        without_draft=_rates(by_label(risen, "fallback_reasons_total", "reason"), seconds),
        not_overlapped=_rates(by_label(risen, "overlap_blocked_steps_total", "reason"), seconds),
    )


def _step_time(risen: Values, num_steps: float) -> StepTime:
    draft_us = 1e6 * total(risen, "drafter_draft_grow_s")
    waited_us = total(risen, "step_time_us_total", phase="draft_wait")
    return StepTime(
        draft=draft_us / num_steps,
        hand_over=max(waited_us - draft_us, 0.0) / num_steps,
        verify=total(risen, "step_time_us_total", phase=VERIFY_PHASES) / num_steps,
        host=total(risen, "step_time_us_total", phase=HOST_PHASES) / num_steps,
    )


def _rates(risen: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Return what happened each second, the most frequent first."""
    found = {key: rise / seconds for key, rise in risen.items() if rise and seconds}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _verifiers(now: Values) -> tuple[VerifierStatus, ...]:
    usage = by_label(now, "kv_cache_usage_perc", VERIFIER_LABEL)
    return tuple(
        VerifierStatus(address, up == 1.0, usage.get(address))
        for address, up in sorted(by_label(now, "verifier_up", VERIFIER_LABEL).items())
    )
