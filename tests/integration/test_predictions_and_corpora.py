"""The whole stack accepts drafts from predictions and corpora, also after the drafter's death."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.stack import ENVIRONMENT, EXACT, OUTSIDE, Stack, is_ready, operator_command, running, wait_until

KEY = "an operator's own key"
AUTH = {"authorization": f"Bearer {KEY}"}
NUM_TOKENS = 120
PROMPT = "for i in range(10):\n"


@pytest.fixture(scope="module")
def stack(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("operated")
    (folder / "key").write_text(KEY)
    with running(checkpoint, folder / "log", *OUTSIDE, "--admin-api-key-file", str(folder / "key")) as stack:
        yield stack


def ask(stack: Stack, tenant: str, **more: Any) -> dict[str, Any]:
    """Ask for text that hardly repeats itself, for a tenant without history."""
    sampling = {"max_new_tokens": NUM_TOKENS, "temperature": 1.0, "sampling_seed": 7, "ignore_eos": True}
    body = {"text": PROMPT, "sampling_params": sampling, "cache_salt": tenant, "speculative": EXACT, **more}
    answer = httpx.post(f"{stack.url}/generate", json=body, timeout=None, trust_env=False)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def accepted(answer: dict[str, Any]) -> int:
    """Return the accepted tokens."""
    count: int = answer["meta_info"]["spec_accept_token_num"]
    return count


def corpora(stack: Stack) -> dict[str, int]:
    answer = httpx.get(f"{stack.url}/v1/corpora", headers=AUTH, timeout=None, trust_env=False)
    return {entry["name"]: entry["num_tokens"] for entry in answer.json()["data"]} if answer.is_success else {}


@pytest.mark.slow
def test_a_prediction_is_drafted_from(stack: Stack) -> None:
    plain = ask(stack, "plain", speculative={"enabled": False})
    output = plain["output_ids"]
    assert accepted(plain) == 0
    tenants = itertools.count()

    def is_drafted_from(prediction: list[int], least: int, num_accepted: int) -> bool:
        """Return whether it is; a drafter that is late on a busy machine is not waited for."""
        answer = ask(stack, f"predicted {next(tenants)}", prediction=prediction)
        assert answer["output_ids"] == output
        assert answer["meta_info"]["accepted_prediction_tokens"] >= num_accepted
        return accepted(answer) > least

    wait_until(lambda: is_drafted_from(output, 30, NUM_TOKENS), stack)
    wait_until(lambda: is_drafted_from([*output[:40], 5, 6, *output[50:]], 15, 0), stack)
    wrong = ask(stack, "wrong", prediction=output[::-1])
    assert wrong["output_ids"] == output and wrong["text"] == plain["text"]


@pytest.mark.slow
def test_corpora_are_drafted_from_until_they_are_removed(stack: Stack) -> None:
    output = ask(stack, "writer", speculative={"enabled": False})["output_ids"]
    without = accepted(ask(stack, "before"))
    body = {"name": "outputs", "token_ids": output}
    url = f"{stack.url}/v1/corpora"
    assert httpx.post(url, json=body, headers=AUTH, timeout=None, trust_env=False).status_code == 200
    tenants = itertools.count()

    def is_drafted_from() -> bool:
        """Return whether it is; a drafter that is late on a busy machine is not waited for."""
        answer = ask(stack, f"tenant {next(tenants)}")
        assert answer["output_ids"] == output
        return accepted(answer) > without + 20

    wait_until(is_drafted_from, stack)
    drafter = stack.service("drafter")
    drafter.kill()
    wait_until(lambda: corpora(stack) == {"outputs": NUM_TOKENS} and stack.service("drafter") != drafter, stack)
    wait_until(is_drafted_from, stack)

    assert operate(stack, "corpus", "list") == f"outputs: {NUM_TOKENS} tokens, drafter ngram\n"
    assert operate(stack, "corpus", "remove", "outputs") == "outputs: removed\n"
    assert operate(stack, "corpus", "list") == "no corpora\n"
    assert accepted(ask(stack, "removed")) < without + 10


def operate(stack: Stack, *words: str) -> str:
    """Return what one of the operator's commands prints."""
    command = operator_command(stack, *words)
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_ngrams_inside_the_verifier_draft_from_corpora_until_it_dies(checkpoint: Path, tmp_path: Path) -> None:
    """They are there by default. Detached, they come back with the next verifier."""
    (tmp_path / "key").write_text(KEY)
    with running(checkpoint, tmp_path / "log", "--admin-api-key-file", str(tmp_path / "key")) as stack:
        assert not [child for child in stack.children() if "foretoken drafter " in " ".join(child.cmdline())]
        plain = ask(stack, "writer", speculative={"enabled": False})["output_ids"]
        without = accepted(ask(stack, "before"))
        body = {"name": "outputs", "token_ids": plain}
        assert httpx.post(f"{stack.url}/v1/corpora", json=body, headers=AUTH, timeout=None, trust_env=False).is_success
        assert corpora(stack) == {"outputs": NUM_TOKENS}
        answer = ask(stack, "reader")
        assert answer["output_ids"] == plain and accepted(answer) > without + 20

        assert operate(stack, "drafters", "detach", "ngram") == "ngram: detached\n"
        answer = ask(stack, "nobody drafts")
        assert answer["output_ids"] == plain and accepted(answer) == 0
        assert "ngram: detached, NGRAM over in-process" in operate(stack, "drafters", "list")

        verifier = stack.service("verifier")
        verifier.kill()
        verifier.wait()
        wait_until(lambda: is_ready(stack), stack)
        assert operate(stack, "corpus", "list") == "no corpora\n"
        answer = ask(stack, "again", prediction=plain)
        assert answer["output_ids"] == plain and accepted(answer) > 20
