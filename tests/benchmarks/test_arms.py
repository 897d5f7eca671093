"""The table of arms: the flags of each server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.arms import ARMS
from benchmarks.workloads import WORKLOADS


def flags(arm: str) -> str:
    return " ".join(ARMS[arm].server_flags(Path("/head"), 256))


def test_every_server_runs_as_many_requests_and_has_no_prefix_cache() -> None:
    for name, arm in ARMS.items():
        ours = arm.engine == "foretoken"
        assert ("--disable-radix-cache" if ours else "--no-enable-prefix-caching") in flags(name)
        assert ("--max-running-requests 256" if ours else "--max-num-seqs 256") in flags(name)


def test_auto_leaves_the_choice_to_the_server() -> None:
    for name in ("auto", "auto-ngram", "ngram"):
        assert "--speculative-num" not in flags(name) and not ARMS[name].body
    assert [ARMS[name].num_drafters for name in ("auto", "auto-ngram", "ngram")] == [1, 2, 1]


@pytest.mark.parametrize(("name", "steps", "topk", "tokens"), [("fixed-3-1-4", 3, 1, 4), ("fixed-5-8-32", 5, 8, 32)])
def test_a_fixed_shape_is_named_by_every_request(name: str, steps: int, topk: int, tokens: int) -> None:
    shape = f"--speculative-num-steps {steps} --speculative-eagle-topk {topk} --speculative-num-draft-tokens {tokens}"
    assert shape in flags(name)
    assert "name=eagle3,algorithm=EAGLE3,model=/head" in flags(name)
    assert ARMS[name].is_fixed and ARMS[name].body == {"speculative": {"drafter": "eagle3"}}


def test_vllm_gets_the_same_head() -> None:
    words = ARMS["vllm-eagle3-5"].server_flags(Path("/head"), 256)
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert config == {"method": "eagle3", "model": "/head", "num_speculative_tokens": 5}


def test_workloads_name_arms_that_there_are() -> None:
    for workload in WORKLOADS.values():
        assert set(workload.arms) <= set(ARMS)
        assert len({point.name for point in workload.points}) == len(workload.points)
