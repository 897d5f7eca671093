"""Commands that talk to running services, and the words in which the program speaks to its user."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from foretoken import flags


def add_commands(app: typer.Typer) -> None:
    """Give ``app`` the commands of this module."""
    app.command()(probe)
    app.command()(complete)


def say(line: str) -> None:
    """One line of ours on stderr."""
    print(f"foretoken: {line}", file=sys.stderr, flush=True)


def program() -> str:
    """How the user called this program, to be copied into a shell."""
    called = Path(sys.argv[0])
    return shlex.quote(sys.argv[0]) if called.name == "foretoken" else "foretoken"


def probe(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="unix:/path or host:port of a gRPC server.")],
    service: Annotated[
        str,
        typer.Option(
            help="Full name of a service: is it ready?", show_default="none: does the server answer?", metavar="NAME"
        ),
    ] = "",
) -> None:
    """Exit with status 0 if a service is ready, as grpc.health.v1 at ADDRESS says, else with 1."""
    import asyncio

    from foretoken import probes

    async def ask() -> bool:
        probe = probes.GrpcProbe(address, service)
        try:
            return await probe.is_ready()
        finally:
            await probe.close()

    if not asyncio.run(ask()):
        say(f"{service or 'the server'} at {address} is not serving")
        raise typer.Exit(1)


def complete(
    prompt: Annotated[str, typer.Argument(help="Text to go on from; -: what comes on standard input.")],
    url: flags.Url = flags.DEFAULT_URL,
    max_tokens: Annotated[int, typer.Option(help="Tokens to write at most.")] = 128,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.", show_default="the server's")] = None,
    seed: Annotated[int | None, typer.Option(help="For the same text again.", show_default="random")] = None,
    no_speculation: Annotated[bool, typer.Option("--no-speculation", help="Plain decode for this request.")] = False,
    drafter: Annotated[str | None, typer.Option(help="Name of the drafter.", show_default="the server's")] = None,
) -> None:
    """Stream a completion in the terminal; accepted draft tokens are green."""
    from foretoken.commands.complete import CompletionOptions, dim
    from foretoken.commands.complete import complete as stream
    from foretoken.errors import ConfigError, UnavailableError

    if no_speculation and drafter is not None:
        raise ConfigError("--no-speculation and --drafter exclude each other")
    prompt = sys.stdin.read() if prompt == "-" else prompt
    options = CompletionOptions(prompt, max_tokens, temperature, seed, not no_speculation, drafter)
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    try:
        figures = stream(url, options, write=_write, colour=colour)
    except UnavailableError as error:
        start = f"start a server with: make serve, or: {program()} serve MODEL; or name a running one with --url"
        raise UnavailableError(f"{error}; {start}") from None
    _write("\n")
    print(dim(figures) if sys.stderr.isatty() and not os.environ.get("NO_COLOR") else figures, file=sys.stderr)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
