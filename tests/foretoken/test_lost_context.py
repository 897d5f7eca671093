"""A process that loses its GPU context ends with a special status; other failures do not end it.

Without a GPU, PyTorch's calls are replaced and raise the same errors.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from foretoken.lost_context import ASSERTION_STATUS, CONTEXT_LOST_STATUS
from tests.support.environment import child_environment

ROOT = Path(__file__).parents[2]
ILLEGAL_ADDRESS = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ..."
ASSERTION = "CUDA error: device-side assert triggered\nCUDA kernel errors might be ..."

# A context whose calls raise ``errors`` one after the other, and the last one for ever.
CONTEXT = """
import torch
torch.cuda.is_initialized = lambda: True
errors = []
class Stream:
    def __init__(self, priority):
        assert priority == -1
    def synchronize(self):
        if errors and (error := errors.pop(0) if len(errors) > 1 else errors[0]):
            raise RuntimeError(error)
torch.cuda.Stream = Stream
"""
ASKS = "from foretoken.lost_context import exit_if_context_lost, lost_context\n"
# A drafter whose first draft fails, for good or not.
DRAFTER = """
import sys
from drafter_svc.thread import DrafterThread
from foretoken.drafting import TargetInfo
from foretoken.errors import UnavailableError
from tests.support.draft_requests import draft_request
from tests.support.scripted_drafter import ScriptedDrafter

class Faulty(ScriptedDrafter):
    def draft(self, request):
        if self.num_requests:
            return super().draft(request)
        self.num_requests += 1
        errors[:] = [sys.argv[1]] if sys.argv[1] else []
        raise RuntimeError("a kernel failed")

target = TargetInfo(checkpoint_hash="", vocab_size=9, max_model_len=9, max_batch_slots=1, max_nodes=4)
thread = DrafterThread(lambda: Faulty({}))
for is_first in (True, False):
    attachment, _, _ = thread.attach(1, target, "").result()
    try:
        thread.draft(attachment, draft_request([[3]])).result()
        print("drafts")
    except UnavailableError as error:
        print(error)
thread.stop()
"""
# A verifier whose engine thread has died.
VERIFIER = """
import asyncio, sys
from types import SimpleNamespace
from verifier_svc import server

errors[:] = [sys.argv[1]] if sys.argv[1] else []
dead = SimpleNamespace(is_alive=lambda: False, failure=RuntimeError("a kernel failed"))
asyncio.run(server._watch(dead, asyncio.Event()))
"""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=child_environment(),
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(("error", "status"), [(ILLEGAL_ADDRESS, CONTEXT_LOST_STATUS), (ASSERTION, ASSERTION_STATUS)])
def test_the_process_ends_with_a_status_that_tells_the_fault(error: str, status: int) -> None:
    ended = python(f"{CONTEXT}{ASKS}errors[:] = [{error!r}]\nexit_if_context_lost()\nprint('goes on')")
    assert (ended.returncode, ended.stdout) == (status, "")
    assert error.partition("\n")[0] in ended.stderr and "this process ends" in ended.stderr


@pytest.mark.parametrize(
    "before",
    [
        # Memory that could not be allocated is reported once.
        f"{CONTEXT}errors[:] = ['CUDA error: out of memory', '']",
        pytest.param(CONTEXT, marks=pytest.mark.slow),
        # CUDA is there, and not in use.
        "import torch",
        # A drafter without a model.
        "import sys; assert 'torch' not in sys.modules",
    ],
)
def test_a_process_whose_context_lives_goes_on(before: str) -> None:
    ended = python(f"{before}\n{ASKS}assert lost_context() is None\nexit_if_context_lost()\nprint('goes on')")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "goes on\n", "")


@pytest.mark.parametrize(
    "service", [pytest.param(DRAFTER, marks=pytest.mark.slow), VERIFIER], ids=["drafter", "verifier"]
)
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ILLEGAL_ADDRESS, CONTEXT_LOST_STATUS),
        pytest.param(ASSERTION, ASSERTION_STATUS, marks=pytest.mark.slow),
    ],
)
def test_a_service_that_finds_its_context_lost_ends(service: str, error: str, status: int) -> None:
    ended = python(f"{CONTEXT}{service}", error)
    assert (ended.returncode, ended.stdout) == (status, ""), ended.stderr


def test_a_drafter_that_failed_otherwise_drafts_again() -> None:
    ended = python(f"{CONTEXT}{DRAFTER}", "")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["the drafter failed: RuntimeError('a kernel failed')", "drafts"]


def test_a_verifier_that_failed_otherwise_ends_as_before() -> None:
    ended = python(f"{CONTEXT}{VERIFIER}", "")
    assert ended.returncode == 1 and "the engine died" in ended.stderr
