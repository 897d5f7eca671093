"""Define the commands that talk to running services."""

from __future__ import annotations

import functools
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

DEFAULT_URL = "http://127.0.0.1:8000"
url_option = click.option(
    "--url",
    envvar="FORETOKEN_URL",
    show_envvar=True,
    default=DEFAULT_URL,
    show_default=True,
    help="URL of the gateway. The environment variable SSL_CERT_FILE names roots to check an https one by.",
)
_operator_key = functools.partial(
    click.option,
    "--admin-api-key-file",
    "key_file",
    type=click.Path(path_type=Path),
    envvar="FORETOKEN_ADMIN_API_KEY_FILE",
    show_envvar=True,
)
operator_key_option = _operator_key(required=True, help="File with the operator's key.")
optional_operator_key_option = _operator_key(
    show_default="none", help="File with the operator's key: shows the last requests, too."
)


def say(line: str) -> None:
    """Print one line to stderr, with the program's name."""
    print(f"foretoken: {line}", file=sys.stderr, flush=True)


def program() -> str:
    """Return this program as the user called it, quoted for a shell."""
    called = Path(sys.argv[0])
    return shlex.quote(sys.argv[0]) if called.name == "foretoken" else "foretoken"


Command = TypeVar("Command", bound=Callable[..., Any])


def _link_file(flag: str, text: str) -> Callable[[Command], Command]:
    """Return a decorator that adds an option with a file."""
    return click.option(flag, metavar="PATH", type=click.Path(path_type=Path), show_default="no TLS", help=text)


@click.command()
@click.argument("address", metavar="ADDRESS", help="unix:/path or host:port of a gRPC server.")
@click.option(
    "--service",
    metavar="NAME",
    default="",
    show_default="none: does the server answer?",
    help="Full name of the service that must be ready.",
)
@_link_file("--link-certfile", "Certificate chain (PEM) to show a service with certificates.")
@_link_file("--link-keyfile", "Private key (PEM) of --link-certfile.")
@_link_file("--link-ca", "Certificate (PEM) of the authority that signs the service's certificate.")
def probe(address: str, service: str, **link_files: Path | None) -> None:
    """Check whether a service is ready.

    The exit status is 0 if grpc.health.v1 at ADDRESS says so, else 1. No token is needed.
    """
    import asyncio

    from foretoken import probes
    from foretoken.common_settings import LinkSettings
    from foretoken.config import build
    from foretoken.links import read_credentials

    credentials = read_credentials(build(LinkSettings, link_files))

    async def ask() -> bool:
        probe = probes.GrpcProbe(address, service, credentials)
        try:
            return await probe.is_ready()
        finally:
            await probe.close()

    if not asyncio.run(ask()):
        say(f"{service or 'the server'} at {address} is not serving")
        sys.exit(1)


@click.command()
@click.argument("prompt", metavar="PROMPT", help="Text to continue; -: read it from standard input.")
@url_option
@click.option("--max-tokens", default=128, show_default=True, help="Most tokens to write.")
@click.option("--temperature", type=float, show_default="the server's", help="0 is greedy.")
@click.option("--seed", type=int, show_default="random", help="Repeat a seed to repeat the text.")
@click.option("--no-speculation", is_flag=True, help="Plain decode for this request.")
@click.option("--drafter", show_default="the server's", help="Name of the drafter.")
def complete(
    prompt: str,
    url: str,
    max_tokens: int,
    temperature: float | None,
    seed: int | None,
    no_speculation: bool,
    drafter: str | None,
) -> None:
    """Stream a completion; accepted draft tokens are green.

    The environment variable FORETOKEN_API_KEY holds the key of a gateway that needs one.
    """
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


COMMANDS = (probe, complete)
