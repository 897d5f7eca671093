"""Start, watch, restart and stop child processes as one unit; none outlives the supervisor.

It knows commands and probes, not what the services do. Its asyncio loop asks each child once a
second when the child's event loop last turned, and sleeps otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec

import psutil

from foretoken.descendants import die_with, ended_child, is_stopped, kill_descendants, subreaper
from foretoken.lost_context import ASSERTION_STATUS, CONTEXT_LOST_STATUS
from foretoken.pulse import Pulse
from foretoken.service import Service

# The status of a child that refused its settings and said why.
CONFIG_ERROR_STATUS = 2
FIRST_RESTART_DELAY_S = 0.25
LONGEST_RESTART_DELAY_S = 5.0
# A child that was ready for this long restarts without delay.
STABLE_AFTER_S = 5.0
# After so many failed starts of a required service that was never ready, everything stops.
MAX_FAILED_STARTS = 3
FIRST_PROBE_DELAY_S = 0.05
LONGEST_PROBE_DELAY_S = 0.5
HEARTBEAT_S = 1.0
# After this time the supervisor says that a start may take longer.
SLOW_START_S = 15.0
# And so often what it still waits for.
STILL_STARTING_S = 30.0
# Once all required services are ready, the others have this long to become ready. A gateway that
# is ready has waited for its drafters, so only a probe can be late.
OPTIONAL_READY_S = 1.5
# Time for a command that runs before a child is killed.
BEFORE_KILL_S = 2.0
# From SIGTERM to SIGKILL of a child that lost its GPU context and can do nothing more.
LOST_CONTEXT_GRACE_S = 1.0

Args = ParamSpec("Args")

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class RestartDelays:
    """Delays restarts: not after a long life, else twice as long each time, up to a bound."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def after(self, ready_s: float) -> float:
        """Return the seconds to wait after a child that was ready for ``ready_s`` seconds."""
        delay_s = 0.0 if ready_s >= STABLE_AFTER_S else self._next_s
        self._next_s = min(max(2 * delay_s, FIRST_RESTART_DELAY_S), LONGEST_RESTART_DELAY_S)
        return delay_s


@dataclass(eq=False)
class _Child:
    process: subprocess.Popen[bytes]
    ended: asyncio.Future[int]
    ready_at: float | None = None
    # The service whose fault also hit this child; empty for none.
    fault_of: str = ""


@dataclass(eq=False)
class _Watch:
    """The state of one service."""

    service: Service
    delays: RestartDelays = field(default_factory=RestartDelays)
    child: _Child | None = None
    # Set by the first readiness.
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    # When it stopped being ready; None while it is ready.
    away_since: float | None = field(default_factory=time.monotonic)
    failed_starts: int = 0


