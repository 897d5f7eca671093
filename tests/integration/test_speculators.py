"""A repository of vLLM's speculators alone sets up target
and drafter, from a folder and from a hub.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result

from foretoken.cli import app
from tests.integration.stack import running, wait_until
from tests.references.head_files import speculators_config
from tests.support.deployments import Targets
from tests.support.fake_hub import FakeHub, running_hub

TARGET, HEAD = "org/tiny", "org/tiny-speculator.eagle3"


def named(target: str | None, **fields: Any) -> dict[str, Any]:
    """Return a head's speculators_config; ``target``: what it names."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "accept_tolerance": 0.0, "verifier_accept_k": 1}
    verifier = {"name_or_path": target, "architectures": ["LlamaForCausalLM"]}
    methods = {"default_proposal_method": "greedy", "proposal_methods": [proposal]}
    return {"algorithm": "eagle3", "verifier": verifier, **methods, **fields}


@dataclass
class Repository:
    target: Path
    head: Path

    def configure(self, **speculators: Any) -> None:
        """Change fields of the head's speculators_config."""
        file = self.head / "config.json"
        config = json.loads(file.read_text())
        config["speculators_config"] |= speculators
        file.write_text(json.dumps(config))

    def dry(self, *flags: str) -> Result:
        return CliRunner().invoke(app, ["serve", str(self.head), *flags, "--dry-run"])

    def refusal(self, *flags: str) -> str:
        result = self.dry(*flags)
        assert result.exit_code == 1
        return str(result.exception)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Targets:
    return Targets(tmp_path_factory.mktemp("targets"), steps=0)


@pytest.fixture
def repository(targets: Targets, tmp_path: Path) -> Repository:
    """Return folders of a target and of a head in speculators' form that names it."""
    found = Repository(tmp_path / "tiny", tmp_path / "tiny-speculator.eagle3")
    shutil.copytree(targets["llama"].folder, found.target)
    shutil.copytree(targets["llama"].head_folders["EAGLE3"], found.head)
    config = json.loads((found.head / "config.json").read_text())
    config = speculators_config(config, speculators_config=named(str(found.target)))
    (found.head / "config.json").write_text(json.dumps(config))
    return found


@pytest.fixture
def hub(repository: Repository) -> Iterator[FakeHub]:
    """Serve both as repositories of a hub."""
    repository.configure(**named(TARGET))
    folders = {TARGET: repository.target, HEAD: repository.head}
    files = {name: {path.name: path.read_bytes() for path in folder.iterdir()} for name, folder in folders.items()}
    with running_hub(files) as server:
        yield server


def test_a_head_brings_its_target(repository: Repository) -> None:
    result = repository.dry()
    assert result.exit_code == 0, result.exception
    assert "drafters   eagle3 (EAGLE3, process)" in result.stdout
    head, target = repository.head, repository.target
    assert result.stderr.splitlines()[:2] == [
        f"foretoken: {head} is a draft head of algorithm EAGLE3; the target is {target}, which its config.json names",
        "foretoken: its config.json proposes 3 tokens a step; here the shape follows from what pays "
        "(--speculative-num-steps 3 fixes it)",
    ]


@pytest.mark.parametrize(
    ("flags", "drafters"),
    [
        (("--speculative-algorithm", "eagle3"), "eagle3 (EAGLE3, process)"),
        (("--speculative-algorithm", "NGRAM"), "ngram (NGRAM, in-process)"),
        (("--speculative-algorithm", "NONE"), "none"),
        (("--drafter", "name=other,algorithm=NGRAM"), "other (NGRAM, in-process)"),
        (("--drafter", "name=mine,algorithm=EAGLE3,model={head}"), "mine (EAGLE3, process)"),
    ],
)
def test_flags_win(repository: Repository, flags: tuple[str, ...], drafters: str) -> None:
    result = repository.dry(*(flag.format(head=repository.head) for flag in flags))
    assert result.exit_code == 0, result.exception
    assert f"drafters   {drafters}\n" in result.stdout


def test_another_head_wins(repository: Repository, tmp_path: Path) -> None:
    assert "--speculative-draft-model-path" in repository.refusal("--speculative-draft-model-path", str(tmp_path))


@pytest.mark.parametrize("target", [None, ""])
def test_a_head_without_a_target_says_what_to_type(repository: Repository, target: str | None) -> None:
    repository.configure(verifier={"name_or_path": target})
    found = repository.refusal()
    assert "config.json names no target (speculators_config.verifier.name_or_path); name it: foretoken serve" in found
    assert f"serve TARGET --speculative-algorithm EAGLE3 --speculative-draft-model-path {repository.head}" in found


def test_a_target_that_is_not_there(repository: Repository) -> None:
    repository.configure(verifier={"name_or_path": "/home/trainer/Tiny"})
    found = repository.refusal()
    assert "config.json names the target /home/trainer/Tiny, where no config.json is found; name it: " in found


def test_a_target_that_is_a_head(repository: Repository) -> None:
    repository.configure(verifier={"name_or_path": str(repository.head)})
    assert "which is a draft head itself" in repository.refusal()


