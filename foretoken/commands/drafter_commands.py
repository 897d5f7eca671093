"""``foretoken drafters``: the operator's commands."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from foretoken import flags
from foretoken.commands.client_commands import program, say

if TYPE_CHECKING:
    from foretoken.commands.drafters_client import DrafterOf, DraftersClient

app = typer.Typer(help="Drafters of a running server: attached and detached while it serves.", no_args_is_help=True)

# Exit status of an ``attach`` that the server took, but that nothing has answered yet: neither success nor a refusal.
NOT_ATTACHED_YET = 3

Name = Annotated[str, typer.Argument(help="Name of the drafter.")]
Address = Annotated[str, typer.Argument(help="Where it serves, as its verifier reaches it: unix:/path or host:port.")]
Transport = Annotated[
    Literal["auto", "shared-memory", "grpc"], typer.Option(help="How drafts travel; auto: by the kind of address.")
]
Verifier = Annotated[
    str, typer.Option(metavar="ADDRESS", help="One verifier, as the gateway calls it.", show_default="all")
]


@app.command("list")
def list_drafters(
    key_file: flags.OperatorKeyFile,
    url: flags.Url = flags.DEFAULT_URL,
    verifier: Verifier = "",
    as_json: Annotated[bool, typer.Option("--json", help="For programs: a list of objects.")] = False,
) -> None:
    """Drafters of all verifiers, the detached ones too."""
    with _client(url, key_file) as client:
        drafters = client.list(verifier)
    if as_json:
        print(json.dumps([drafter._asdict() for drafter in drafters], indent=2))
    else:
        _show(drafters)


@app.command()
def attach(
    name: Name,
    address: Address,
    key_file: flags.OperatorKeyFile,
    url: flags.Url = flags.DEFAULT_URL,
    transport: Transport = "auto",
    verifier: Verifier = "",
) -> None:
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
        raise typer.Exit(NOT_ATTACHED_YET)


@app.command()
def detach(
    name: Name, key_file: flags.OperatorKeyFile, url: flags.Url = flags.DEFAULT_URL, verifier: Verifier = ""
) -> None:
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