class Supervisor:
    """Starts services in the given order and stops them in reverse order, or all at once."""

    def __init__(
        self,
        services: Sequence[Service],
        *,
        on_ready: Callable[[], None],
        announce: Callable[[str], None],
        stop_notice: str = "",
        stop_again_notice: str = "",
        slow_notice: str = "",
        stops_together: bool = False,
    ) -> None:
        """``on_ready`` is called once; ``announce`` gets a line for each event.

        ``stop_notice`` is announced at a stop signal, followed by ``stop_again_notice``
        at SIGINT, which a user sends; ``slow_notice`` follows the names of services that a
        long start waits for. OSErrors of both functions are ignored: services outlive the
        terminal or pipe that reads the lines.
        """
        self._stop_notice, self._slow_notice = stop_notice, slow_notice
        self._stop_again_notice = stop_again_notice
        self._stops_together = stops_together
        self._watches = [_Watch(service) for service in services]
        self._on_ready = _without_os_errors(on_ready)
        self._announce = _without_os_errors(announce)
        self._children: dict[int, _Child] = {}
        self._stopping = asyncio.Event()
        self._killing = asyncio.Event()
        self._group: asyncio.TaskGroup
        self._exit_status = 0
        self._had_terminal = _has_terminal()

    async def run(self) -> int:
        """Supervise until a stop signal or a failed start; return when every descendant has gone.

        Returns 0 after a signal, else the status to exit with. Run it once, in the main thread.
        """
        own_children = {process.pid for process in psutil.Process().children()}
        with subreaper(), self._signal_handlers():
            self._announce(f"starting {', '.join(watch.service.name for watch in self._watches)}")
            try:
                async with asyncio.TaskGroup() as self._group:
                    tasks = [self._group.create_task(self._keep_alive(watch)) for watch in self._watches]
                    tasks.append(self._group.create_task(self._wait_ready()))
                    await self._stopping.wait()
                    for task in tasks:
                        task.cancel()
            finally:
                if self._stops_together:
                    await asyncio.gather(*(self._stop(watch) for watch in self._watches))
                else:
                    for watch in reversed(self._watches):
                        await self._stop(watch)
                kill_descendants(own_children)
        return self._exit_status

    @contextlib.contextmanager
    def _signal_handlers(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        # Under nohup the end of the terminal must not end anything.
        is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        stop_signals = [number for number in _STOP_SIGNALS if not (is_nohup and number == signal.SIGHUP)]
        for number in stop_signals:
            loop.add_signal_handler(number, self._on_stop_signal, number)
        # None of nohup's concern: a reload ends nothing.
        reloads = any(watch.service.reloads for watch in self._watches)
        if reloads:
            loop.add_signal_handler(signal.SIGHUP, self._on_hangup, is_nohup)
        try:
            yield
        finally:
            for number in {signal.SIGCHLD, *stop_signals, *([signal.SIGHUP] if reloads else [])}:
                loop.remove_signal_handler(number)

    def _on_hangup(self, is_nohup: bool) -> None:
        """Let services read files again; stop if the signal says that the terminal has gone."""
        if self._had_terminal and not is_nohup and not _has_terminal():
            self._on_stop_signal(signal.SIGHUP)
            return
        for watch in self._watches:
            if watch.service.reloads and watch.child is not None:
                _send(watch.child, signal.SIGHUP)

    def _on_stop_signal(self, number: signal.Signals) -> None:
        if not self._stopping.is_set():
            if self._stop_notice:
                by_user = number == signal.SIGINT and self._stop_again_notice
                self._announce(f"{self._stop_notice}; {self._stop_again_notice}" if by_user else self._stop_notice)
            self._stopping.set()
        elif number == signal.SIGINT:
            # Only the user sends a second SIGINT; make and shells may send a second SIGTERM.
            self._announce("stopping at once")
            self._killing.set()

    def _reap(self) -> None:
        """Collect every ended child, and the orphans that the subreaper inherited."""
        while (pid := ended_child()) is not None:
            child = self._children.pop(pid, None)
            if child is None:
                os.waitpid(pid, 0)
                continue
            # Kill the rest of its group before the wait, while the process id is still the dead
            # leader's.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            child.ended.set_result(child.process.wait())

    def _spawn(self, command: tuple[str, ...], environment: Mapping[str, str], *, reloads: bool = False) -> _Child:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            # A new session: a signal to our process group reaches only us, and we stop in order.
            start_new_session=True,
            # Until the child has its handler, a SIGHUP must not end it;
            # it reads the files after that.
            preexec_fn=die_with(os.getpid(), ignored=signal.SIGHUP if reloads else None),
        )
        child = _Child(process, asyncio.get_running_loop().create_future())
        self._children[process.pid] = child
        return child

    async def _keep_alive(self, watch: _Watch) -> None:
        service = watch.service
        while True:
            if service.shares_faults:
                await self._wait_for_faulted()
            try:
                child = watch.child = self._spawn(service.command, service.environment, reloads=service.reloads)
            except OSError as error:
                # Too many processes or too little memory: this passes, and the others keep serving.
                end, ready_s = f"could not be started ({error.strerror})", 0.0
                if not watch.ready.is_set() and self._gives_up(watch, None):
                    return
            else:
                end = await self._end_of(watch, child)
                if watch.away_since is None:
                    watch.away_since = time.monotonic()
                status = child.ended.result()
                if status == CONTEXT_LOST_STATUS and service.shares_faults and not child.fault_of:
                    self._end_faulted(watch)
                if not (watch.ready.is_set() or child.fault_of) and self._gives_up(watch, status):
                    return
                ready_s = 0.0 if child.ready_at is None else time.monotonic() - child.ready_at
            delay_s = watch.delays.after(ready_s)
            when = f" in {delay_s:g} s" if delay_s else ""
            self._announce(f"{service.name} {end}; starting it again{when}")
            await asyncio.sleep(delay_s)

    async def _end_of(self, watch: _Watch, child: _Child) -> str:
        """Wait until a child has ended; return how: by itself, or killed as stopped or hung."""
        attending = asyncio.create_task(self._attend(watch, child))
        try:
            # Not a bare await: cancelling it would cancel the future, which the stop still needs.
            awaited: list[asyncio.Future[Any]] = [child.ended, attending]
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if child.ended.done():
                if child.fault_of:
                    return f"was ended: it lost its GPU context together with {child.fault_of}"
                return f"ended ({describe_status(child.ended.result())})"
            await self._kill(watch.service, child)
            return f"{attending.result()} and was killed"
        finally:
            attending.cancel()
            await asyncio.wait([attending])

    def _end_faulted(self, cause: _Watch) -> None:
        """End all services that share a child's fault; mark those that ended by themselves."""
        for watch in self._watches:
            if watch.service.shares_faults and watch is not cause and watch.child is not None:
                watch.child.fault_of = cause.service.name
                self._group.create_task(_end_now(watch.child))

    async def _wait_for_faulted(self) -> None:
        """Wait until all processes with a shared fault have gone; MPS refuses new ones before."""
        children = [watch.child for watch in self._watches if watch.child is not None and watch.child.fault_of]
        if ends := [child.ended for child in children if not child.ended.done()]:
            await asyncio.wait(ends)

    async def _kill(self, service: Service, child: _Child) -> None:
        """Run the command before a kill, then send SIGKILL, which even a stopped process obeys."""
        if service.before_kill:
            try:
                notice = self._spawn((*service.before_kill, str(child.process.pid)), service.environment)
            except OSError as error:
                self._announce(f"{service.name} is killed without the command before it ({error.strerror})")
            else:
                await asyncio.wait([notice.ended], timeout=BEFORE_KILL_S)
                _send(notice, signal.SIGKILL)
        _send(child, signal.SIGKILL)
        await asyncio.wait([child.ended])

    async def _attend(self, watch: _Watch, child: _Child) -> str:
        """Announce when a child is ready and watch its heartbeats; return why it must be killed."""
        probe, pulse = watch.service.probe, Pulse(watch.service.max_stall_s)
        is_ready = False
        delay_s = FIRST_PROBE_DELAY_S
        while True:
            asked_at = time.monotonic()
            if not is_ready and await probe.is_ready():
                is_ready = pulse.has_begun = True
                self._mark_ready(watch, child)
            last_turn = await probe.last_turn()
            halted = last_turn is None and is_stopped(child.process.pid)
            now = time.monotonic()
            if reason := pulse.judge(last_turn, halted, asked_at, now):
                return reason
            delay_s = HEARTBEAT_S if is_ready else min(1.2 * delay_s, LONGEST_PROBE_DELAY_S)
            await asyncio.sleep(max(asked_at + delay_s - now, FIRST_PROBE_DELAY_S))

    def _mark_ready(self, watch: _Watch, child: _Child) -> None:
        child.ready_at = time.monotonic()
        again = " again" if watch.ready.is_set() else ""
        assert watch.away_since is not None, "a child becomes ready once"
        away_s = child.ready_at - watch.away_since
        watch.away_since = None
        watch.ready.set()
        self._announce(f"{watch.service.name} is ready{again} after {away_s:.1f} s")

    def _gives_up(self, watch: _Watch, status: int | None) -> bool:
        """Stop everything if a service that was never ready cannot become so; return whether.

        ``status`` is None if the process did not start.
        """
        watch.failed_starts += 1
        if status == CONFIG_ERROR_STATUS:
            self._exit_status = CONFIG_ERROR_STATUS
        elif watch.service.required and watch.failed_starts >= MAX_FAILED_STARTS:
            self._announce(f"{watch.service.name} failed {watch.failed_starts} times before it was ready: giving up")
            self._exit_status = 1
        else:
            return False
        self._stopping.set()
        return True

    async def _wait_ready(self) -> None:
        required = [watch for watch in self._watches if watch.service.required]
        await self._all_required_ready(required)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OPTIONAL_READY_S):
                await _all_ready(self._watches)
        for watch in self._watches:
            if not watch.ready.is_set():
                self._announce(f"{watch.service.name} is not ready yet; continuing without it")
        self._on_ready()

    async def _all_required_ready(self, required: Sequence[_Watch]) -> None:
        """Wait until all are ready.

        Say after SLOW_START_S, and then every STILL_STARTING_S, which are not.
        """
        began, pause_s = time.monotonic(), SLOW_START_S
        for is_first in itertools.chain((True,), itertools.repeat(False)):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await _all_ready(required)
                return
            names = ", ".join(watch.service.name for watch in required if not watch.ready.is_set())
            if names and self._slow_notice:
                waited_s = time.monotonic() - began
                still, more = ("", self._slow_notice) if is_first else ("still ", f" after {waited_s:.0f} s")
                self._announce(f"{still}waiting for {names}{more}")
            pause_s = STILL_STARTING_S

    async def _stop(self, watch: _Watch) -> None:
        await watch.service.probe.close()
        child = watch.child
        if child is None or child.ended.done():
            return
        # A stopped process gets SIGTERM only when it continues.
        _send(child, signal.SIGTERM, signal.SIGCONT)
        killing = asyncio.create_task(self._killing.wait())
        awaited: list[asyncio.Future[Any]] = [child.ended, killing]
        await asyncio.wait(awaited, timeout=watch.service.stop_grace_s, return_when=asyncio.FIRST_COMPLETED)
        killing.cancel()
        if not child.ended.done():
            if not self._killing.is_set():
                self._announce(f"{watch.service.name} did not end in time: killed")
            await self._kill(watch.service, child)