def test_other_algorithms_are_refused_by_name(repository: Repository) -> None:
    repository.configure(algorithm="dflash")
    assert "speculators_config.algorithm 'dflash' is not supported: expected NGRAM" in repository.refusal()
    repository.configure(algorithm=["eagle3"])
    assert "speculators_config.algorithm: Input should be a valid string" in repository.refusal()


def test_a_target_of_another_architecture_is_named(repository: Repository) -> None:
    repository.configure(verifier={"name_or_path": str(repository.target), "architectures": ["Qwen3ForCausalLM"]})
    said = f"{repository.target} is a LlamaForCausalLM; {repository.head} was trained for a Qwen3ForCausalLM"
    assert said in repository.dry().stderr


def test_lenient_acceptance_is_not_obeyed(repository: Repository) -> None:
    repository.configure(proposal_methods=[{"proposal_type": "greedy", "accept_tolerance": 0.1}])
    said = repository.dry().stderr
    assert "only the target's own tokens are accepted" in said and "tokens a step" not in said


def test_the_first_method_counts_without_a_default(repository: Repository) -> None:
    numbers = [("greedy", 3), ("other", 5), ("greedy", 7)]
    methods = [{"proposal_type": name, "speculative_tokens": number} for name, number in numbers]
    for default, number in ((None, 3), ("other", 5), ("unknown", 3)):
        repository.configure(default_proposal_method=default, proposal_methods=methods)
        assert f"proposes {number} tokens a step" in repository.dry().stderr


@pytest.mark.parametrize("command", ["verifier", "gateway"])
def test_single_services_want_the_target(repository: Repository, command: str) -> None:
    words = [command, str(repository.head)]
    words += ["--address", "unix:/v"] if command == "verifier" else ["--verifier", "unix:/v", "--port", "1"]
    found = CliRunner().invoke(app, words).exception
    assert f"is a draft head of algorithm EAGLE3 for {repository.target}: foretoken serve starts both" in str(found)


def serve_dry(hub: FakeHub, cache: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "foretoken", "serve", *words, "--dry-run"],
        env=hub.environment(cache) | environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_a_repository_of_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    result = serve_dry(hub, tmp_path / "cache", HEAD)
    assert result.returncode == 0, result.stderr
    assert f"{HEAD} is a draft head of algorithm EAGLE3; the target is {TARGET}" in result.stderr
    assert "drafters   eagle3 (EAGLE3, process)" in result.stdout
    num_requests = len(hub.paths)
    again = serve_dry(hub, tmp_path / "cache", HEAD, HF_HUB_OFFLINE="1")
    assert (again.returncode, len(hub.paths)) == (0, num_requests), again.stderr
    # A revision is the head's: the target comes from its main branch.
    pinned = serve_dry(hub, tmp_path / "cache", HEAD, "--revision", "branch")
    assert pinned.returncode == 0, pinned.stderr
    asked = {path for path in hub.paths[num_requests:] if "branch" in path or "2" * 40 in path}
    assert asked and all(HEAD in path for path in asked)


@pytest.mark.slow
def test_a_target_that_the_hub_lacks(repository: Repository, hub: FakeHub, tmp_path: Path) -> None:
    repository.configure(verifier={"name_or_path": "org/none"})
    result = serve_dry(hub, tmp_path / "cache", str(repository.head))
    assert result.returncode == 2
    assert "config.json names the target org/none: no folder and no public hub id: org/none" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.slow
def test_both_run(repository: Repository, hub: FakeHub, tmp_path: Path) -> None:
    environment = hub.environment(tmp_path / "cache")
    shape = ("--speculative-num-steps", "3", "--speculative-num-draft-tokens", "4", "--speculative-eagle-topk", "1")
    with (
        running(Path(HEAD), tmp_path / "log", *shape, environment=environment) as stack,
        httpx.Client(timeout=None, trust_env=False) as client,
    ):

        def attached() -> list[tuple[str, str]]:
            (verifier,) = client.get(f"{stack.url}/ready").json()["verifiers"]
            return [(drafter["name"], drafter["state"]) for drafter in verifier["drafters"]]

        wait_until(lambda: attached() == [("eagle3", "attached")], stack)
        assert [model["id"] for model in client.get(f"{stack.url}/v1/models").json()["data"]] == [HEAD]
        body = {"model": HEAD, "prompt": "abab", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        body |= {"speculative": {"drafter": "eagle3"}}

        def has_drafted() -> bool:
            """Return whether it has; a drafter that is late on a busy machine is not waited for."""
            answer = client.post(f"{stack.url}/v1/completions", json=body).json()
            assert answer["usage"]["completion_tokens"] == 40
            lines = client.get(f"{stack.url}/metrics").text.splitlines()
            drafts = [line for line in lines if line.startswith("foretoken_spec_decode_num_drafts_total{")]
            assert all('drafter="eagle3"' in line for line in drafts)
            return len(drafts) == 1 and float(drafts[0].split()[-1]) > 5

        wait_until(has_drafted, stack)
