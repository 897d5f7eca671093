"""``make chaos``: anything may die, and no client may notice more than a pause.

    python -m tests.chaos --seconds 60 --seed 1 [--processes verifier,drafter] [--json FILE] [--bars]
    python -m tests.chaos --device cuda --seconds 60 -- --mps off
    python -m tests.chaos --seed 1 --only 17

It starts ``foretoken serve`` on the demo model and sends every request of a pool once undisturbed.
Then it sends them over and over while processes are killed, stopped and paused and clients go away.
The exit status is 1 if a token was changed, lost or doubled, a block leaked, a client got an error,
or fewer processes died than were scheduled.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_args

import uvloop

from tests.chaos import report, resources
from tests.chaos.answer import Answer
from tests.chaos.client import Record
from tests.chaos.device import DEVICES, Device
from tests.chaos.killer import Killer
from tests.chaos.load import Judge, Load, ask_each
from tests.chaos.report import Run
from tests.chaos.requests import Material, Request, draw_requests, with_stop
from tests.chaos.schedule import DRAFTERS, Process, Strike, draw_schedule, num_deaths
from tests.chaos.stack import MODEL, Stack, StackError
from tests.chaos.watcher import Watcher

LEAST_REQUESTS, MOST_REQUESTS = 48, 150


class OracleError(Exception):
    """A request failed although nothing disturbed it."""


def main() -> None:
    options = _parse()
    try:
        failed = uvloop.run(_replay(options) if options.only is not None else _chaos(options))
    except (StackError, OracleError) as error:
        _say(f"failed: {error}")
        sys.exit(1)
    sys.exit(int(failed))


async def _chaos(options: argparse.Namespace) -> bool:
    """Run the chaos; return whether anything is wrong."""
    device: Device = options.device
    drawn = draw_schedule(options.seconds, options.seed, device.seconds_per_death)
    strikes = [strike for strike in drawn if strike.process in options.processes]
    count = min(max(round(options.seconds), LEAST_REQUESTS), MOST_REQUESTS)
    requests = draw_requests(count, options.seed, Material.load(MODEL, options.seed))
    began = time.monotonic()
    stack = await Stack.start(device, _flags(options, strikes))
    try:
        async with Watcher(stack.verifier_address).running() as watcher:
            if not await watcher.wait_attached(device.attached_s):
                raise StackError(f"no drafters were attached within {device.attached_s:g} s:\n{stack.log_tail()}")
            _say(f"ready after {time.monotonic() - began:.0f} s; asking {count} requests undisturbed")
            requests, expected = await _ask_undisturbed(stack, requests, options.seed)
            run = await _disturb(stack, watcher, requests, expected, strikes, options)
        run.tracebacks = report.find_tracebacks(stack.log_text())
        try:
            run.stop_s = await stack.stop()
        except StackError as error:
            run.failures.append(str(error))
    finally:
        if options.log is not None:
            options.log.write_text(stack.log_text())
        stack.kill()
    run.took_s = time.monotonic() - began
    faults = run.faults(bars=options.bars)
    print(report.to_text(run, faults))
    if options.json is not None:
        options.json.write_text(report.to_json(run, faults))
    return bool(faults)


async def _ask_undisturbed(
    stack: Stack, requests: Sequence[Request], seed: int
) -> tuple[list[Request], dict[int, Answer]]:
    """Return the requests, now with stop strings that match, and their answers."""
    records = await ask_each(stack.url, stack.grpc_address, requests, stack.device.num_clients)
    _check_undisturbed(records.values())
    final = [
        with_stop(request, records[request.number].answer, seed) if request.wants_stop else request
        for request in requests
    ]
    changed = [request for request in final if request.wants_stop]
    again = await ask_each(stack.url, stack.grpc_address, changed, stack.device.num_clients)
    _check_undisturbed(again.values())
    return final, {number: record.answer for number, record in (records | again).items()}


def _check_undisturbed(records: Iterable[Record]) -> None:
    for record in records:
        answer = record.answer
        unfinished = [index for index, choice in answer.choices.items() if choice.num_finishes != 1]
        if record.outcome != "done" or answer.violations or not answer.ended or not answer.choices or unfinished:
            said = f"{record.outcome}: {record.error}, {answer.violations}, unfinished choices {unfinished}"
            raise OracleError(
                f"request {record.request.number}, undisturbed: {said}\n{json.dumps(record.request.body)}"
            )


async def _disturb(
    stack: Stack,
    watcher: Watcher,
    requests: Sequence[Request],
    expected: dict[int, Answer],
    strikes: Sequence[Strike],
    options: argparse.Namespace,
) -> Run:
    """Run the chaos itself, and wait for the peace after it."""
    failures = []
    sample, num_in_gateway = await resources.idle_sample(stack, watcher)
    if sample is None or not sample.is_idle or num_in_gateway != 0:
        failures.append(f"not idle before the first strike: {sample}, {num_in_gateway:g} requests in the gateway")
    before, epochs_before = resources.holdings(stack), dict(watcher.epochs)
    acceptance_before = watcher.acceptance()
    device = stack.device
    killer = Killer(stack, watcher, strikes, device.recovery_s)
    judge = Judge(expected, options.seed, killer.excuses, device.name)
    load = Load(stack.url, stack.grpc_address, requests, judge, options.seed, killer.gateway_up, device.patience_s)
    _say(f"{len(strikes)} strikes in {options.seconds:g} s, {device.num_clients} clients")
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(load.run(device.num_clients, stop))
        until = asyncio.create_task(asyncio.sleep(options.seconds))
        await killer.run()
        await until
        stop.set()
    _say("waiting for peace")
    sample, num_in_gateway = await resources.idle_sample(stack, watcher)
    after, leaks = await resources.settled_holdings(stack, before)
    return Run(
        seconds=options.seconds,
        seed=options.seed,
        num_requests=len(requests),
        took_s=0.0,
        blows=killer.blows,
        num_scheduled={process: num_deaths(strikes, process) for process in ("verifier", *DRAFTERS, "gateway")},
        tally=judge.tally,
        acceptance_before=acceptance_before,
        acceptance=watcher.acceptance(epochs_before),
        num_proofs=watcher.num_proofs,
        last_sample=sample,
        num_requests_at_end=num_in_gateway,
        holdings_before=before,
        holdings=after,
        tracebacks=(0, ""),
        device=device.name,
        steps=watcher.steps(epochs_before),
        leaks=leaks,
        failures=failures + killer.failures,
    )


async def _replay(options: argparse.Namespace) -> bool:
    """Send one request of the pool alone, undisturbed; print it and its answer."""
    requests = draw_requests(options.only + 1, options.seed, Material.load(MODEL, options.seed))[-1:]
    stack = await Stack.start(options.device, _flags(options, []))
    try:
        (request,), answers = await _ask_undisturbed(stack, requests, options.seed)
        await stack.stop()
    finally:
        stack.kill()
    print(json.dumps({"request": dataclasses.asdict(request), "answer": dataclasses.asdict(answers[request.number])}))
    return False


def _flags(options: argparse.Namespace, strikes: Sequence[Strike]) -> list[str]:
    """Return flags of ``foretoken serve`` with which every stream survives all ``strikes``."""
    return [*options.device.serve_flags(num_deaths(strikes, "verifier")), *options.serve_flags]


def _parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="how long processes are struck (default 60)")
    parser.add_argument("--seed", type=int, default=1, help="of requests, schedule and clients (default 1)")
    parser.add_argument(
        "--processes", type=_processes, default=get_args(Process), help="strike only these, separated by commas"
    )
    parser.add_argument("--only", type=int, metavar="NUMBER", help="ask one request undisturbed and print its answer")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--log", type=Path, metavar="FILE", help="write the log of foretoken serve there")
    parser.add_argument("--bars", action="store_true", help="fail if the median waits after deaths miss their bars")
    parser.add_argument(
        "--device",
        type=_device,
        default="cpu",
        metavar="{" + ",".join(DEVICES) + "}",
        help="where the models run; cuda: 16 clients, fewer deaths, longer times (default cpu)",
    )
    parser.add_argument("--clients", type=int, metavar="NUMBER", help="clients at the same time (default by device)")
    parser.add_argument("serve_flags", nargs="*", metavar="FLAG", help="after --: more flags of foretoken serve")
    options = parser.parse_args(arguments)
    if options.seconds <= 0:
        parser.error("--seconds must be positive")
    if options.bars and options.device.name != "cpu":
        parser.error("--bars: there are bars for a CPU only")
    if options.clients is not None:
        if options.clients <= 0:
            parser.error("--clients must be positive")
        options.device = dataclasses.replace(options.device, num_clients=options.clients)
    return options


def _device(name: str) -> Device:
    if name not in DEVICES:
        raise argparse.ArgumentTypeError(f"{name}: expected {' or '.join(DEVICES)}")
    return DEVICES[name]


def _processes(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = set(names) - set(get_args(Process))
    if unknown:
        raise argparse.ArgumentTypeError(
            f"{', '.join(sorted(unknown))}: expected some of {', '.join(get_args(Process))}"
        )
    return names


def _say(line: str) -> None:
    print(f"chaos: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
