"""Run the verifiers of ``foretoken serve --executor ray``, which starts this process."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

import ray

from foretoken import liveness, rpc
from foretoken.commands.client_commands import say
from foretoken.ray.actors import Order, keep_verifiers
from foretoken.ray.verifier_process import EndedError
from foretoken.telemetry import configure_logging


def main() -> int:
    options, words = _parse()
    configure_logging("verifiers", options.log_level)
    # Its workers would give way to every other process of the machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Ray would report to its makers which of its features are used.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Without an address Ray starts a cluster of this machine, which ends with this process.
    ray.init(address=options.ray_address, logging_level=options.log_level.upper())
    try:
        return asyncio.run(_run(options, words))
    finally:
        ray.shutdown()


async def _run(options: argparse.Namespace, words: list[str]) -> int:
    token = None if options.link_token_file is None else options.link_token_file.read_text()
    # Of a process that was killed.
    options.file.unlink(missing_ok=True)
    order = Order(options.name, options.num_verifiers, words, token)
    with rpc.stop_signals() as stop, liveness.answering(options.liveness_socket):
        try:
            await keep_verifiers(order, options.file, stop)
        except EndedError as error:
            say(str(error))
            return max(error.status, 1)
    return 0


def _parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="python -m foretoken.ray", description=__doc__)
    parser.add_argument("--name", required=True, help="what the verifiers' names on the dashboard begin with")
    parser.add_argument("--num-verifiers", type=int, required=True)
    parser.add_argument("--ray-address")
    parser.add_argument("--file", type=Path, required=True, help="where the verifiers' addresses are written")
    parser.add_argument("--liveness-socket", type=Path, required=True)
    parser.add_argument("--link-token-file", type=Path, help="a token for the verifiers, which read no file with it")
    parser.add_argument("--log-level", default="warning")
    parser.add_argument("words", nargs="+", help="after --: a command line of foretoken serve")
    options = parser.parse_args()
    return options, options.words


if __name__ == "__main__":
    sys.exit(main())
