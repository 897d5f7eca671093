"""Counters are read from both servers' expositions."""

from __future__ import annotations

from foretoken.bench.counters import increase, parse, tokens_per_step, total

OURS = """
# HELP foretoken_engine_steps_total Steps.
# TYPE foretoken_engine_steps_total counter
foretoken_engine_steps_total{model_name="m",verifier="a"} 10.0
foretoken_engine_steps_total{model_name="m",verifier="b"} 5.0
# HELP foretoken_spec_decode_num_drafts_total Trees.
# TYPE foretoken_spec_decode_num_drafts_total counter
foretoken_spec_decode_num_drafts_total{model_name="m",verifier="a",drafter="eagle3"} 20.0
foretoken_spec_decode_num_drafts_total{model_name="m",verifier="a",drafter="ngram"} 4.0
# HELP vllm:spec_decode_num_drafts_total Trees.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 24.0
# HELP foretoken_num_requests_running Running.
# TYPE foretoken_num_requests_running gauge
foretoken_num_requests_running{model_name="m"} 3.0
"""
VLLM = """
# HELP vllm:spec_decode_num_drafts_total Drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 50.0
# HELP vllm:spec_decode_num_drafts_created Drafts.
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e9
# HELP vllm:spec_decode_num_accepted_tokens_total Accepted.
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 150.0
"""


def test_counters_are_summed_over_servers_and_kept_by_drafter() -> None:
    found = parse(OURS)
    assert found == {
        "engine_steps": 15.0,
        "spec_decode_num_drafts{drafter=eagle3}": 20.0,
        "spec_decode_num_drafts{drafter=ngram}": 4.0,
    }
    assert total(found, "spec_decode_num_drafts") == 24.0


def test_only_what_rose_is_left() -> None:
    assert increase({"a": 1.0, "b": 2.0}, {"a": 3.0, "b": 2.0, "c": 4.0}) == {"a": 2.0, "c": 4.0}


def test_tokens_a_step_of_both_servers() -> None:
    assert tokens_per_step(parse(VLLM)) == 4.0
    ours = {
        "spec_decode_num_drafts{drafter=a}": 6.0,
        "fallback_steps": 2.0,
        "spec_decode_num_accepted_tokens{drafter=a}": 16.0,
    }
    assert tokens_per_step(ours) == 3.0
    assert tokens_per_step({"engine_steps": 9.0}) == 1.0
