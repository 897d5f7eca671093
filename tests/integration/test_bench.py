"""``foretoken bench`` against the demo model: its figures are those that the server counts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.stack import Stack, running, wait_until
from tests.support.command_line import foretoken

pytestmark = pytest.mark.slow

DEMO = Path(__file__).parents[2] / "models" / "demo"
DRAFTER = f"name=eagle3,algorithm=EAGLE3,model={DEMO / 'eagle3'}"
# Always drafts, however busy the machine is.
SHAPE = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")
PROMPTS = ("def read_lines(path):\n    with open(path)", "class Stack:\n    def __init__(self):", "import os\n\ndef")
FEW = ("--num-prompts", "3", "--warmup-requests", "1")
PLAIN = json.dumps({"speculative": {"enabled": False}})


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    log = tmp_path_factory.mktemp("bench") / "log"
    with running(DEMO / "target", log, "--drafter", DRAFTER, "--served-model-name", "demo", *SHAPE) as stack:
        # On a busy machine the stack is ready before it is.
        wait_until(lambda: is_attached(stack), stack)
        yield stack


def is_attached(stack: Stack) -> bool:
    (verifier,) = httpx.get(f"{stack.url}/ready", timeout=None, trust_env=False).json()["verifiers"]
    return [drafter["state"] for drafter in verifier["drafters"]] == ["attached"]


def generated(stack: Stack) -> float:
    """Return the output tokens that the server has counted."""
    text = httpx.get(f"{stack.url}/metrics", timeout=None, trust_env=False).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("foretoken_generation_tokens"))


def bench(stack: Stack, file: Path, *words: str) -> dict[str, Any]:
    result = foretoken("bench", "--url", stack.url, *FEW, *words, "--output-file", str(file))
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_speculation_is_compared_with_plain_decode(stack: Stack, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": prompt, "output_len": 48}) for prompt in PROMPTS))
    before = generated(stack)
    content = bench(
        stack,
        tmp_path / "found.json",
        *("--dataset-name", "file", "--dataset-path", str(prompts), "--max-concurrency", "1,3", "--num-rounds", "2"),
        *("--compare-url", stack.url, "--compare-extra-request-body", PLAIN),
    )
    assert [(row["load"], row["server"], row["round"]) for row in content["rows"]] == [
        (load, server, number) for load in ("1", "3") for number in (0, 1) for server in ("first", "second")
    ]
    for row in content["rows"]:
        assert (row["num_requests"], row["num_tokens"], row["num_cached_tokens"]) == (3, 3 * 48, 0)
        steps = row["speculation"]["tokens_per_step"]
        if row["server"] == "second":
            assert steps == 1.0
        else:
            # Several tokens of one step are one chunk.
            assert steps > 1.2 and row["num_chunks"] < row["num_tokens"]
            shares = row["speculation"]["acceptance"]
            assert 0 < shares[0] <= 1 and list(shares) == sorted(shares, reverse=True)
    # 8 measurements of 3 requests, one request of warm-up for each server, and one trial for each.
    assert generated(stack) - before == 8 * 3 * 48 + 2 * 48 + 2


def test_random_prompts_have_the_wanted_tokens(stack: Stack, tmp_path: Path) -> None:
    words = ("--input-len", "60", "--output-len", "5", "--request-rate", "50")
    exact = bench(stack, tmp_path / "exact.json", *words, "--tokenizer", str(DEMO / "target"))
    assert 3 * 58 <= exact["rows"][0]["num_prompt_tokens"] <= 3 * 60
    tried = bench(stack, tmp_path / "tried.json", *words, "--endpoint", "completions")
    assert 3 * 60 * 0.7 <= tried["rows"][0]["num_prompt_tokens"] <= 3 * 60 * 1.3
