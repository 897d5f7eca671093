"""Define the operator's commands for drafters: ``foretoken drafters``."""

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

# Exit status of ``attach`` when the server accepted it, but no drafter has answered yet.
NOT_ATTACHED_YET = 3

name_argument = click.argument("name", metavar="NAME", help="Name of the drafter.")
verifier_option = click.option(
    "--verifier", metavar="ADDRESS", default="", show_default="all", help="Verifier, by the gateway's address for it."
)


@click.group("drafters")
def app() -> None:
    """List, attach and detach a running server's drafters."""


@app.command("list")
@operator_key_option
@url_option
@verifier_option
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of objects.")
def list_drafters(key_file: Path, url: str, verifier: str, as_json: bool) -> None:
    """List the drafters of all verifiers, detached ones included."""
    with _client(url, key_file) as client:
        drafters = client.list(verifier)
    if as_json:
        print(json.dumps([drafter._asdict() for drafter in drafters], indent=2))
    else:
        _show(drafters)


@app.command()
@name_argument
@click.argument("address", metavar="ADDRESS", help="Address at which the verifier reaches it: unix:/path or host:port.")
@operator_key_option
@url_option
@click.option(
    "--transport",
    type=click.Choice(("auto", "shared-memory", "grpc")),
    default="auto",
    show_default=True,
    help="How to transfer drafts; auto: by the kind of address.",
)
@verifier_option
def attach(name: str, address: str, key_file: Path, url: str, transport: str, verifier: str) -> None:
    """Attach a running drafter, and print its state. Requests may name it from now on.

    A drafter that is attached already stays as it is. A name that belongs to another one is
    refused. The exit status is 0 if it is attached to every verifier named, 1 if the server refused
    it, and 3 if it is not attached yet: the server retries until it is attached or detached.
    """
    with _client(url, key_file) as client:
        before = {drafter for drafter in client.list(verifier) if drafter.state == "attached"}
        client.attach(name, address, transport, verifier)
        drafters = client.outcome(name, verifier)
    _show(drafters)
    if drafters and before.issuperset(drafters):
        say(f"{name} was attached already: nothing has changed")
    if any(drafter.state != "attached" for drafter in drafters):
        there = f"--url {shlex.quote(url)} --admin-api-key-file {shlex.quote(str(key_file))}"
        say(
            f"{name} is known to the server but not attached yet; the server keeps trying. {program()} drafters list "
            f"{there} shows its state, {program()} drafters detach {name} {there} stops the attempts"
        )
        sys.exit(NOT_ATTACHED_YET)


@app.command()
@name_argument
@operator_key_option
@url_option
@verifier_option
def detach(name: str, key_file: Path, url: str, verifier: str) -> None:
    """Detach a drafter; running requests continue."""
    with _client(url, key_file) as client:
        client.detach(name, verifier)
    print(f"{name}: detached")


def _client(url: str, key_file: Path) -> DraftersClient:
    from foretoken.commands.drafters_client import DraftersClient
    from foretoken.operator_key import read_operator_key

    return DraftersClient(url, read_operator_key(key_file))


def _show(drafters: list[DrafterOf]) -> None:
    for drafter in drafters:
        kind = f" {drafter.algorithm}" if drafter.algorithm else ""
        place = f" at {drafter.address}" if drafter.address else ""
        reason = f" ({drafter.reason})" if drafter.reason else ""
        # A space after the address makes it easy to copy.
        print(
            f"{drafter.name}: {drafter.state}{reason},{kind} over {drafter.transport}{place} for the verifier at "
            f"{drafter.verifier}"
        )
