"""`foretoken train`: runs on a tiny target, their files, resuming, refused options."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from foretoken.cli import app
from foretoken.errors import CheckpointError, ConfigError
from foretoken.models.config import MODEL_TYPES, load_config
from foretoken.models.draft_head import HostDraftHead, load_head
from foretoken.models.draft_weights import HeadSource
from foretoken.models.target_weights import load_target_weights
from foretoken.train import target as target_module
from foretoken.train import trainer
from foretoken.train.__main__ import parse, run
from foretoken.train.data import load_split
from foretoken.train.eagle import EagleRecipe
from foretoken.train.evaluate import Acceptance
from foretoken.train.options import ALGORITHMS, TrainOptions
from foretoken.train.standalone import StandaloneRecipe
from foretoken.train.trainer import CHECKPOINT_FILE, learning_rate_share, train
from tests.support.tiny_target import VOCAB_SIZE, repeating_tokens, write_tiny_target

SMALL = ("--batch-size", "4", "--context-length", "16", "--held-out-sequences", "4", "--num-draft-steps", "3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a target, and its tokens in `train.npy` and `held_out.npy`."""
    folder = tmp_path_factory.mktemp("train")
    write_tiny_target(folder / "target")
    np.save(folder / "train.npy", repeating_tokens())
    np.save(folder / "held_out.npy", repeating_tokens(400))
    return folder


def options(folder: Path, output: Path, algorithm: str, *more: str) -> TrainOptions:
    sizes = {"eagle3": ("--draft-vocab-size", "24"), "standalone": ("--hidden-size", "32", "--num-layers", "2")}
    paths = (str(folder / "target"), "--data", str(folder / "train.npy"), "--held-out", str(folder / "held_out.npy"))
    arguments = [algorithm, *paths, "--output", str(output), *SMALL, *sizes.get(algorithm, ()), *more]
    return parse(arguments, "foretoken train")


