"""Skips, hang guard and shared fixtures of all tests.

Without a GPU only tests marked `gpu` are skipped: other tests run GPU kernels in Triton's
interpreter. Tests marked `compose` build and run images, so only --compose runs them; those marked
`clients` install other projects' clients, so only --clients runs them; those marked `ray` start
clusters, so only --ray runs them; those marked `kubernetes` and `page` need programs that only
`make test-kubernetes` and `make test-page` install.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from foretoken.telemetry import JsonFormatter

if TYPE_CHECKING:
    from tests.support.deployments import Targets

# Triton reads this when a kernel is defined, so it precedes all imports. Asking PyTorch takes
# seconds.
HAS_GPU = os.path.exists("/dev/nvidiactl")
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
# PyTorch reads this when it loads. Its threads would spin for milliseconds after each piece of work
# and take the cores from everything else: on a busy machine the same test took 2.5 times the CPU
# time. Services set for themselves how long their threads spin.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Disables deadlines: no test asserts a time.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# A test may overrun its timeout by this factor before the run ends: enough for its own traceback.
HANG_FACTOR = 1.1
TIMEOUT_S = pytest.StashKey[float]()
STDERR = pytest.StashKey[int]()
BEGUN_AT = pytest.StashKey[float]()


class Loggers(dict[str, Any]):
    """The loggers by name; whoever looks at all of them gets a copy.

    pytest does before each phase of a test, without logging's lock. A thread that the test has
    started may make a logger meanwhile: gRPC imports a part of itself at the first channel.
    """

    def values(self) -> Any:
        return self.copy().values()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what --start-within leaves no time for, before its fixtures start anything."""
    limit_s = item.config.getoption("--start-within")
    if limit_s is not None and time.monotonic() - item.config.stash[BEGUN_AT] > limit_s:
        pytest.skip(f"its turn came after the {limit_s:.0f} s of --start-within")


def pytest_configure(config: pytest.Config) -> None:
    """Keep the stderr that pytest was started with: captured text is lost when the process ends.

    Programs that tests start must hear Ctrl-C: a shell's background job ignores it, and hands that
    on. Until all tests are collected, there is no garbage worth a search.
    """
    gc.disable()
    manager = logging.root.manager
    manager.loggerDict = Loggers(manager.loggerDict)
    config.stash[STDERR] = os.dup(2)
    config.stash[BEGUN_AT] = time.monotonic()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Make Triton's interpreter faster if a test has loaded it.

    Take the modules and thousands of tests out of the garbage collector's searches.
    """
    if not HAS_GPU and "triton.runtime.interpreter" in sys.modules:
        from tests.support.fast_interpreter import make_faster

        make_faster()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let the interpreter free what it must at its end."""
    gc.unfreeze()


def end_run_on_hang(item: pytest.Item) -> None:
    """End the process, with every thread's traceback, if the test is not over in time.

    pytest-timeout interrupts only Python code. A loop in compiled code never returns to the
    interpreter and may hold its lock; faulthandler's own thread needs neither.
    """
    faulthandler.dump_traceback_later(item.stash[TIMEOUT_S] * HANG_FACTOR, exit=True, file=item.config.stash[STDERR])


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Generator[None, object, object]:
    item.stash[TIMEOUT_S] = settings.timeout
    end_run_on_hang(item)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> Generator[None, object, object]:
    faulthandler.cancel_dump_traceback_later()
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Start a new timer: a failure has stopped all of them, and the teardown may hang as well."""
    if TIMEOUT_S in item.stash:
        end_run_on_hang(item)


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """Restore logging: a command run in this process leaves a handler with a closed stderr."""
    root = logging.getLogger()
    level = root.level
    yield
    root.setLevel(level)
    for handler in [h for h in root.handlers if isinstance(h.formatter, JsonFormatter)]:
        root.removeHandler(handler)


class TestLoop(asyncio.SelectorEventLoop):
    """An event loop that ignores late events of an earlier test's loop, which gRPC hands to it.

    They are no failure of the running test.
    """

    __test__ = False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        is_inherited = "PollerCompletionQueue._handle_events" in context["message"]
        if not (is_inherited and str(context.get("exception")) == "Event loop is closed"):
            super().call_exception_handler(context)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"loop_factory": TestLoop}


@pytest.fixture(scope="session")
def device() -> str:
    """Return the device on which tests of GPU kernels have their tensors."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests.support import interpreted_language

        interpreted_language.install()
    return "cuda" if HAS_GPU else "cpu"


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Targets:
    """Return fitted targets with their drafters; each is made on first use, in some seconds."""
    from tests.support.deployments import Targets

    return Targets(tmp_path_factory.mktemp("targets"))


@pytest.fixture
def strict_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the interpreter's tile products as strict as a GPU's, for tests of strict numerics."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        from triton.runtime.interpreter import InterpreterBuilder

        from tests.support import interpreted_dot

        monkeypatch.setattr(InterpreterBuilder, "create_dot", interpreted_dot.dot)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--compose", action="store_true", help="run the tests that build and run containers")
    parser.addoption("--clients", action="store_true", help="run the tests that install other projects' clients")
    parser.addoption("--page", action="store_true", help="run the tests that open the page in a browser")
    parser.addoption("--ray", action="store_true", help="run the tests that start Ray clusters")
    parser.addoption(
        "--ray-minutes", type=float, default=0, help="six verifiers on three nodes, of which one dies every 2 minutes"
    )
    parser.addoption("--kubernetes", action="store_true", help="run the tests that need Helm's engine and Envoy")
    parser.addoption("--start-within", type=float, help="skip tests whose turn comes after so many seconds")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reasons = {
        "compose": "builds images",
        "clients": "installs other projects' clients",
        "page": "needs a browser",
        "ray": "starts a Ray cluster",
        "kubernetes": "needs Helm's engine, Kubernetes' schemas and Envoy",
    }
    for marker, what in reasons.items():
        if not config.getoption(f"--{marker}"):
            for item in items:
                if item.get_closest_marker(marker):
                    item.add_marker(pytest.mark.skip(reason=f"{what}; run it with: make test-{marker}"))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
