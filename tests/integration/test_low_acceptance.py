"""A head with random weights in the demo stack: the text stays, a
line and a gauge say that it is useless.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from foretoken.telemetry import parse
from tests.integration.stack import Stack, running, wait_until

pytestmark = pytest.mark.slow
DEMO = Path(__file__).parents[2] / "models" / "demo"
PROMPT = "def read_lines(path):\n    with open(path) as file:\n"


@pytest.fixture
def wrong_head(tmp_path: Path) -> Path:
    """Return the demo's EAGLE-3 head with its matrices drawn at random."""
    folder = tmp_path / "wrong"
    shutil.copytree(DEMO / "eagle3", folder)
    generator = torch.Generator().manual_seed(5)
    tensors = {
        name: torch.randn(tensor.shape, generator=generator).mul(0.05).to(tensor.dtype) if tensor.ndim == 2 else tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_head_with_wrong_weights_is_named(wrong_head: Path, tmp_path: Path) -> None:
    heads = {"right": DEMO / "eagle3", "wrong": wrong_head}
    words = [w for name, path in heads.items() for w in ("--drafter", f"name={name},algorithm=EAGLE3,model={path}")]
    # An exact shape drafts in every step, whether that pays or not.
    shape = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")
    with running(DEMO / "target", tmp_path / "log", *words, *shape) as stack:
        # On a busy machine the stack is ready before they are.
        wait_until(lambda: attached(stack) == set(heads), stack)

        def is_named() -> bool:
            """Return whether it is; a drafter that is late on a busy machine is not waited for."""
            texts = {name: [complete(stack, name, number) for number in range(3)] for name in heads}
            assert texts["right"] == texts["wrong"]
            return low_acceptance(stack) == {"right": 0.0, "wrong": 1.0}

        wait_until(is_named, stack)
        warnings = [json.loads(line) for line in stack.log.read_text().splitlines() if "hardly works" in line]
    assert [(line["level"], line["service"]) for line in warnings] == [("warning", "verifier")]
    assert warnings[0]["message"].startswith("drafter wrong: speculation hardly works: ")
    assert "the head was trained for another target" in warnings[0]["message"]


def complete(stack: Stack, drafter: str, number: int) -> str:
    body = {"prompt": PROMPT + "    " * number, "max_tokens": 250, "temperature": 0, "ignore_eos": True}
    body |= {"speculative": {"drafter": drafter}}
    answer = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=None, trust_env=False)
    return str(answer.raise_for_status().json()["choices"][0]["text"])


def attached(stack: Stack) -> set[str]:
    ready = httpx.get(f"{stack.url}/ready", timeout=None, trust_env=False).json()
    drafters = [drafter for verifier in ready["verifiers"] for drafter in verifier["drafters"]]
    return {drafter["name"] for drafter in drafters if drafter["state"] == "attached"}


def low_acceptance(stack: Stack) -> dict[str, float]:
    families = parse(httpx.get(f"{stack.url}/metrics", timeout=None, trust_env=False).text)
    samples = (sample for family in families for sample in family.samples)
    return {s.labels["drafter"]: s.value for s in samples if s.name == "foretoken_drafter_low_acceptance"}
