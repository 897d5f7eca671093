"""float16 on a GPU: logits are those of transformers in float16, and drafts change no text.

Without a GPU, short cases run in Triton's interpreter.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from foretoken.models.backend import Backend
from foretoken.models.batch import chain_batch
from foretoken.models.config import load_config
from foretoken.models.device_sizes import PassSizes
from foretoken.models.flashinfer_attention import obstacle
from foretoken.sampling import SamplingParams, SpeculationOptions
from tests.foretoken.test_models import random_model, some_tokens
from tests.references.head_files import VOCAB, random_target
from tests.support import on_device
from tests.support.deployments import Target, Targets
from tests.support.engine_harness import Request
from tests.support.fitted_models import text
from tests.support.logit_errors import FLOAT16_BAR, printed_error, relative_error
from verifier_svc.model.attention_choice import FlashInferPasses
from verifier_svc.model.device_runner import DeviceRunner

BLOCK = 16
DEMO = Path(__file__).parents[2] / "models" / "demo" / "target"
# Fast and strict numerics, and FlashInfer where it can run.
WAYS = ["fast", "strict", "flashinfer"]


def logits(
    folder: Path, tokens: np.ndarray, cuts: list[int], device: str, way: str = "fast", dtype: str = "float16"
) -> torch.Tensor:
    """Return float32 [tokens, vocabulary] of passes that end at ``cuts``."""
    backend = Backend("gpu", torch.device(device))
    rows = max(end - first for first, end in zip([0, *cuts], cuts, strict=False))
    flashinfer: FlashInferPasses = "all" if way == "flashinfer" else "none"
    runner = DeviceRunner(
        folder,
        backend=backend,
        sizes=PassSizes(rows, rows, 1, 1 + len(tokens) // BLOCK, graphs=flashinfer == "none"),
        strict=way == "strict",
        flashinfer=flashinfer,
        dtype=dtype,
        block_size=BLOCK,
        num_blocks=1 + len(tokens) // BLOCK,
    )
    assert dtype == "auto" or runner.dtype == getattr(torch, dtype)
    found = [
        runner.forward(chain_batch(tokens[first:end].astype(np.int32), first, BLOCK)).clone()
        for first, end in zip([0, *cuts], cuts, strict=False)
    ]
    return torch.cat(found).cpu()


def of_transformers(folder: Path, tokens: np.ndarray, device: str, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
    with torch.inference_mode():
        found: torch.Tensor = model(torch.from_numpy(tokens.astype(np.int64))[None].to(device)).logits[0].float().cpu()
    return found


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("llama", "fast"),
        pytest.param("llama", "strict", marks=pytest.mark.slow),
        pytest.param("qwen2 tied", "fast", marks=pytest.mark.slow),
        pytest.param("qwen3 tied", "fast", marks=pytest.mark.slow),
    ],
)
def test_logits_of_a_random_model(name: str, way: str, tmp_path: Path, device: str) -> None:
    """A prompt in two chunks, then a decode row; ours are about as near to the exact logits."""
    random_model(name).save_pretrained(tmp_path)
    tokens = some_tokens(40)
    found = logits(tmp_path, tokens, [25, 39, 40], device, way)
    expected, exact = (of_transformers(tmp_path, tokens, device, each) for each in (torch.float16, torch.float32))
    assert 0 < printed_error(found, expected) < FLOAT16_BAR
    assert relative_error(found, exact) < 1.2 * relative_error(expected, exact)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # FlashInfer and its compilers warn.
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", WAYS)
def test_logits_of_the_demo_model(way: str, device: str) -> None:
    """A prompt of 600 tokens of Python, then rows of all small numbers."""
    if way == "flashinfer":
        problem = obstacle(load_config(DEMO), torch.float16, torch.device(device))
        if problem is not None:
            pytest.skip(problem)
    code = Path(__file__).read_text() + Path(on_device.__file__).read_text()
    tokens = np.array(Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(code).ids[:800])
    assert len(tokens) == 800
    cuts = [600, *np.cumsum([600, *range(1, 17)])[1:].tolist(), 768, 800]
    found = logits(DEMO, tokens, cuts, device, way)
    assert printed_error(found, of_transformers(DEMO, tokens, device)) < FLOAT16_BAR


@pytest.mark.slow
def test_a_float16_checkpoint_stays_float16(tmp_path: Path, device: str) -> None:
    """Then ``auto`` and ``float16`` have the same bits; a bfloat16 copy has others."""
    model = random_target(tmp_path)
    tokens = np.random.default_rng(1).integers(0, VOCAB, 20)
    wide = logits(tmp_path, tokens, [20], device, dtype="auto")
    assert torch.equal(wide, logits(tmp_path, tokens, [20], device, dtype="bfloat16"))
    model.half().save_pretrained(tmp_path)
    assert torch.equal(logits(tmp_path, tokens, [20], device, dtype="auto"), logits(tmp_path, tokens, [20], device))
    assert not torch.equal(logits(tmp_path, tokens, [20], device), wide)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")  # NumPy's, in the interpreter
def test_hidden_states_too_large_for_float16_end_the_request_with_an_error(tmp_path: Path, device: str) -> None:
    target = Target(tmp_path, "llama", steps=0)
    file = target.folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.weight"] *= 65504 / tensors["model.layers.1.mlp.down_proj.weight"].abs().max()
    save_file(tensors, file, {"format": "pt"})
    request = Request(list(range(5, 25)), SamplingParams(temperature=0.0, max_tokens=3))
    for dtype, is_error in (("bfloat16", False), ("float16", True)):
        (result,) = on_device.harness(target, (), device, dtype=dtype, overlap=False).run([request])
        assert (result.error is not None) == is_error
    assert "too large for float16 (--dtype bfloat16)" in str(result.error)


@pytest.mark.parametrize(
    ("kind", "num_steps"),
    [("EAGLE3", 3), ("EAGLE", 2), ("STANDALONE", 0), ("MTP", 3)],
)
@pytest.mark.slow
@pytest.mark.usefixtures("strict_products")
def test_a_short_text_of_overlapped_steps(targets: Targets, kind: str, num_steps: int, device: str) -> None:
    """Hidden states and embeddings of target and drafter are float16 in the same memory."""
    target = targets["mimo" if kind == "MTP" else "llama"]
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=9, presence_penalty=0.1)
    request = Request(text(1, 20), params, speculation=SpeculationOptions(drafter=kind.lower()))
    plain = on_device.harness(target, (), device, dtype="float16", strict=True, overlap=False)
    expected = plain.run([request.plain()])[0]
    harness = on_device.harness(target, (kind,), device, dtype="float16", strict=True, num_steps=num_steps)
    got = harness.run([request])[0]
    assert got.error is None and got.token_ids == expected.token_ids and len(got.token_ids) == 9
    assert harness.engine.counters.num_overlapped_steps > 1
    assert harness.speculator.drafters[0].counters.num_accepted_tokens > 0
