"""One request, whose verifier dies, is one trace: from REST through verifier and drafter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.stack import LONG, OUTSIDE, is_ready, running, stream, text_of, wait_until
from tests.support.collector import Collector, ReceivedSpan, collecting

pytestmark = pytest.mark.slow
REQUEST = "text_completion tiny"
NAMES = {REQUEST, "resume", "sequence", "queue", "prefill", "decode", "draft", "speculate"}


def test_a_request_that_outlives_its_verifier_is_one_trace(checkpoint: Path, tmp_path: Path) -> None:
    with collecting() as collector:
        check_trace(request_that_loses_its_verifier(checkpoint, tmp_path / "log", collector.endpoint, collector))


def request_that_loses_its_verifier(
    checkpoint: Path, log: Path, endpoint: str, collector: Collector
) -> list[ReceivedSpan]:
    """Return the spans of the request's trace.

    ``endpoint``: where services send spans, which then reach ``collector``.
    """
    # With a prediction, drafts are requested from the first token on, whatever steps cost now.
    fields = {"prediction": {"type": "content", "content": LONG["prompt"]}}
    with running(checkpoint, log, *OUTSIDE, "--otlp-traces-endpoint", endpoint) as stack:
        num_asked, figures = 0, {"num_resumes": 0, "num_accepted_draft_tokens": 0}
        # On a busy machine the answer may be complete first, or the
        # rest before its drafter is back.
        while figures["num_resumes"] != 1 or not figures["num_accepted_draft_tokens"]:
            # A request that came before the last attempt's verifier is replaced would first wait.
            wait_until(lambda: is_ready(stack), stack)
            verifier = stack.service("verifier")
            chunks = stream(stack.url, **fields)
            next(chunks)
            verifier.kill()
            verifier.wait()
            rest = list(chunks)
            num_asked += 1
            figures = rest[-1]["metrics"]["speculative_decoding"]
        assert text_of(rest)
        wait_until(lambda: {span.name for span in last_trace(collector, num_asked)} >= NAMES, stack)
    return last_trace(collector, num_asked)


def last_trace(collector: Collector, num_asked: int) -> list[ReceivedSpan]:
    """Return what has come of the last request's trace."""
    spans = collector.spans(num_asked, REQUEST)
    request = max((span for span in spans if span.name == REQUEST), key=lambda span: span.began_ns)
    return [span for span in spans if span.trace_id == request.trace_id]


def check_trace(spans: list[ReceivedSpan]) -> None:
    assert {span.service for span in spans} == {"foretoken-gateway", "foretoken-verifier", "foretoken-drafter"}
    (request,) = [span for span in spans if not span.parent_id]
    below = children(spans, request)
    assert set(below) == {"resume", "sequence"}
    (resume,), (sequence,) = below["resume"], below["sequence"]
    # The spans of the first attempt died with its verifier.
    assert (sequence.attributes["foretoken.attempt"], request.attributes["foretoken.resumes"]) == (1, 1)
    assert resume.began_ns < sequence.began_ns < resume.ended_ns < sequence.ended_ns
    below = children(spans, sequence)
    assert set(below) == {"queue", "prefill", "decode", "draft"}
    (decode,), (draft,) = below["decode"], below["draft"]
    (speculate,) = children(spans, decode)["speculate"]
    assert speculate.attributes["spec.drafter"] == draft.attributes["spec.drafter"] == "ngram"
    assert speculate.attributes["spec.draft_tokens"] == sequence.attributes["spec.draft_tokens"] > 0
    accepted = speculate.attributes["spec.accepted_tokens_per_position"]
    assert sum(accepted) == speculate.attributes["spec.accepted_tokens"] > 0
    assert draft.attributes["spec.transport"] == "shared-memory"
    assert draft.attributes["spec.rounds"] > 0 and draft.attributes["spec.draft_time"] > 0
    assert sequence.began_ns < draft.began_ns < draft.ended_ns
    assert not any(span.is_error for span in spans)


def children(spans: list[ReceivedSpan], parent: ReceivedSpan) -> dict[str, list[ReceivedSpan]]:
    """Return a span's children by name."""
    found: dict[str, list[ReceivedSpan]] = {}
    for span in spans:
        if span.parent_id == parent.span_id:
            found.setdefault(span.name, []).append(span)
    return found
