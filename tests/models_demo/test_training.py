"""The scripts work on a tiny corpus, and the training model equals transformers'."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.demo import train_target
from models.demo.build_data import build_data
from models.demo.evaluate import document_nats, verdict
from models.demo.llama import Llama, LlamaShape
from models.demo.muon import orthogonalise
from models.demo.train_target import TrainingPlan, learning_rate_share, training_windows

TARGET = Path(__file__).parents[2] / "models" / "demo" / "target"
SHAPE = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


@pytest.fixture(scope="module")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    root = folder / "site"
    for number, name in enumerate(("alpha", "beta", "httpx")):
        (root / name).mkdir(parents=True)
        functions = "\n\n".join(
            f'def {name}_{index}(first, second):\n    """Return {name} number {index} of the series."""\n'
            f"    value = first.{name} * second + {number}\n    return value"
            for index in range(30)
        )
        (root / name / "code.py").write_text(functions + "\n")
    empty = str(folder / "empty")
    with pytest.MonkeyPatch.context() as patch:
        paths = {"stdlib": empty, "purelib": empty, "platlib": empty}
        patch.setattr("models.demo.corpus.sysconfig.get_paths", lambda: paths)
        build_data(folder / "data", [root], vocab_size=320, num_workers=1)
        build_data(folder / "again", [root], vocab_size=999, num_workers=1, tokenizer=folder / "data" / "tokenizer")
    return folder / "data"


def test_the_data_holds_each_side_of_the_split(tiny_data: Path) -> None:
    statistics = json.loads((tiny_data / "corpus.json").read_text())
    train = np.load(tiny_data / "train.npy")
    assert (statistics["train_files"], statistics["held_out_files"]) == (2, 1)
    assert statistics["train_tokens"] == len(train)
    assert train[0] == 0 and train.max() < 320
    assert set(range(4, 16)).isdisjoint(train.tolist()), "reserved ids are never emitted"


def test_data_for_an_existing_target_is_made_with_its_tokenizer(tiny_data: Path) -> None:
    again = tiny_data.with_name("again")
    for side in ("train", "held_out"):
        assert np.array_equal(np.load(tiny_data / f"{side}.npy"), np.load(again / f"{side}.npy"))
    assert len(json.loads((again / "tokenizer" / "tokenizer.json").read_text())["model"]["vocab"]) == 320


def test_three_steps_give_a_checkpoint_that_transformers_loads(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "target"
    arguments = ["--steps", "3", "--batch-size", "2", "--context-length", "64", "--device", "cpu"]
    places = ["--data", str(tiny_data), "--output", str(output), "--shape", json.dumps(SHAPE)]
    monkeypatch.setattr("sys.argv", ["train_target", *places, *arguments])
    train_target.main()

    model = AutoModelForCausalLM.from_pretrained(output)
    tokenizer = AutoTokenizer.from_pretrained(output)
    assert model.dtype == torch.bfloat16
    generated = model.generate(torch.tensor([tokenizer.encode("def alpha")]), max_new_tokens=4, do_sample=False)
    assert generated.max() < 320
    log = (tmp_path / "loss.csv").read_text().splitlines()
    assert log[0].startswith("step,tokens") and log[-1].startswith("3,384,")


def test_logits_equal_those_of_transformers() -> None:
    config = json.loads((TARGET / "config.json").read_text())
    shape = LlamaShape()
    assert {key: config[key] for key in shape.config()} == shape.config()
    model = Llama(shape)
    model.load_state_dict({name: value.float() for name, value in load_file(TARGET / "model.safetensors").items()})
    reference = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    tokens = torch.arange(100, 164)[None]
    with torch.no_grad():
        torch.testing.assert_close(model.logits(tokens), reference(tokens).logits, atol=1e-3, rtol=1e-4)


def test_the_bundled_checkpoint_keeps_its_limits() -> None:
    assert Llama(LlamaShape()).num_parameters <= 16_000_000
    assert (TARGET / "model.safetensors").stat().st_size <= 33_000_000


def test_windowed_loss_equals_one_forward_for_a_short_document() -> None:
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    ids = list(range(200, 230))
    tokens = torch.tensor([[0, *ids]])
    with torch.no_grad():
        expected = float(model(tokens, labels=tokens).loss) * len(ids)
    assert document_nats(model, ids) == pytest.approx(expected, rel=1e-4)


def test_windows_of_an_epoch_cover_each_start_once() -> None:
    plan = TrainingPlan(batch_size=2, context_length=10, steps=1)
    windows = training_windows(torch.arange(101), plan, torch.Generator().manual_seed(1))
    first_epoch = torch.cat([next(windows) for _ in range(4)])
    assert first_epoch.shape == (8, 11)
    assert len(set(first_epoch[:, 0].tolist())) == 8
    assert (first_epoch.diff(dim=1) == 1).all()


def test_too_few_tokens_are_refused() -> None:
    plan = TrainingPlan(batch_size=2, context_length=10, steps=1)
    with pytest.raises(ValueError, match="too few"):
        next(training_windows(torch.arange(12), plan, torch.Generator()))


def test_the_schedule_warms_up_and_ends_at_zero() -> None:
    assert learning_rate_share(0, 0.0) < 0.01
    assert learning_rate_share(1_000, 0.3) == 1.0
    assert learning_rate_share(1_000, 0.775) == pytest.approx(0.5)
    assert learning_rate_share(1_000, 1.0) == 0.0


def test_a_plan_needs_one_length() -> None:
    with pytest.raises(ValueError, match="exactly one"):
        TrainingPlan(minutes=1.0, steps=1)


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    matrices = torch.randn(3, 24, 8, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices).float())
    assert values.min() > 0.5 and values.max() < 1.3


@pytest.mark.parametrize(
    ("prompt", "completion", "expected"),
    [
        ("x = 1\n", "y = 2\nz = (", "parses"),
        ("def f():\n", "    return (1,\n", "unfinished"),
        ("x = 1\n", "y = = 2\n", "wrong"),
        ("x = 1\n", "no full line", "wrong"),
    ],
)
def test_verdict(prompt: str, completion: str, expected: str) -> None:
    assert verdict(prompt, completion) == expected
