"""One request, whose verifier dies, is one trace: from REST through verifier and drafter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.stack import LONG, running, stream, text_of
from tests.support.collector import Collector, ReceivedSpan, collecting

pytestmark = pytest.mark.slow
CHUNKS_BEFORE = 20


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
    fields = {"prediction": {"type": "content", "content": LONG["prompt"]}, "max_tokens": 1500}
    with running(checkpoint, log, "--otlp-traces-endpoint", endpoint) as stack:
        chunks = stream(stack.url, **fields)
        before = [next(chunks) for _ in range(CHUNKS_BEFORE)]
        stack.service("verifier").kill()
        rest = list(chunks)
        assert text_of(before) and text_of(rest)
        for name in ("draft", "sequence", "text_completion tiny"):
            collector.spans(1, name)
    spans = collector.spans(0)
    (request,) = [span for span in spans if span.name == "text_completion tiny"]
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
