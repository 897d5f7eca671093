"""``foretoken drafters``: the operator's commands."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from foretoken.commands.client_commands import operator_key_option, program, say, url_option

if TYPE_CHECKING:
    from foretoken.commands.drafters_client import DrafterOf, DraftersClient

# Exit status of an ``attach`` that the server took, but that nothing has answered yet: neither success nor a refusal.
NOT_ATTACHED_YET = 3

name_argument = click.argument("name", metavar="NAME", help="Name of the drafter.")
verifier_option = click.option(
    "--verifier", metavar="ADDRESS", default="", show_default="all", help="One verifier, as the gateway calls it."
)


@click.group("drafters")
def app() -> None:
    """Drafters of a running server: attached and detached while it serves."""


@app.command("list")
@operator_key_option
@url_option
@verifier_option
@click.option("--json", "as_json", is_flag=True, help="For programs: a list of objects.")
def list_drafters(key_file: Path, url: str, verifier: str, as_json: bool) -> None:
    """Drafters of all verifiers, the detached ones too."""
    with _client(url, key_file) as client:
        drafters = client.list(verifier)
    if as_json:
        print(json.dumps([drafter._asdict() for drafter in drafters], indent=2))
    else:
        _show(drafters)


@app.command()
@name_argument
@click.argument(
    "address", metavar="ADDRESS", help="Where it serves, as its verifier reaches it: unix:/path or host:port."
)
@operator_key_option
@url_option
@click.option(
    "--transport",
    type=click.Choice(("auto", "shared-memory", "grpc")),
    default="auto",
    show_default=True,
    help="How drafts travel; auto: by the kind of address.",
)
@verifier_option
def attach(name: str, address: str, key_file: Path, url: str, transport: str, verifier: str) -> None:
    """Attach a drafter that runs; requests may name it from now on. Prints what became of it.

    Exits with status 0 where it is attached to every verifier that was asked, with 3 where it is not yet: the server
    keeps it, and tries again until it is attached or detached. What the server refused has status 1.
    """
    with _client(url, key_file) as client:
        client.attach(name, address, transport, verifier)
        drafters = client.outcome(name, verifier)
    _show(drafters)
    if any(drafter.state != "attached" for drafter in drafters):
        there = f"--url {shlex.quote(url)} --admin-api-key-file {shlex.quote(str(key_file))}"
        say(
            f"{name} is known to the server but not attached yet: it is tried again until it is; {program()} "
            f"drafters list {there} says how it stands, {program()} drafters detach {name} {there} gives it up"
        )
        sys.exit(NOT_ATTACHED_YET)


@app.command()
@name_argument
@operator_key_option
@url_option
@verifier_option
def detach(name: str, key_file: Path, url: str, verifier: str) -> None:
    """Do without a drafter; running requests go on."""
    with _client(url, key_file) as client:
        client.detach(name, verifier)
    print(f"{name}: detached")


def _client(url: str, key_file: Path) -> DraftersClient:
    from foretoken.commands.drafters_client import DraftersClient
    from foretoken.commands.operator_client import read_key

    return DraftersClient(url, read_key(key_file))


def _show(drafters: list[DrafterOf]) -> None:
    for drafter in drafters:
        kind = f" {drafter.algorithm}" if drafter.algorithm else ""
        place = f" at {drafter.address}" if drafter.address else ""
        reason = f" ({drafter.reason})" if drafter.reason else ""
        # An address ends at a space, so that it can be copied.
        print(
            f"{drafter.name}: {drafter.state}{reason},{kind} over {drafter.transport}{place} for the verifier at "
            f"{drafter.verifier}"
        )
