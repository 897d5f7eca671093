"""The protocol of reference processes, and transformers timed token by token."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.reference import (
    EngineGenerator,
    Reference,
    ReferenceFailedError,
    TransformersGenerator,
    running_reference,
    serve,
)


class Counter:
    """A decoder that generates 1, 2, 3 ..., a tenth of a second apart."""

    def generate(self, prompt_ids: Sequence[int], num_tokens: int) -> tuple[list[int], list[float]]:
        start = 1e9
        return list(range(1, num_tokens + 1)), [start + 0.1 * i for i in range(num_tokens)]


def test_requests_and_answers_pass_as_lines() -> None:
    answers = io.StringIO()
    serve(Counter(), io.StringIO('{"prompt_ids": [5], "num_tokens": 3}\n'), answers)
    requests = io.StringIO()
    answers.seek(0)
    reference = Reference(requests, answers)
    reference.wait_ready()
    token_ids, timing = reference.generate([5], 3)
    assert json.loads(requests.getvalue()) == {"prompt_ids": [5], "num_tokens": 3}
    assert token_ids == [1, 2, 3]
    assert timing.num_tokens == 3
    assert timing.decode_s == pytest.approx(0.2)
    with pytest.raises(ReferenceFailedError):
        reference.generate([5], 3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random Llama in Hugging Face layout, with a tokenizer file of its size."""
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    vocab = {f"t{i}": i for i in range(128)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "t0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.mark.slow
def test_transformers_and_the_engine_alone_make_the_same_tokens(checkpoint: Path) -> None:
    prompt = [3, 14, 15, 92, 65]
    outputs = {}
    for generator in (TransformersGenerator(checkpoint, 1), EngineGenerator(checkpoint, 1)):
        for attempt in range(2):
            token_ids, times = generator.generate(prompt, 12)
            assert len(token_ids) == len(times) == 12
            assert times == sorted(times)
            assert times[-1] > times[0]
            outputs[type(generator).__name__, attempt] = token_ids
    assert len({tuple(tokens) for tokens in outputs.values()}) == 1


def test_a_reference_process_that_cannot_load_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(ReferenceFailedError),
        running_reference("transformers", tmp_path, 1) as reference,
    ):
        reference.generate([1], 2)
