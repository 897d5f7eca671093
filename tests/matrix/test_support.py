"""The README's support matrix: each kind of target with each kind of drafter, on CPU and GPU.

Weights are random, so few drafts are accepted; the text must still be plain decode's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from foretoken.sampling import SamplingParams, SpeculationOptions
from tests.support import on_device
from tests.support.deployments import Targets
from tests.support.engine_harness import Harness, Request, assert_bits

ROOT = Path(__file__).parents[2]
DRAFTERS = ("NGRAM", "EAGLE", "EAGLE3", "STANDALONE", "MTP")
# By the README's name of a target: the body in tests/references/head_files.py, and whether it has
# MTP layers.
TARGETS = {
    "Llama 2, 3, 3.x": ("llama", False),
    "Mistral": ("mistral", False),
    "Qwen2, Qwen2.5": ("qwen2", False),
    "Qwen3": ("qwen3", True),
    "MiMo": ("mimo", True),
}
# Cells that run in float16, too: each drafter, each kind of MTP layers.
FLOAT16_CELLS = [*(("llama", drafter) for drafter in DRAFTERS[:4]), ("qwen3", "MTP"), ("mimo", "MTP")]
CELLS = [(body, drafter) for body, has_mtp in TARGETS.values() for drafter in DRAFTERS if drafter != "MTP" or has_mtp]
PROMPT = [5, 6, 7, 8, 9, 10, 11]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Targets:
    return Targets(tmp_path_factory.mktemp("targets"), steps=0)


def assert_same_text(plain: Harness, drafted: Harness, drafter: str) -> None:
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=12, logprobs=1)
    request = Request(PROMPT, params, speculation=SpeculationOptions(drafter=drafter.lower()))
    expected = plain.run([request.plain()])[0]
    if drafter == "NGRAM":
        # Random text repeats nothing: the drafter gets something to propose.
        request = replace(request, prediction=expected.token_ids)
    found = drafted.run([request])[0]
    assert_bits(expected, found, drafter)
    assert drafted.speculator.drafter(drafter.lower()).counters.num_draft_tokens > 0


@pytest.mark.parametrize(("body", "drafter"), CELLS)
def test_on_a_cpu(targets: Targets, body: str, drafter: str) -> None:
    target = targets[body]
    drafted = target.harness({drafter.lower(): target.drafter(drafter)})
    assert_same_text(target.harness({}, prefix_cache=False), drafted, drafter)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("body", "drafter", "dtype"),
    [*((*cell, "bfloat16") for cell in CELLS), *((*cell, "float16") for cell in FLOAT16_CELLS)],
)
def test_on_a_gpu(targets: Targets, body: str, drafter: str, dtype: str, device: str) -> None:
    def harness(drafters: tuple[str, ...]) -> Harness:
        return on_device.harness(targets[body], drafters, device, dtype=dtype, strict=True)

    assert_same_text(harness(()), harness((drafter,)), drafter)


def test_the_readme_shows_these_cells() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    header = f"| target | {' | '.join(DRAFTERS)} |"
    assert header in lines
    rows = lines[lines.index(header) + 2 :][: len(TARGETS)]
    for row, (name, (_, has_mtp)) in zip(rows, TARGETS.items(), strict=True):
        marks = ["yes" if drafter != "MTP" or has_mtp else "-" for drafter in DRAFTERS]
        assert row == f"| {name} | {' | '.join(marks)} |"
