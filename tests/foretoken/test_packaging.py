"""The installation: packages, entry point, versions, and no CUDA without a driver."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINES = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
CONSTRAINTS = dict(line.split("==") for line in LINES)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def names(requirements: list[str]) -> set[str]:
    return {canonical(re.split(r"[<>=!~\[; ]", requirement)[0]) for requirement in requirements}


def test_constraints_are_exact_sorted_and_local_to_no_machine() -> None:
    assert sorted(LINES) == LINES
    for line in LINES:
        assert re.fullmatch(r"[a-z0-9-]+==[0-9a-z.]+", line), line


def test_every_requirement_has_its_version_and_gpu_packages_have_none() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    needed = (
        names(PROJECT["project"]["dependencies"]) | names(extras["dev"]) | names(PROJECT["build-system"]["requires"])
    )
    # A build of PyTorch requires its own triton.
    assert needed - set(CONSTRAINTS) == {"triton"}
    cuda = {name for name in CONSTRAINTS if re.match(r"nvidia|cuda|cupy|triton|flashinfer", name)}
    assert cuda == set()
    assert names(extras["gpu"]) & names(PROJECT["project"]["dependencies"]) == set()


def test_the_installed_versions_are_those_of_the_constraints() -> None:
    installed = {canonical(item.metadata["Name"]): item.version.partition("+")[0] for item in metadata.distributions()}
    wrong = {
        name: (version, installed[name])
        for name, version in CONSTRAINTS.items()
        if installed.get(name, version) != version
    }
    assert wrong == {}


def test_torch_is_the_cpu_build_where_there_is_no_driver() -> None:
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("an NVIDIA driver is here")
    import torch

    assert torch.version.cuda is None


def test_a_wheel_holds_the_packages_at_top_level(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = archive.namelist()
        (info,) = [name.partition("/")[0] for name in files if name.endswith(".dist-info/METADATA")]
        assert archive.read(f"{info}/entry_points.txt").decode().split() == [
            *("[console_scripts]", "foretoken", "=", "foretoken.cli:main")
        ]
    top = {name.partition("/")[0] for name in files} - {info}
    assert top == {"foretoken", "gateway", "verifier_svc", "drafter_svc", "protos", "foretoken_kernels"}
    assert {"foretoken_kernels/__init__.py", "protos/verifier_pb2.py", "foretoken/cli.py"} <= set(files)
    assert any(name.endswith("licenses/LICENSE") for name in files)
    demo = {name.removeprefix("foretoken/demo/") for name in files if name.startswith("foretoken/demo/")}
    heads = {f"eagle3/{name}" for name in ("config.json", "model.safetensors")}
    target = {f"target/{name}" for name in ("config.json", "model.safetensors", "tokenizer.json")}
    assert demo >= heads | target | {"token_map.safetensors"}


def test_no_requirement_has_an_upper_bound() -> None:
    # An upper bound breaks the environments of other packages; one that is needed stands here with
    # its reason.
    extras = {name: needed for name, needed in PROJECT["project"]["optional-dependencies"].items() if name != "dev"}
    needed = [*PROJECT["project"]["dependencies"], *(one for some in extras.values() for one in some)]
    assert [one for one in needed if not re.fullmatch(r"[\w-]+(\[\w+\])?>=[\w.]+", one)] == [
        "flashinfer-python>=0.6.12,<0.7"
    ]


def test_the_stubs_import_with_the_lowest_grpcio_and_protobuf() -> None:
    bounds = dict(re.findall(r"(?m)^(grpcio|protobuf)>=([\w.]+)$", "\n".join(PROJECT["project"]["dependencies"])))
    for stub in (ROOT / "protos").glob("*_pb2_grpc.py"):
        (generated,) = re.findall(r"GRPC_GENERATED_VERSION = '([\d.]+)'", stub.read_text())
        assert parts(generated) <= parts(bounds["grpcio"]), stub.name
    for stub in (ROOT / "protos").glob("*_pb2.py"):
        (generated,) = re.findall(r"# Protobuf Python Version: ([\d.]+)", stub.read_text())
        assert parts(generated) <= parts(bounds["protobuf"]), stub.name


def parts(version: str) -> list[int]:
    """Return a version's parts to compare: 1.76 is 1.76.0."""
    numbers = [int(number) for number in version.split(".")]
    return numbers + [0] * (3 - len(numbers))


def test_the_folder_of_the_kernels_is_no_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