async def _all_ready(watches: Sequence[_Watch]) -> None:
    for watch in watches:
        await watch.ready.wait()


def _without_os_errors(function: Callable[Args, None]) -> Callable[Args, None]:
    """Return ``function`` with OSErrors ignored: its reader may have gone."""

    def call(*args: Args.args, **kwargs: Args.kwargs) -> None:
        with contextlib.suppress(OSError):
            function(*args, **kwargs)

    return call


async def _end_now(child: _Child) -> None:
    """End a child whose GPU context is lost: it has nothing to finish and no work on the GPU."""
    _send(child, signal.SIGTERM, signal.SIGCONT)
    await asyncio.wait([child.ended], timeout=LOST_CONTEXT_GRACE_S)
    _send(child, signal.SIGKILL)


def _has_terminal() -> bool:
    """Return whether this process has a controlling terminal that is still there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _send(child: _Child, *numbers: signal.Signals) -> None:
    """Send signals to a child that has not ended.

    ``Popen.send_signal`` would reap the child, which is the business of ``_reap``.
    """
    for number in numbers:
        if not child.ended.done():
            os.kill(child.process.pid, number)


def describe_status(status: int) -> str:
    """Return ``status 1``, or a signal's name for a negative status, as in subprocess."""
    if status in (CONTEXT_LOST_STATUS, ASSERTION_STATUS):
        return f"status {status}: its GPU context is lost"
    if status >= 0:
        return f"status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
