"""``make chaos``: anything may die, and no client may notice more than a pause.

    python -m tests.chaos --seconds 60 --seed 1 [--processes verifier,drafter] [--json FILE] [--bars]
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
from tests.chaos.killer import Killer
from tests.chaos.load import Judge, Load, ask_each
from tests.chaos.report import Run
from tests.chaos.requests import Material, Request, draw_requests, with_stop
from tests.chaos.schedule import DRAFTERS, Process, Strike, draw_schedule, num_deaths
from tests.chaos.stack import MODEL, Stack, StackError
from tests.chaos.watcher import Watcher

NUM_CLIENTS = 12
ATTACHED_WITHIN_S = 30.0
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
    strikes = [strike for strike in draw_schedule(options.seconds, options.seed) if strike.process in options.processes]
    count = min(max(round(options.seconds), LEAST_REQUESTS), MOST_REQUESTS)
    requests = draw_requests(count, options.seed, Material.load(MODEL, options.seed))
    began = time.monotonic()
    stack = await Stack.start(_flags(strikes))
    try:
        async with Watcher(stack.verifier_address).running() as watcher:
            if not await watcher.wait_attached(ATTACHED_WITHIN_S):
                raise StackError(f"the drafter was not attached within {ATTACHED_WITHIN_S:g} s:\n{stack.log_tail()}")
            _say(f"ready after {time.monotonic() - began:.0f} s; asking {count} requests undisturbed")
            requests, expected = await _ask_undisturbed(stack, requests, options.seed)
            run = await _disturb(stack, watcher, requests, expected, strikes, options)
        run.num_tracebacks = stack.log_text().count("Traceback (most recent call last)")
        try:
            run.stop_s = await stack.stop()
        except StackError as error:
            run.failures.append(str(error))
    finally:
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
    records = await ask_each(stack.url, stack.grpc_address, requests, NUM_CLIENTS)
    _check_undisturbed(records.values())
    final = [
        with_stop(request, records[request.number].answer, seed) if request.wants_stop else request
        for request in requests
    ]
    changed = [request for request in final if request.wants_stop]
    again = await ask_each(stack.url, stack.grpc_address, changed, NUM_CLIENTS)
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
    killer = Killer(stack, watcher, strikes)
    judge = Judge(expected, options.seed, killer.excuses)
    load = Load(stack.url, stack.grpc_address, requests, judge, options.seed, killer.gateway_up)
    _say(f"{len(strikes)} strikes in {options.seconds:g} s, {NUM_CLIENTS} clients")
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(load.run(NUM_CLIENTS, stop))
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
        num_tracebacks=0,
        leaks=leaks,
        failures=failures + killer.failures,
    )


async def _replay(options: argparse.Namespace) -> bool:
    """Send one request of the pool alone, undisturbed; print it and its answer."""
    requests = draw_requests(options.only + 1, options.seed, Material.load(MODEL, options.seed))[-1:]
    stack = await Stack.start(_flags([]))
    try:
        (request,), answers = await _ask_undisturbed(stack, requests, options.seed)
        await stack.stop()
    finally:
        stack.kill()
    print(json.dumps({"request": dataclasses.asdict(request), "answer": dataclasses.asdict(answers[request.number])}))
    return False


def _flags(strikes: Sequence[Strike]) -> list[str]:
    """Return flags of ``foretoken serve`` with which every stream survives all ``strikes``."""
    return ["--resume-attempts", str(num_deaths(strikes, "verifier") + 10), "--verifier-wait", "120"]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="how long processes are struck (default 60)")
    parser.add_argument("--seed", type=int, default=1, help="of requests, schedule and clients (default 1)")
    parser.add_argument(
        "--processes", type=_processes, default=get_args(Process), help="strike only these, separated by commas"
    )
    parser.add_argument("--only", type=int, metavar="NUMBER", help="ask one request undisturbed and print its answer")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--bars", action="store_true", help="fail if the median waits after deaths miss their bars")
    options = parser.parse_args()
    if options.seconds <= 0:
        parser.error("--seconds must be positive")
    return options


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
