"""SGLang's command lines become ours, and each of its flags has one fate."""

from __future__ import annotations

import re

import pytest

from foretoken.commands.options import settings_of_command
from foretoken.commands.sglang_flags import INSTEAD_OF_VALUES, RENAMED_VALUES, SAID_OF_RENAMED, SAME_FLAGS, SGLANG_FLAGS
from foretoken.commands.sglang_page import _HEAD, lines
from foretoken.commands.sglang_words import translate
from foretoken.config import build
from foretoken.errors import ConfigError
from tests.support.command_line import ROOT
from verifier_svc.config import VerifierSettings

OWN = {setting.flag for setting in settings_of_command("serve")} | {"--config", "--dry-run", "--help"}


def ours(line: str) -> str:
    """Return our words of a line about which nothing is to be said."""
    words, notices = translate(line.split(), OWN)
    assert notices == []
    return " ".join(words)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--model m", "m"),
        ("--model-path=m --port=1", "m --port=1"),
        ("m --speculative-algo EAGLE", "m --speculative-algorithm EAGLE"),
        ("--mem-fraction 0.7", "--mem-fraction-static 0.7"),
        ("--mem-fraction=0.7", "--mem-fraction-static=0.7"),
        ("--speculative-draft d", "--speculative-draft-model-path d"),
        ("--speculative-draft-model d", "--speculative-draft-model-path d"),
        ("--speculative-draft-model-p d", "--speculative-draft-model-path d"),
        ("--tp 1 --tensor-parallel-size=1 m", "m"),
        ("--quantize", "--quantize"),
        ("--dtype half", "--dtype float16"),
        ("--dtype=float", "--dtype float32"),
        ("--dtype float16", "--dtype float16"),
        ("--page-size 8", "--block-size 8"),
        ("--speculative-ngram-match-type PROB", "--speculative-ngram-order frequency"),
        ("--speculative-lookahead-max-bfs-breadth 3", "--speculative-ngram-max-bfs-breadth 3"),
        (
            "--speculative-one-branch m",
            "--speculative-ngram-min-bfs-breadth 1 --speculative-ngram-max-bfs-breadth 1 m",
        ),
        ("--enable-deterministic-inference", "--numerics strict"),
        ("--drafter name=a,algorithm=NGRAM -- --tp 2", "--drafter name=a,algorithm=NGRAM -- --tp 2"),
    ],
)
def test_words_become_ours(line: str, expected: str) -> None:
    assert ours(line) == expected


def test_what_has_no_use_is_said_once() -> None:
    line = (
        "--cuda-graph-bs 1 2 4 --enable-torch-compile m --enable-torch-compile --trust-remote --attention-backend fa3"
    )
    words, notices = translate(line.split(), OWN)
    # The list ends at the next flag.
    assert words == ["m"]
    said = ["--cuda-graph-bs 1 2 4", "--enable-torch-compile", "--trust-remote-code", "--attention-backend fa3"]
    assert [notice.partition(": ")[0] for notice in notices] == said


@pytest.mark.parametrize("line", ["--chunked-prefill-size -1 m", "--chunked-prefill-size=-1 m", "--chunked -1 m"])
def test_prompts_in_one_piece_are_the_largest_chunk(line: str) -> None:
    words, notices = translate(line.split(), OWN)
    assert words == ["--chunked-prefill-size", "8192", "m"]
    assert notices == ["--chunked-prefill-size -1 is 8192 here: longer prompts take several steps"]
    needed = {"model": "m", "served_model_name": "m", "address": "unix:/v"}
    build(VerifierSettings, needed | {"chunked_prefill_size": 65536})
    with pytest.raises(ConfigError, match="at most 65536"):
        build(VerifierSettings, needed | {"chunked_prefill_size": 65537})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--tp 2", "--tp 2: one model runs on one GPU here"),
        ("--tensor-parallel=2", "--tensor-parallel-size 2: one model runs on one GPU here"),
        ("--quantization fp8", "--quantization fp8: quantized weights and caches are not supported yet"),
        ("--kv-cache-dtype fp8_e5m2", "--kv-cache-dtype fp8_e5m2: quantized"),
        ("--lora-paths a b", "--lora-paths a b: LoRA adapters are not supported"),
        ("--load-format dummy", "--load-format dummy: safetensors are loaded, and nothing else"),
        ("--speculative-num 3", "--speculative-num is short for several flags: --speculative-num-draft-tokens, --spec"),
        ("--model", "--model needs a value"),
        ("--model --port 1", "--model needs a value"),
        ("--trust-remote-code=1", "--trust-remote-code takes no value"),
        ("--speculative-attention-mode foo", "'foo' is not one of prefill, decode"),
    ],
)
def test_what_cannot_be_kept_is_refused(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        translate(line.split(), OWN)


def test_the_table_is_sound() -> None:
    names = [name for row in SGLANG_FLAGS for name in row.names]
    assert len(names) == len(set(names))
    assert not set(names) & OWN, "a setting needs no row"
    for row in SGLANG_FLAGS:
        assert sum((bool(row.to), bool(row.instead), bool(row.refused))) == 1, row.names
        assert {word for word in row.to if word.startswith("--")} <= OWN, row.names
    assert set(SAME_FLAGS) <= OWN
    assert {*RENAMED_VALUES, *INSTEAD_OF_VALUES} <= set(SAME_FLAGS)
    assert SAID_OF_RENAMED.keys() <= RENAMED_VALUES.keys()


def test_the_page_is_of_the_table() -> None:
    """On a mistake run ``make docs``."""
    page = (ROOT / "docs" / "sglang.md").read_text()
    assert page == "\n".join([_HEAD, *lines()]) + "\n"
