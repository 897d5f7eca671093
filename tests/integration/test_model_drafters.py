"""Several drafters with models in real services: the text is plain decode's; figures name drafters.

The target and its drafters come from tests/support/deployments.py, fitted to a repeating text.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.integration.stack import EXACT, Stack, running, wait_until
from tests.support.deployments import Targets
from tests.support.fitted_models import text

pytestmark = pytest.mark.slow

DEMO = Path(__file__).parents[2] / "models" / "demo"
# Drafters that may lie beside the demo target, by folder.
DEMO_DRAFTERS = {"eagle3": "EAGLE3", "eagle2": "EAGLE", "standalone": "STANDALONE"}
CODE = """\
def read_lines(path):
    with open(path) as file:
        return [line.strip() for line in file]


def read_words(path):
    with open(path) as file:
        return [line.split() for line in file]


def read_numbers(path):
"""
MAX_TOKENS = 120
NAMES = ("eagle3", "ngram", "standalone")
CHOICES = (*NAMES, "merge", "auto")
FIELDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "T=0.7": {"temperature": 0.7},
    "T=1": {"temperature": 1.0},
    "penalties": {"temperature": 0.8, "presence_penalty": 0.4, "frequency_penalty": 0.1, "repetition_penalty": 1.05},
    "filters": {"temperature": 1.0, "top_p": 0.9, "top_k": 4, "min_p": 0.05, "logit_bias": {"8": 2}},
    "grammar": {"temperature": 0.7, "guided_regex": "[abcd0-24-9]{120,150}"},
    "stop ids": {"temperature": 1.0, "stop_token_ids": [15], "min_tokens": 20},
    "logprobs": {"temperature": 1.0, "logprobs": 3},
    "two choices": {"temperature": 1.0, "n": 2},
    "few draft tokens": {"temperature": 0},
}


@pytest.fixture(scope="module")
def stack(targets: Targets, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    target = targets["llama"]
    models = {"eagle3": target.head_folders["EAGLE3"], "standalone": target.standalone}
    specs = [f"name={name},algorithm={name.upper()},model={folder}" for name, folder in models.items()]
    specs.insert(1, "name=ngram,algorithm=NGRAM")
    with served(target.folder, tmp_path_factory, *specs) as stack:
        yield stack


@contextlib.contextmanager
def served(target: Path, folders: pytest.TempPathFactory, *specs: str, flags: Sequence[str] = ()) -> Iterator[Stack]:
    """Run a stack whose drafters are attached."""
    drafters = [word for spec in specs for word in ("--drafter", spec)]
    names = {spec.removeprefix("name=").split(",")[0] for spec in specs}
    shape = ("--speculative-num-draft-tokens", "6")
    with running(target, folders.mktemp("served") / "log", *drafters, *shape, *flags) as stack:
        wait_until(lambda: attached(stack) == names, stack)
        yield stack


def attached(stack: Stack) -> set[str]:
    ready = httpx.get(f"{stack.url}/ready", timeout=None, trust_env=False).json()
    return {drafter["name"] for drafter in ready["verifiers"][0]["drafters"] if drafter["state"] == "attached"}


_TENANTS = itertools.count()


def body(drafter: str | None, seed: int = 3, *, exact: bool = False, **fields: Any) -> dict[str, Any]:
    """Return a request of a new tenant, without history. ``drafter`` of None: plain decode."""
    speculative: dict[str, Any] = {"enabled": False} if drafter is None else {"drafter": drafter}
    if fields.pop("few", False) and drafter:
        speculative["max_draft_tokens"] = 2
    if exact:
        speculative |= EXACT
    return {
        "model": "target",
        "prompt": text(seed, 40),
        "max_tokens": MAX_TOKENS,
        "seed": seed,
        "cache_salt": f"tenant {next(_TENANTS)}",
        "return_token_sources": True,
        "speculative": speculative,
        **fields,
    }


def ask(stack: Stack, drafter: str | None, **fields: Any) -> dict[str, Any]:
    answer = httpx.post(f"{stack.url}/v1/completions", json=body(drafter, **fields), timeout=None, trust_env=False)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def outputs(answer: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [
        (choice["text"], choice["token_ids"], choice["finish_reason"], choice["logprobs"])
        for choice in answer["choices"]
    ]


def figures(answer: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = answer["metrics"]["speculative_decoding"]["drafters"]
    return found


class Tally:
    """The drafters' sums over several answers."""

    def __init__(self) -> None:
        self.drafted: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()

    def add(self, answer: dict[str, Any]) -> None:
        """Add an answer's figures; answers of several choices have none."""
        for name, each in figures(answer).items() if "metrics" in answer else ():
            assert sum(each["accepted_per_position"]) == each["num_accepted_draft_tokens"]
            self.drafted[name] += each["num_draft_tokens"]
            self.accepted[name] += each["num_accepted_draft_tokens"]

    def wait(self, stack: Stack, name: str, **fields: Any) -> None:
        """Ask until a drafter's tokens were accepted and refused."""
        expected = outputs(ask(stack, None, **fields))

        def has_both() -> bool:
            if 0 < self.accepted[name] < self.drafted[name]:
                return True
            answer = ask(stack, name, exact=True, **fields)
            assert outputs(answer) == expected
            self.add(answer)
            return False

        wait_until(has_both, stack)


