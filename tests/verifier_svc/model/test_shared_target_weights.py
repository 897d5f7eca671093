"""Which drafters read the verifier's own embedding and head.

The verifier's client attaches drafter processes with either kind of kernels to targets of either.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
import torch

from drafter_svc.model.head import HeadDrafter
from drafter_svc.model.placement import ON_CPU, ModelPlacement
from foretoken.drafter import Drafter
from foretoken.drafting import TargetInfo
from foretoken.errors import PreconditionError
from foretoken.models.backend import Backend
from foretoken.models.config import load_config
from foretoken.models.device_sizes import PassSizes
from foretoken.models.target_weights import load_target_weights
from foretoken.transports.shared_weights import SharedWeights
from tests.references.head_files import HIDDEN, NUM_LAYERS, VOCAB, eagle_files, random_target, write_folder
from tests.support.drafter_process import started
from tests.support.environment import child_environment
from tests.support.paged_draft import Row, request_of, target_info
from verifier_svc.config import DrafterEndpoint, Transport
from verifier_svc.drafters.in_process import InProcessClient
from verifier_svc.drafters.remote import DrafterClient
from verifier_svc.model import runner as model_runner
from verifier_svc.model.device_runner import DeviceRunner
from verifier_svc.model.runner import ModelRunner, TargetModel

Kernels = Literal["cpu", "gpu"]
KERNELS: tuple[Kernels, ...] = ("cpu", "gpu")
EPOCH = 11
LONG_S = 600.0
TEXT = [int(token) for token in torch.randint(0, VOCAB, (9,), generator=torch.Generator().manual_seed(3))]


class Trees(NamedTuple):
    """Trees drafted with the target's head, and with its negative."""

    plain: list[int]
    negated: list[int]


@pytest.fixture(name="gpu", scope="module")
def _gpu(device: str) -> Backend:
    """Return the backend with the GPU's kernels, or the interpreter's."""
    return Backend("gpu", torch.device("cuda", 0) if device == "cuda" else torch.device(device))


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    random_target(folder / "target")
    write_folder(folder / "head", *eagle_files())
    return folder


@pytest.fixture(name="target", scope="module")
def _target(folder: Path) -> TargetInfo:
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_layers": NUM_LAYERS}
    return target_info(**sizes, checkpoint=str(folder / "target"))


def request(batch_slot: int) -> Row:
    return Row(TEXT, len(TEXT), [5, 2, 9], batch_slot=batch_slot, width=HIDDEN)


@pytest.fixture(name="expected", scope="module")
def _expected(folder: Path, target: TargetInfo) -> Trees:
    """Return the trees of a drafter on the CPU with weights of its own."""
    weights = load_target_weights(folder / "target", load_config(folder / "target"))
    found = []
    for head in (weights.head, -weights.head):
        drafter: Drafter = HeadDrafter("EAGLE", folder / "head")
        drafter.attach(target, replace(weights, head=head))
        found.append(drafter.draft(request_of([request(0)])).tree(0).tokens.tolist())
    assert found[0] != found[1]
    return Trees(*found)


@contextmanager
def drafter_process(folder: Path, kernels: Kernels, gpu: Backend, dtype: str = "float32") -> Iterator[str]:
    address = f"unix:{folder}/{kernels}-{dtype}.sock"
    options = [str(folder / "target"), str(folder / "head"), kernels, str(gpu.device), dtype]
    command = [sys.executable, "-m", "tests.support.eagle_drafter", address, *options]
    process = subprocess.Popen(command, env=child_environment())
    yield address
    process.kill()
    process.wait()


@pytest.fixture(name="addresses", scope="module")
def _addresses(folder: Path, gpu: Backend) -> Iterator[dict[Kernels, str]]:
    with drafter_process(folder, "cpu", gpu) as on_cpu, drafter_process(folder, "gpu", gpu) as on_gpu:
        yield {"cpu": on_cpu, "gpu": on_gpu}


def runner_of(kernels: Kernels, folder: Path, gpu: Backend, dtype: str = "float32") -> TargetModel:
    if kernels == "cpu":
        return ModelRunner(folder / "target", num_blocks=8, threads=1, dtype=dtype)
    sizes = PassSizes(rows=16, wanted=16, seqs=2, blocks=8)
    return DeviceRunner(folder / "target", backend=gpu, sizes=sizes, dtype=dtype, num_blocks=8)


def client_of(
    address: str, target: TargetInfo, weights: SharedWeights | None, transport: Transport = "auto"
) -> AbstractContextManager[DrafterClient]:
    endpoint = DrafterEndpoint(name="eagle", address=address, transport=transport)
    return started(DrafterClient(endpoint, target, EPOCH, weights=weights))


def tree_of(client: DrafterClient | InProcessClient, batch_slot: int) -> list[int]:
    while client.transport is None:
        assert client.state == "connecting"
        time.sleep(0.01)
    transport = client.transport
    transport.post(replace(request_of([request(batch_slot)]), epoch=EPOCH, step_id=1 + batch_slot))
    batch = transport.receive(LONG_S)
    assert batch is not None
    return batch.tree(0).tokens.tolist()


