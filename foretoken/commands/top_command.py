"""Define ``foretoken top``."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import click

from foretoken.commands.client_commands import optional_operator_key_option, program, url_option

# A shell's exit status of a program that a signal has ended, less the signal's number.
_BY_SIGNAL = 128


@click.command()
@url_option
@optional_operator_key_option
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Seconds between two looks at the gateway.",
)
@click.option("--once", is_flag=True, help="Print one picture, of one interval, and end; so also without a terminal.")
def top(url: str, key_file: Path | None, interval: float, once: bool) -> None:
    """Show a running gateway's figures: load, latency, speculation, caches. Ctrl-C ends it.

    It shows the dashboard's figures, over the last 10 seconds. The environment variable
    FORETOKEN_API_KEY holds the key of a gateway that needs one.
    """
    from rich.console import Console

    from foretoken.commands.gateway_reader import GatewayReader
    from foretoken.commands.top import show_live, show_once
    from foretoken.errors import UnavailableError
    from foretoken.operator_key import read_operator_key

    # A terminal must get its screen back.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(_BY_SIGNAL + number))
    console = Console(highlight=False, markup=False, emoji=False)
    is_live = sys.stdout.isatty() and not console.is_dumb_terminal and not once
    key = "" if key_file is None else read_operator_key(key_file)
    try:
        with GatewayReader(url, key) as gateway:
            (show_live if is_live else show_once)(gateway, console, interval)
    except UnavailableError as error:
        start = f"start a server with: {program()} serve MODEL; or name a running one with --url"
        raise UnavailableError(f"{error}; {start}") from None
    except KeyboardInterrupt:
        sys.exit(_BY_SIGNAL + signal.SIGINT)