def losses(output: Path) -> list[float]:
    history: list[dict[str, Any]] = json.loads((output / "train.json").read_text())["history"]
    return [row["loss"] for row in history if "loss" in row]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_loss_falls_and_acceptance_is_reported(
    folder: Path, tmp_path: Path, algorithm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    acceptance = train(options(folder, tmp_path, algorithm, "--steps", "60", "--log-every", "10"))
    report = json.loads((tmp_path / "train.json").read_text())
    fallen = losses(tmp_path)
    assert fallen[-1] < 0.9 * fallen[0]
    assert report["acceptance_per_step"] == [round(each, 4) for each in acceptance.per_step]
    assert len(acceptance.per_step) == 3
    assert report["num_steps"] == 60 and report["num_tokens"] == 60 * 4 * 16
    assert "tokens/s" in (printed := capsys.readouterr().out) and "held-out acceptance per step" in printed
    assert not (tmp_path / CHECKPOINT_FILE).exists()


@pytest.mark.parametrize(("share", "is_warned"), [(0.0, True), (0.04, True), (0.06, False)])
def test_a_drafter_that_accepts_almost_nothing_is_warned_of(
    share: float,
    is_warned: bool,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trainer, "measure", lambda *words: Acceptance((share,), 1 + share, 100))
    train(options(folder, tmp_path, "standalone", "--steps", "1"))
    *_, before, last = capsys.readouterr().out.splitlines()
    written = f"written: {tmp_path}"
    if is_warned:
        assert before == written and last.startswith(f"WARNING: a step with this drafter writes {1 + share:.2f} tokens")
        assert all(flag in last for flag in ("1 steps", "--steps", "--data", "--self-text"))
    else:
        assert last == written


def test_self_text_is_prompts_and_what_the_target_writes_and_says_what_it_does(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, words = tmp_path / "text.npy", ["--data", str(folder / "train.npy"), "--device", "cpu"]
    words += ["--length", "16", "--prompt-length", "4", "--batch-size", "2", "--greedy-share", "1"]
    run(["self-text", str(folder / "target"), *words, "--output", str(file), "--tokens", "40"], "foretoken train")
    rows = np.load(file).reshape(3, 16)
    texts = repeating_tokens()
    prompts = np.lib.stride_tricks.sliding_window_view(texts, 4)
    assert all((prompts == row[:4]).all(axis=1).any() for row in rows)
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    assert np.array_equal(target(torch.from_numpy(rows).long()).logits.argmax(-1)[:, 3:-1].numpy(), rows[:, 4:])
    first, *others = capsys.readouterr().out.splitlines()
    assert first == f"loading {folder / 'target'}"
    assert others == ["writing 48 tokens, 32 at a time, on cpu", "32 of 48 tokens", "48 of 48 tokens"]
    # The first line is there before the long work begins.
    with pytest.raises(CheckpointError):
        run(["self-text", str(tmp_path), *words, "--output", str(file)], "foretoken train")
    assert capsys.readouterr().out == f"loading {tmp_path}\n"


def test_an_eagle3_head_has_the_public_names_shapes_and_config(folder: Path, tmp_path: Path) -> None:
    train(options(folder, tmp_path, "eagle3", "--steps", "2", "--intermediate-size", "48"))
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name: list(value.shape) for name, value in tensors.items()} == {
        "fc.weight": [32, 96],
        "midlayer.self_attn.q_proj.weight": [32, 64],
        "midlayer.self_attn.k_proj.weight": [16, 64],
        "midlayer.self_attn.v_proj.weight": [16, 64],
        "midlayer.self_attn.o_proj.weight": [32, 32],
        "midlayer.mlp.gate_proj.weight": [48, 32],
        "midlayer.mlp.up_proj.weight": [48, 32],
        "midlayer.mlp.down_proj.weight": [32, 48],
        "midlayer.input_layernorm.weight": [32],
        "midlayer.hidden_norm.weight": [32],
        "midlayer.post_attention_layernorm.weight": [32],
        "norm.weight": [32],
        "lm_head.weight": [24, 32],
        "d2t": [24],
        "t2d": [VOCAB_SIZE],
    }
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert {value.dtype for name, value in tensors.items() if "weight" in name} == {torch.bfloat16}
    ids = torch.arange(24) + tensors["d2t"]
    assert torch.equal(ids, tensors["t2d"].nonzero()[:, 0])
    assert set(repeating_tokens().tolist()) <= set(ids.tolist())
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["draft_vocab_size"], config["vocab_size"]) == (24, VOCAB_SIZE)
    assert (config["num_hidden_layers"], config["intermediate_size"], config["rope_theta"]) == (1, 48, 5000.0)
    # Explicit ids would mean outputs, one layer further on; and this key makes EAGLE's code look
    # for an embedding.
    assert "eagle_config" not in config and "target_hidden_size" not in config


def test_an_eagle3_head_may_use_the_targets_output_head_and_other_layers(folder: Path, tmp_path: Path) -> None:
    train(options(folder, tmp_path, "eagle3", "--steps", "2", "--draft-vocab-size", "0", "--feature-layers", "1", "3"))
    tensors = load_file(tmp_path / "model.safetensors")
    assert not {"lm_head.weight", "d2t", "t2d"} & tensors.keys()
    assert list(tensors["fc.weight"].shape) == [32, 64]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["draft_vocab_size"] is None
    # Outputs of layers 0 and 2 are inputs of layers 1 and 3.
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [0, 2], "use_aux_hidden_state": True}
    config = load_config(folder / "target")
    source = HeadSource(tmp_path, config, load_target_weights(folder / "target", config), torch.float32)
    head = HostDraftHead(load_head(source, num_blocks=4, block_size=16), num_positions=64)
    assert (head.family, head.captured_layers, head.draft_vocab_size) == ("eagle3", (1, 3), VOCAB_SIZE)
    assert head.target_ids is None


def test_an_eagle2_head_has_the_public_names_and_shapes(folder: Path, tmp_path: Path) -> None:
    train(options(folder, tmp_path, "eagle2", "--steps", "2"))
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name: list(value.shape) for name, value in tensors.items()} == {
        "fc.weight": [32, 64],
        "fc.bias": [32],
        "layers.0.self_attn.q_proj.weight": [32, 32],
        "layers.0.self_attn.k_proj.weight": [16, 32],
        "layers.0.self_attn.v_proj.weight": [16, 32],
        "layers.0.self_attn.o_proj.weight": [32, 32],
        "layers.0.mlp.gate_proj.weight": [64, 32],
        "layers.0.mlp.up_proj.weight": [64, 32],
        "layers.0.mlp.down_proj.weight": [32, 64],
        "layers.0.post_attention_layernorm.weight": [32],
    }
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLMEagle"]


