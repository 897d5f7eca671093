"""A drafter's process, and clients over each transport."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.drafter_process import EPOCH, KINDS, PROCESS_KINDS, TARGET, DrafterProcess, client_of
from tests.support.mirror_drafter import MirrorDrafter
from verifier_svc.drafters.in_process import InProcessClient
from verifier_svc.drafters.remote import DrafterClient
from verifier_svc.drafters.source import DraftSource


@pytest.fixture(name="process", scope="module")
def _process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DrafterProcess]:
    process = DrafterProcess(tmp_path_factory.mktemp("drafter"))
    yield process
    process.kill()


@pytest.fixture(name="source", params=KINDS)
def _source(request: pytest.FixtureRequest, process: DrafterProcess) -> Iterator[DraftSource]:
    if request.param == "in-process":
        source = InProcessClient("mirror", MirrorDrafter(), TARGET, EPOCH)
        source.start()
        yield source
        source.close()
    else:
        with client_of(process.address, request.param) as client:
            yield client


@pytest.fixture(name="client", params=PROCESS_KINDS)
def _client(request: pytest.FixtureRequest, process: DrafterProcess) -> Iterator[DrafterClient]:
    with client_of(process.address, request.param) as client:
        yield client