def check(client: DrafterClient | InProcessClient, runner: TargetModel, expected: Trees, *, is_shared: bool) -> None:
    """Assert whether the drafter's head is the runner's: changing one changes the other's trees."""
    assert tree_of(client, 0) == expected.plain
    head = runner.weights.head
    # Panels of float16 are bits.
    (head.view(torch.float16) if head.dtype == torch.int16 else head).neg_()
    assert tree_of(client, 1) == (expected.negated if is_shared else expected.plain)


@pytest.mark.parametrize("of_target", KERNELS)
@pytest.mark.parametrize("of_drafter", KERNELS)
def test_a_drafters_process_reads_the_targets_memory_where_its_kernels_can(
    addresses: dict[Kernels, str],
    folder: Path,
    target: TargetInfo,
    expected: Trees,
    gpu: Backend,
    of_target: Kernels,
    of_drafter: Kernels,
) -> None:
    runner = runner_of(of_target, folder, gpu)
    assert runner.shared_weights is not None
    with client_of(addresses[of_drafter], target, runner.shared_weights) as client:
        check(client, runner, expected, is_shared=of_target == of_drafter)


def test_a_target_whose_memory_cannot_be_shared_keeps_its_weights_and_says_so(
    folder: Path, gpu: Backend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise PreconditionError("cuMemCreate: CUDA_ERROR_NOT_SUPPORTED")

    monkeypatch.setattr(model_runner, "SharedWeights", refuse)
    with caplog.at_level(logging.WARNING):
        runner = runner_of("gpu", folder, gpu)
    assert runner.shared_weights is None
    assert runner.target_weights.head is runner.weights.head
    assert runner.target_weights.embedding is runner.weights.embedding
    assert [record.getMessage() for record in caplog.records] == [
        "drafters' processes read embedding and head from the checkpoint, a copy each: "
        "cuMemCreate: CUDA_ERROR_NOT_SUPPORTED"
    ]


@pytest.mark.parametrize("of_target", KERNELS)
@pytest.mark.parametrize("of_drafter", KERNELS)
def test_so_does_one_in_the_process(
    folder: Path, target: TargetInfo, expected: Trees, gpu: Backend, of_target: Kernels, of_drafter: Kernels
) -> None:
    runner = runner_of(of_target, folder, gpu)
    placement = ON_CPU if of_drafter == "cpu" else ModelPlacement(gpu, torch.float32, graphs=False, warm=False)
    check_in_process(runner, placement, folder, target, expected, is_shared=of_target == of_drafter)


def check_in_process(
    runner: TargetModel,
    placement: ModelPlacement,
    folder: Path,
    target: TargetInfo,
    expected: Trees,
    *,
    is_shared: bool,
) -> None:
    drafter = HeadDrafter("EAGLE", folder / "head", placement=placement)
    client = InProcessClient("eagle", drafter, target, EPOCH, weights=runner.target_weights)
    client.start()
    check(client, runner, expected, is_shared=is_shared)
    client.close()


@pytest.fixture(name="float16_addresses", scope="module")
def _float16_addresses(folder: Path, gpu: Backend) -> Iterator[dict[Kernels, str]]:
    with (
        drafter_process(folder, "cpu", gpu, "float16") as on_cpu,
        drafter_process(folder, "gpu", gpu, "float16") as on_gpu,
    ):
        yield {"cpu": on_cpu, "gpu": on_gpu}


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared-memory", "grpc"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_float16_drafter_takes_weights_and_hidden_states_by_either_transport(
    float16_addresses: dict[Kernels, str],
    folder: Path,
    target: TargetInfo,
    expected: Trees,
    gpu: Backend,
    kernels: Kernels,
    transport: Transport,
) -> None:
    """Weights have no way through gRPC: that drafter reads a copy."""
    runner = runner_of(kernels, folder, gpu, "float16")
    assert runner.shared_weights is not None
    with client_of(float16_addresses[kernels], target, runner.shared_weights, transport) as client:
        check(client, runner, expected, is_shared=transport == "shared-memory")


@pytest.mark.parametrize(
    ("of_target", "of_drafter", "is_shared"),
    [
        ("float16", "auto", True),
        pytest.param("bfloat16", "auto", True, marks=pytest.mark.slow),
        ("float32", "auto", False),
        pytest.param("float16", "float32", False, marks=pytest.mark.slow),
        pytest.param("float32", "float16", False, marks=pytest.mark.slow),
        ("bfloat16", "float16", False),
    ],
)
def test_a_drafter_of_another_type_on_a_gpu_has_a_copy(
    folder: Path, target: TargetInfo, expected: Trees, gpu: Backend, of_target: str, of_drafter: str, is_shared: bool
) -> None:
    """Its hidden states are converted. With ``auto`` it follows a float16 target."""
    runner = runner_of("gpu", folder, gpu, of_target)
    placement = ModelPlacement(
        gpu,
        torch.bfloat16 if of_drafter == "auto" else getattr(torch, of_drafter),
        graphs=False,
        warm=False,
        is_auto=of_drafter == "auto",
    )
    check_in_process(runner, placement, folder, target, expected, is_shared=is_shared)
