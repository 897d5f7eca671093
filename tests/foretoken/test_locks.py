"""docker/locks: they agree with pyproject.toml, hold
everything that is needed, and name no index.
"""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
NO_TORCH = {"torch", "numba", "llvmlite", "llguidance"}
CONSTRAINTS = dict(
    line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")
)
# By lock: the requirements that it must satisfy, PyTorch apart where it is installed before.
NEEDED: dict[str, list[str]] = {
    "gateway": [
        *(one for one in PROJECT["dependencies"] if Requirement(one).name not in NO_TORCH),
        *EXTRAS["otlp"],
    ],
    "engine": [
        *(one for one in PROJECT["dependencies"] if Requirement(one).name != "torch"),
        *EXTRAS["kv-events"],
        *EXTRAS["otlp"],
    ],
    "gpu": [*PROJECT["dependencies"], *EXTRAS["gpu"], *EXTRAS["kv-events"], *EXTRAS["otlp"]],
    "dev": [*(one for one in PROJECT["dependencies"] if Requirement(one).name != "torch"), *EXTRAS["dev"]],
}
CUDA = re.compile(r"torch|nvidia-.*|cuda-.*")


def blocks(name: str) -> list[str]:
    """Return the packages of a lock, each with its lines of hashes."""
    lines = (ROOT / "docker" / "locks" / f"{name}.txt").read_text().splitlines()
    return re.split(r"\n(?=\S)", "\n".join(line for line in lines if not line.startswith("#")))


def versions(name: str) -> dict[str, str]:
    return dict(re.match(r"([a-z0-9-]+)==(\S+)", block).groups() for block in blocks(name))  # type: ignore[union-attr]


def test_what_builds_the_site_is_locked() -> None:
    groups: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    text = (ROOT / "docs" / "site" / "requirements.txt").read_text()
    locked = dict(re.findall(r"(?m)^([a-z0-9-]+)==([0-9a-z.]+)", text))
    for requirement in map(Requirement, groups["site"]):
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)])
    assert len(re.findall(r"--hash=sha256:[0-9a-f]{64}", text)) >= len(locked) > 20 and "://" not in text
    # The site's hooks import the gateway beside them.
    assert {one: CONSTRAINTS[one] for one in locked.keys() & CONSTRAINTS} == {
        one: locked[one] for one in locked.keys() & CONSTRAINTS
    }


def test_there_are_these_locks() -> None:
    names = {path.stem for path in (ROOT / "docker" / "locks").iterdir()}
    assert names == {*NEEDED, "torch-cpu"}


@pytest.mark.parametrize("name", NEEDED)
def test_a_lock_has_a_version_that_fits_for_each_requirement(name: str) -> None:
    """If this fails: `make locks`."""
    locked = versions(name)
    for requirement in map(Requirement, NEEDED[name]):
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)], prereleases=True), (
            requirement
        )


@pytest.mark.parametrize("name", NEEDED)
def test_locked_versions_are_those_that_are_tested_together(name: str) -> None:
    locked = versions(name)
    assert {one: locked[one] for one in locked.keys() & CONSTRAINTS} == {
        one: CONSTRAINTS[one] for one in locked.keys() & CONSTRAINTS
    }
    beyond = locked.keys() - CONSTRAINTS.keys()
    assert all(CUDA.fullmatch(one) or one == "triton" for one in beyond), beyond


def test_only_the_gpu_lock_holds_pytorch_and_cuda() -> None:
    found = {name: any(CUDA.fullmatch(one) for one in versions(name)) for name in NEEDED}
    assert found == {"gateway": False, "engine": False, "gpu": True, "dev": False}


@pytest.mark.parametrize("name", NEEDED)
def test_a_lock_holds_hashes_and_no_index(name: str) -> None:
    for block in blocks(name):
        first, *hashes = block.splitlines()
        assert re.fullmatch(r"[a-z0-9-]+==[0-9a-z.]+( ; [^\\]+)? \\", first), first
        assert hashes, first
        for line in hashes:
            assert re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line), line
    assert "://" not in (ROOT / "docker" / "locks" / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", ["gateway", "engine", "dev"])
def test_nothing_is_missing_that_a_locked_package_needs(name: str) -> None:
    """A lock is installed without a look at what its packages require."""
    locked = versions(name)
    for package in locked:
        try:
            required = metadata.requires(package) or []
        except metadata.PackageNotFoundError:
            continue
        for requirement in map(Requirement, required):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                assert canonicalize_name(requirement.name) in locked, f"{package} needs {requirement}"


def test_engine_and_dev_hold_what_pytorch_needs() -> None:
    for requirement in map(Requirement, metadata.requires("torch") or []):
        is_needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        name = canonicalize_name(requirement.name)
        if is_needed and not CUDA.fullmatch(name) and name != "triton":
            assert name in versions("engine") and name in versions("dev"), requirement


def test_the_cpu_builds_of_pytorch_have_hashes() -> None:
    """One for each Python that the project supports, on x86-64 and on ARM."""
    (block,) = blocks("torch-cpu")
    first, *hashes = block.splitlines()
    assert first == f"torch=={CONSTRAINTS['torch']}+cpu \\"
    pythons = [line for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert len(set(hashes)) == len(hashes) == 2 * len(pythons)
    assert all(re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line) for line in hashes)


def test_images_install_from_the_locks_alone() -> None:
    lines = (ROOT / "docker" / "Dockerfile").read_text().splitlines()
    installs = [line for line in lines if "--requirement" in line]
    assert len(installs) == 3 and all("--require-hashes --no-deps" in line for line in installs)
    assert {f"COPY docker/locks/{name}.txt ./" for name in ("gateway", "engine", "gpu")} <= set(lines)
    assert "COPY docker/locks/torch-cpu.txt locks/" in lines


def test_the_workflow_audits_every_lock() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert set(workflow["jobs"]["audit"]["strategy"]["matrix"]["lock"]) == set(NEEDED)
    assert workflow["env"]["LOCKED"]