def test_a_standalone_model_is_an_ordinary_checkpoint_with_the_targets_tokenizer(folder: Path, tmp_path: Path) -> None:
    train(options(folder, tmp_path, "standalone", "--steps", "2", "--num-heads", "4", "--num-kv-heads", "2"))
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True, dtype=torch.float32)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert model(torch.tensor([[5, 6, 7]])).logits.shape == (1, 3, VOCAB_SIZE)
    config = load_config(tmp_path)
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (2, 32, 4, 2)
    assert config.tie_word_embeddings and config.rope.theta == 5000.0
    text = "def one(): return each"
    ids = [AutoTokenizer.from_pretrained(each).encode(text) for each in (tmp_path, folder / "target")]
    assert ids[0] == ids[1] != []


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(
    folder: Path, tmp_path: Path, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--steps", "9", "--checkpoint-every", "4", "--evaluate-every", "3")
    whole = train(options(folder, tmp_path / "whole", algorithm, *flags))
    for recipe in (*EagleRecipe.__subclasses__(), StandaloneRecipe):
        with monkeypatch.context() as patch:
            patch.setattr(recipe, "loss", interrupted(recipe.loss, 6))  # type: ignore[attr-defined]
            if algorithm in recipe.__name__.lower():
                with pytest.raises(KeyboardInterrupt):
                    train(options(folder, tmp_path / "resumed", algorithm, *flags))
    assert not (tmp_path / "resumed" / "model.safetensors").exists()
    resumed = train(options(folder, tmp_path / "resumed", algorithm, *flags, "--resume"))
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "resumed"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert resumed == whole


def interrupted(loss: Any, at_step: int) -> Any:
    def stopping(self: Any, tokens: torch.Tensor, step: int) -> torch.Tensor:
        if step == at_step:
            raise KeyboardInterrupt
        result: torch.Tensor = loss(self, tokens, step)
        return result

    return stopping


def test_a_resumed_run_must_be_the_same_run(folder: Path, tmp_path: Path) -> None:
    flags = ("--steps", "3", "--checkpoint-every", "1")
    start = options(folder, tmp_path, "eagle2", *flags)
    with pytest.raises(CheckpointError, match="there is no"):
        train(replace(start, resume=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EagleRecipe.__subclasses__()[1], "loss", interrupted(EagleRecipe.__subclasses__()[1].loss, 2))  # type: ignore[attr-defined]
        with pytest.raises(KeyboardInterrupt):
            train(start)
    with pytest.raises(ConfigError, match=r"--matrix-lr was 0.005 and is 0.5"):
        train(replace(start, resume=True, matrix_lr=0.5))


def test_text_folders_are_encoded_with_the_targets_tokenizer_and_split_by_file(folder: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    (texts / "deep").mkdir(parents=True)
    for index in range(5):
        (texts / "deep" / f"{index}.py").write_text(f"def one(): return {index}\n")
    (texts / "notes.md").write_text("not asked for")
    split = load_split(texts, None, ("*.py",), folder / "target", 0, VOCAB_SIZE)
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    documents = tokenizer.decode(split.train.tolist()).split("<|end|>")[1:]
    assert documents == [f"def one(): return {index}\n" for index in (0, 1, 3, 4)]
    assert tokenizer.decode(split.held_out.tolist()) == "<|end|>def one(): return 2\n"
    with pytest.raises(ConfigError, match=r"no file named \*\.txt"):
        load_split(texts, None, ("*.txt",), folder / "target", 0, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([1, VOCAB_SIZE]), f"the target has {VOCAB_SIZE}"),
        (np.array([1, -1]), "ids from -1"),
        (np.array([0.5]), "expected integers"),
        (np.array([[1]]), "expected integers"),
    ],
)
def test_token_files_that_are_not_the_targets_are_refused(
    folder: Path, tmp_path: Path, array: Any, message: str
) -> None:
    np.save(tmp_path / "bad.npy", array)
    with pytest.raises(ConfigError, match=message):
        load_split(tmp_path / "bad.npy", None, (), folder / "target", 0, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "exactly one of --steps and --minutes"),
        (("--steps", "1", "--minutes", "1"), "exactly one of --steps and --minutes"),
        (("--steps", "0"), "--steps: expected more than 0, got 0"),
        (("--steps", "1", "--step-decay", "1.5"), "--step-decay: expected more than 0 and at most 1"),
        (("--steps", "1", "--draft-vocab-size", "-1"), "--draft-vocab-size: expected at least 0, got -1"),
    ],
)
def test_options_out_of_bounds_are_refused_by_name(
    folder: Path, tmp_path: Path, more: Sequence[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        options(folder, tmp_path, "eagle3", *more)


@pytest.mark.parametrize(
    ("algorithm", "more", "message"),
    [
        ("eagle3", ("--draft-vocab-size", "9999"), f"the target has {VOCAB_SIZE} tokens"),
        ("eagle3", ("--feature-layers", "0", "2"), "--feature-layers: expected 1 to 3, got 0 2"),
        ("eagle3", ("--feature-layers", "2", "4"), "--feature-layers: expected 1 to 3, got 2 4"),
        ("eagle3", ("--num-heads", "3", "--num-kv-heads", "2"), "must be a multiple of --num-kv-heads 2"),
        ("eagle2", ("--context-length", "4000"), "fewer than one prompt of 2002"),
        ("eagle2", ("--device", "toaster"), "--device"),
    ],
)
def test_options_that_do_not_fit_the_target_are_refused(
    folder: Path, tmp_path: Path, algorithm: str, more: Sequence[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(options(folder, tmp_path, algorithm, "--steps", "1", *more))


def test_targets_that_cannot_be_run_are_refused(folder: Path, tmp_path: Path) -> None:
    write_tiny_target(tmp_path / "shallow", num_layers=3)
    start = options(folder, tmp_path / "out", "eagle3", "--steps", "1")
    with pytest.raises(ConfigError, match="at least 4 layers, this one has 3"):
        train(replace(start, target=tmp_path / "shallow"))
    config = tmp_path / "shallow" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "mamba"}))
    with pytest.raises(ConfigError, match="model_type 'mamba' is not supported"):
        train(replace(start, target=tmp_path / "shallow"))
    assert target_module.MODEL_TYPES == MODEL_TYPES


def test_flags_without_a_meaning_for_an_algorithm_are_not_taken(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        options(folder, tmp_path, "eagle2", "--steps", "1", "--draft-vocab-size", "24")


@pytest.mark.parametrize(
    ("word", "algorithm"),
    [("EAGLE3", "eagle3"), ("Eagle3", "eagle3"), ("EAGLE2", "eagle2"), ("EAGLE", "eagle2"), ("eagle", "eagle2")],
)
def test_an_algorithm_may_be_in_any_case(folder: Path, tmp_path: Path, word: str, algorithm: str) -> None:
    assert options(folder, tmp_path, word, "--steps", "1").algorithm == algorithm


def test_the_command_line_trains(folder: Path, tmp_path: Path) -> None:
    paths = ["--data", str(folder / "train.npy"), "--output", str(tmp_path)]
    done = CliRunner().invoke(app, ["train", "eagle2", str(folder / "target"), *paths, "--steps", "1", *SMALL])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "model.safetensors").is_file()


def test_a_checkpoint_is_not_written_over(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds a checkpoint"):
        train(options(folder, tmp_path, "eagle2", "--steps", "1"))
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_the_learning_rate_warms_up_stays_and_falls_to_nothing() -> None:
    assert learning_rate_share(0, 0.0, 10) == pytest.approx(0.1)
    assert learning_rate_share(10, 0.1, 10) == 1.0
    assert learning_rate_share(500, 0.5, 10) == 1.0
    assert learning_rate_share(750, 0.75, 10) == pytest.approx(0.5)
    assert learning_rate_share(1000, 1.0, 10) == 0.0


def test_a_mimo_target_is_run_as_the_body_that_it_is(tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    body = Qwen2ForCausalLM(config).eval()
    body.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "mimo", "auto_map": {"AutoModel": "x.Y"}}))
    target = target_module.FrozenTarget(tmp_path, torch.device("cpu"))
    tokens = torch.arange(9)[None]
    output = body.model(tokens, output_hidden_states=True)
    found = target.run(tokens, (1, 2))
    assert torch.equal(found.final, output.last_hidden_state)
    assert torch.equal(found.hidden_states, torch.cat([output.hidden_states[1], output.hidden_states[2]], dim=-1))