def test_the_text_is_plain_decodes_whoever_drafts(stack: Stack) -> None:
    tally = Tally()
    reasons = set()
    stop = ask(stack, None, **FIELDS["greedy"])["choices"][0]["text"][81:87]
    for field, fields in (FIELDS | {"stop string": {"temperature": 0, "stop": [stop]}}).items():
        expected = ask(stack, None, **fields)
        for drafter in CHOICES:
            got = ask(stack, drafter, few=field == "few draft tokens", **fields)
            assert outputs(got) == outputs(expected), (field, drafter)
            tally.add(got)
            names = {"merge": set(NAMES), "auto": {"eagle3", "ngram"}}.get(drafter, {drafter})
            assert "metrics" not in got or set(figures(got)) <= names
        reasons.add((field, expected["choices"][0]["finish_reason"]))
    assert {("stop string", "stop"), ("grammar", "stop"), ("stop ids", "stop"), ("greedy", "length")} <= reasons
    for name in NAMES:
        tally.wait(stack, name, temperature=0.7)


def test_all_at_once(stack: Stack) -> None:
    """Rows of one step ask different drafters."""
    asked = [(drafter, seed) for seed in range(4) for drafter in CHOICES]

    async def answers() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=stack.url, trust_env=False, timeout=None) as client:
            requests = [
                client.post("/v1/completions", json=body(drafter, seed, temperature=0.7)) for drafter, seed in asked
            ]
            return [response.json() for response in await asyncio.gather(*requests)]

    expected = [outputs(ask(stack, None, seed=seed, temperature=0.7)) for seed in range(4)]
    for (drafter, seed), answer in zip(asked, asyncio.run(answers()), strict=True):
        assert outputs(answer) == expected[seed], drafter


@pytest.mark.parametrize("name", ["eagle3", "standalone"])
def test_a_killed_drafter_comes_back_and_drafts(stack: Stack, name: str) -> None:
    expected = outputs(ask(stack, None, temperature=0))
    (killed,) = drafter_processes(stack, name)
    killed.kill()
    assert outputs(ask(stack, name, temperature=0)) == expected
    wait_until(lambda: [p for p in drafter_processes(stack, name) if p.pid != killed.pid], stack)
    wait_until(lambda: attached(stack) == set(NAMES), stack)

    Tally().wait(stack, name, temperature=0.7)


def drafter_processes(stack: Stack, name: str) -> list[psutil.Process]:
    """Return the live drafter processes; a killed one may still be there for a moment."""
    children = stack.children()
    return [child for child in children if any(word.endswith(f"/{name}.sock") for word in drafter_words(child))]


def drafter_words(process: psutil.Process) -> list[str]:
    try:
        words = process.cmdline()
    except psutil.NoSuchProcess:
        return []
    return words if "drafter" in words else []


def test_float16_serves_the_text_of_its_plain_decode(
    targets: Targets, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Target and drafters run in float16, in processes of their own."""
    target = targets["llama"]
    models = {"eagle": target.head_folders["EAGLE"], "eagle3": target.head_folders["EAGLE3"]}
    models["standalone"] = target.standalone
    specs = [f"name={name},algorithm={name.upper()},model={folder}" for name, folder in models.items()]
    with served(target.folder, tmp_path_factory, *specs, flags=("--dtype", "float16")) as stack:
        version = httpx.get(f"{stack.url}/version", timeout=None, trust_env=False).json()
        assert version["verifiers"][0]["dtype"] == "float16"
        for name in models:
            Tally().wait(stack, name, temperature=0.7)


def test_a_name_that_nobody_has_is_refused(stack: Stack) -> None:
    answer = httpx.post(f"{stack.url}/v1/completions", json=body("medusa"), timeout=None, trust_env=False)
    assert answer.status_code == 400
    assert all(name in answer.json()["error"]["message"] for name in NAMES)


@pytest.mark.parametrize(("body_name", "flags"), [("mimo 2", ()), ("qwen3", ("--drafter-placement", "in-process"))])
def test_mtp_layers_of_the_target(
    targets: Targets, tmp_path_factory: pytest.TempPathFactory, body_name: str, flags: tuple[str, ...]
) -> None:
    target = targets[body_name]
    specs = ("name=mtp,algorithm=MTP", "name=ngram,algorithm=NGRAM")
    tally = Tally()
    with served(target.folder, tmp_path_factory, *specs, flags=flags) as stack:
        for field in ("greedy", "T=1", "penalties", "grammar", "logprobs", "two choices"):
            expected = ask(stack, None, **FIELDS[field])
            for drafter in ("mtp", "merge", "auto"):
                got = ask(stack, drafter, **FIELDS[field])
                assert outputs(got) == outputs(expected), (field, drafter)
                tally.add(got)
        tally.wait(stack, "mtp", temperature=0.7)


def test_the_demo_model(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The demo target runs with n-grams and all drafters in its folder."""
    names = ["ngram"]
    specs = ["name=ngram,algorithm=NGRAM"]
    for name, algorithm in DEMO_DRAFTERS.items():
        if (DEMO / name).is_dir():
            names.append(name)
            specs.append(f"name={name},algorithm={algorithm},model={DEMO / name}")
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}}, "required": ["name"]}
    fields = {name: FIELDS[name] for name in ("greedy", "T=0.7", "T=1", "penalties", "logprobs", "two choices")}
    fields["grammar"] = {"temperature": 0.7, "guided_json": schema}
    tally = Tally()
    with served(DEMO / "target", tmp_path_factory, *specs) as stack:
        stop = ask(stack, None, prompt=CODE, **FIELDS["greedy"])["choices"][0]["text"][70:78]
        fields["stop string"] = {"temperature": 0, "stop": [stop]}
        for field, options in fields.items():
            expected = ask(stack, None, prompt=CODE, **options)
            for drafter in (*names, "merge", "auto"):
                got = ask(stack, drafter, prompt=CODE, **options)
                assert outputs(got) == outputs(expected), (field, drafter)
                tally.add(got)
        for name in names:
            tally.wait(stack, name, prompt=CODE, temperature=0.7)
